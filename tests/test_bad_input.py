"""What a broken checkpoint gets: one line that names it, exit code 1, and no whole output."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5q import names
from glm5q.config import parse_config
from tests import small
from tests.commands import INDEX, Tensors, copy, edit_json, edit_shard, looks_whole, refused, run

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_checkpoint(tmp_path_factory.mktemp("whole") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


@pytest.fixture
def source(whole: Path, tmp_path: Path) -> Path:
    return copy(whole, tmp_path / "source")


def calibration_refused(source: Path, text: Path, *says: str) -> str:
    output = source.parent / "output"
    line = refused(
        "calibrate", source, "--recipe", "h200", "--data", text, "--windows", "8",
        "--sequence-length", "64", "--eval-windows", "2", "--output", output, says=says,
    )  # fmt: skip
    assert not looks_whole(output)
    return line


def holding(source: Path, name: str) -> Path:
    weight_map: dict[str, str] = json.loads((source / INDEX).read_text())["weight_map"]
    return source / weight_map[name]


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


@pytest.mark.parametrize("size", [0, 4, 8, 200, -200000, -1])
def test_truncated_shard(source: Path, text: Path, size: int) -> None:
    truncate(source / SECOND, size)
    calibration_refused(source, text, SECOND, "not a whole safetensors file", "fetch")


def test_shard_with_bytes_after_its_end(source: Path, text: Path) -> None:
    with (source / FIRST).open("ab") as file:
        file.write(b"\0")
    calibration_refused(source, text, FIRST, "not a whole safetensors file")


def test_file_that_is_not_safetensors(source: Path, text: Path) -> None:
    (source / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n" * 3)
    calibration_refused(source, text, FIRST, "not a whole safetensors file")


def test_empty_safetensors(source: Path, text: Path) -> None:
    save_file({}, source / FIRST)
    calibration_refused(source, text, FIRST, "the index says so")


def test_shard_missing_that_the_index_names(source: Path, text: Path) -> None:
    (source / SECOND).unlink()
    calibration_refused(source, text, SECOND, "missing", "fetch this shard")


def test_dangling_link_of_a_download_cache(source: Path, text: Path) -> None:
    (source / SECOND).unlink()
    (source / SECOND).symlink_to(source.parent / "blobs" / "gone")
    calibration_refused(source, text, SECOND, "missing")


def test_links_of_a_download_cache_are_followed(source: Path) -> None:
    for shard in source.glob("*.safetensors"):
        blob = shard.rename(source.parent / f"blob-{shard.name}")
        shard.symlink_to(blob)
    assert run("inspect", source).exit_code == 0


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b.safetensors", "x" * 5000]
)
def test_index_naming_files_elsewhere(source: Path, text: Path, file: str) -> None:
    edit_json(source / INDEX, lambda index: index["weight_map"].update({Q_A: file}))
    line = calibration_refused(source, text, INDEX)
    assert len(line) < 1000


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", "null", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"metadata": {}}',
        '{"weight_map": {"a": null}}', "\xff", "[" * 100_000,
        '{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}',
    ],
)  # fmt: skip
def test_unreadable_index(source: Path, text: Path, content: str) -> None:
    (source / INDEX).write_text(content, encoding="latin-1")
    calibration_refused(source, text, INDEX, "fetch")


def test_index_that_is_a_folder(source: Path, text: Path) -> None:
    (source / INDEX).unlink()
    (source / INDEX).mkdir()
    calibration_refused(source, text, INDEX)


def test_tensor_missing_from_files_and_index(source: Path, text: Path) -> None:
    edit_shard(holding(source, EXPERT), lambda tensors: tensors.__delitem__(EXPERT))
    edit_json(source / INDEX, lambda index: index["weight_map"].__delitem__(EXPERT))
    calibration_refused(source, text, EXPERT, "missing")


def test_tensor_missing_from_its_file(source: Path, text: Path) -> None:
    file = holding(source, EXPERT)
    edit_shard(file, lambda tensors: tensors.__delitem__(EXPERT))
    calibration_refused(source, text, EXPERT, file.name, "the index says so")


def test_tensor_in_two_shards(source: Path, text: Path) -> None:
    mine = holding(source, EXPERT)
    other = source / (SECOND if mine.name == FIRST else FIRST)
    value = load_file(mine)[EXPERT]
    edit_shard(other, lambda tensors: tensors.update({EXPERT: value}))
    calibration_refused(source, text, EXPERT, FIRST, SECOND)


def test_tensor_in_another_shard_than_the_index_says(source: Path, text: Path) -> None:
    mine = holding(source, EXPERT).name
    other = SECOND if mine == FIRST else FIRST
    edit_json(source / INDEX, lambda index: index["weight_map"].update({EXPERT: other}))
    calibration_refused(source, text, EXPERT, INDEX, FIRST, SECOND)


CHANGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "transposed": (Q_A, lambda t: t.T.contiguous(), "shape [128, 64]"),
    "a row short": (EXPERT, lambda t: t[1:].clone(), "shape [127, 128]"),
    "scalar": (names.FINAL_NORM, lambda t: t[0].clone(), "shape []"),
    "no rows": (Q_A, lambda t: t[:0].clone(), "shape [0, 128]"),
    "flattened": (Q_A, lambda t: t.flatten(), "shape [8192]"),
    "int8": (Q_A, lambda t: t.to(torch.int8), "dtype I8"),
    "float64": (Q_A, lambda t: t.double(), "dtype F64"),
    "fp8 norm": (names.FINAL_NORM, lambda t: t.to(torch.float8_e4m3fn), "dtype F8_E4M3"),
    "fp8 of the other kind": (Q_A, lambda t: t.to(torch.float8_e5m2), "dtype F8_E5M2"),
    "boolean": (names.FINAL_NORM, lambda t: t > 0, "dtype BOOL"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_shape_or_dtype(source: Path, text: Path, change: str) -> None:
    name, make, says = CHANGES[change]
    file = holding(source, name)
    edit_shard(file, lambda tensors: tensors.update({name: make(tensors[name])}))
    calibration_refused(source, text, file.name, name, says)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.9.input_layernorm.weight",
        "visual.patch_embed.weight",
        "model.layers.1.mlp.bias",
    ],
)
def test_unexpected_tensor(source: Path, text: Path, name: str) -> None:
    edit_shard(source / FIRST, lambda tensors: tensors.update({name: torch.ones(4)}))
    calibration_refused(source, text, FIRST, f"unexpected tensor {name}", "config.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name",
    [names.EMBEDDING, EXPERT, names.FINAL_NORM, "model.layers.1.mlp.gate.e_score_correction_bias"],
)
def test_value_that_is_not_finite(source: Path, text: Path, name: str, value: float) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    file = holding(source, name)
    edit_shard(file, spoil)
    calibration_refused(source, text, file.name, name, "not finite")


def test_finite_weights_that_overflow(source: Path, text: Path) -> None:
    """A row of flipped exponent bits: the scan lets it by, the forward finds it."""
    name = "model.layers.1.self_attn.o_proj.weight"
    edit_shard(holding(source, name), lambda tensors: tensors[name][0].fill_(3e38))
    calibration_refused(source, text, "layer 1", "not finite")


def test_checkpoint_that_is_not_there(tmp_path: Path, text: Path) -> None:
    calibration_refused(tmp_path / "absent", text, "absent", "no such folder")


def test_file_as_checkpoint(source: Path, text: Path) -> None:
    calibration_refused(source / FIRST, text, FIRST, "no such folder")


def test_folder_without_weights(source: Path, text: Path) -> None:
    for file in source.glob("*.safetensors*"):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"PK")
    calibration_refused(source, text, "neither", "safetensors")


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "bitsandbytes", 5, ["fp8"]])
def test_already_quantized_source(source: Path, text: Path, method: object) -> None:
    change = {"quantization_config": {"quant_method": method}}
    edit_json(source / "config.json", lambda raw: raw.update(change))
    calibration_refused(source, text, "config.json", "quant_method", str(method))


def test_config_of_another_size(source: Path, text: Path) -> None:
    edit_json(source / "config.json", lambda raw: raw.update(hidden_size=256))
    calibration_refused(source, text, "model.embed_tokens.weight", "shape [256, 128]", "[256, 256]")


def test_config_with_more_layers(source: Path, text: Path) -> None:
    edit_json(source / "config.json", lambda raw: raw.update(num_hidden_layers=4))
    calibration_refused(source, text, "model.layers.", "missing", "config.json")


def test_tied_embeddings_need_no_head(source: Path, text: Path) -> None:
    edit_json(source / "config.json", lambda raw: raw.update(tie_word_embeddings=True))
    edit_shard(holding(source, names.LM_HEAD), lambda tensors: tensors.__delitem__(names.LM_HEAD))
    edit_json(source / INDEX, lambda index: index["weight_map"].__delitem__(names.LM_HEAD))
    assert run("inspect", source).exit_code == 0
    edit_json(source / "config.json", lambda raw: raw.update(tie_word_embeddings=False))
    calibration_refused(source, text, names.LM_HEAD, "missing")


# FP8 blocks and fused experts


def fp8_source(root: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = small.random_tensors(parse_config(small.GLM5))
    tensors[Q_A] = tensors[Q_A].to(torch.float8_e4m3fn)
    tensors[Q_A + "_scale_inv"] = torch.ones(1, 1)
    change(tensors)
    return small.write_checkpoint(root, tensors=tensors)


SCALES: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "missing": (lambda t: t.pop(Q_A + "_scale_inv"), ("_scale_inv is missing",)),
    "one block too many": (
        lambda t: t.update({Q_A + "_scale_inv": torch.ones(1, 2)}), ("shape [1, 2]",)
    ),
    "per channel": (
        lambda t: t.update({Q_A + "_scale_inv": torch.ones(64, 1)}), ("shape [64, 1]",)
    ),
    "without its weight": (lambda t: t.update({Q_A: t[Q_A].float()}), ("unexpected tensor",)),
    "fp8 itself": (
        lambda t: t.update({Q_A + "_scale_inv": torch.ones(1, 1).to(torch.float8_e4m3fn)}),
        ("dtype F8_E4M3",),
    ),
    "not finite": (
        lambda t: t.update({Q_A + "_scale_inv": torch.full((1, 1), torch.inf)}), ("not finite",)
    ),
    "overflowing": (
        lambda t: t.update({Q_A + "_scale_inv": torch.full((1, 1), 3e38)}), ("not finite",)
    ),
    "weight not a number": (lambda t: t[Q_A].view(torch.uint8)[3].fill_(0x7F), ("not finite",)),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALES)
def test_fp8_scales(tmp_path: Path, text: Path, case: str) -> None:
    change, says = SCALES[case]
    calibration_refused(fp8_source(tmp_path / "source", change), text, Q_A, *says)


def fuse(tensors: Tensors, layer: int = 1) -> None:
    names_of = [names.expert_name(layer, expert, "down_proj") + ".weight" for expert in range(8)]
    tensors[names.layer_prefix(layer) + names.DOWN] = torch.stack(
        [tensors.pop(n) for n in names_of]
    )


@pytest.mark.parametrize("shape", [(7, 128, 128), (8, 128, 64), (8, 16384), (128, 8, 128)])
def test_fused_experts_of_another_shape(tmp_path: Path, text: Path, shape: tuple[int, ...]) -> None:
    tensors = small.random_tensors(parse_config(small.GLM5))
    fuse(tensors)
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(shape)
    source = small.write_checkpoint(tmp_path / "source", tensors=tensors)
    calibration_refused(source, text, "model.layers.1.mlp.experts.down_proj", str(list(shape)))


def test_experts_fused_and_apart(tmp_path: Path, text: Path) -> None:
    tensors = small.random_tensors(parse_config(small.GLM5))
    apart = dict(tensors)
    fuse(tensors)
    source = small.write_checkpoint(tmp_path / "source", tensors=tensors | apart)
    calibration_refused(source, text, "unexpected tensor model.layers.1.mlp.experts.0.down_proj")
