"""Every way a GLM-5 checkpoint lies on disk gives the same layers; the next is read ahead."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glm5q import names, stream
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.config import parse_config
from glm5q.errors import CheckpointError
from glm5q.layer import Layer
from glm5q.pipeline import CalibrateOptions, calibrate
from tests import small
from tests.commands import Tensors
from tests.runs import RAW, own_recipe

FP8 = torch.float8_e4m3fn
# 160 + 24 rows in kv_a and 200 in q_a are no multiples of a block of 128.
ODD = small.GLM5 | {
    "kv_lora_rank": 160, "qk_rope_head_dim": 24, "q_lora_rank": 200, "moe_intermediate_size": 160,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "glm-5": small.GLM5,
    "glm-5.2, shared indexers": small.GLM52,
    "no mtp": small.NO_MTP,
    "odd sizes": ODD,
    "no shared expert": small.GLM5 | {"n_shared_experts": 0},
}


def expected_layer(tensors: Tensors, raw: dict[str, Any], number: int) -> Layer:
    """The layer put together by hand from the tensors that were written."""
    config = parse_config(raw)
    prefix = f"model.layers.{number}."
    vectors, matrices = {}, {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        path = name.removeprefix(prefix)
        if tensor.dim() == 1:
            vectors[path] = tensor
        elif ".experts." in path:
            experts.setdefault(path.split(".")[3], []).append(tensor)
        else:
            matrices[path.removesuffix(".weight")] = tensor
    if experts:
        pairs = zip(experts["gate_proj"], experts["up_proj"], strict=True)
        matrices[names.GATE_UP] = torch.stack([torch.cat(pair) for pair in pairs])
        matrices[names.DOWN] = torch.stack(experts["down_proj"])
        assert len(experts["down_proj"]) == config.n_routed_experts
    return Layer(number, vectors, dict(matrices))


def assert_same_layer(found: Layer, wanted: Layer) -> None:
    assert found.number == wanted.number
    assert found.vectors.keys() == wanted.vectors.keys()
    assert found.matrices.keys() == wanted.matrices.keys()
    for mine, theirs in ((found.vectors, wanted.vectors), (found.matrices, wanted.matrices)):
        for path, tensor in theirs.items():
            value = mine[path]
            assert isinstance(value, torch.Tensor)
            assert isinstance(tensor, torch.Tensor)
            assert value.dtype == tensor.dtype, path
            assert torch.equal(value, tensor), path


def assert_all_layers(checkpoint: Checkpoint, tensors: Tensors, raw: dict[str, Any]) -> None:
    for number in range(checkpoint.config.num_layers):
        assert_same_layer(checkpoint.layer(number), expected_layer(tensors, raw, number))
    for name, tensor in checkpoint.top().items():
        assert torch.equal(tensor, tensors[name])


def fused(tensors: Tensors, raw: dict[str, Any]) -> Tensors:
    """Experts stacked in one tensor a projection, as transformers writes them."""
    config = parse_config(raw)
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for number in range(config.num_layers):
        if config.moe[number]:
            layer = expected_layer(tensors, raw, number)
            for path in (names.GATE_UP, names.DOWN):
                stack = layer.matrices[path]
                assert isinstance(stack, torch.Tensor)
                result[names.layer_prefix(number) + path] = stack
    return result


def in_fp8(tensors: Tensors, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Returns (checkpoint in 128 x 128 blocks as GLM-5-FP8 has it, the float32 values it means)."""
    generator = torch.Generator().manual_seed(seed)
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        kept = ("gate.weight", "weights_proj.weight", "eh_proj.weight", "embed_tokens.weight")
        if tensor.dim() != 2 or name.endswith(kept) or name == names.LM_HEAD:
            continue
        rows, columns = tensor.shape
        codes = (tensor.float() * 100).to(FP8)
        scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
        stored[name], stored[name + "_scale_inv"] = codes, scale
        block = torch.arange(rows).unsqueeze(1) // 128, torch.arange(columns).unsqueeze(0) // 128
        meant[name] = codes.float() * scale[block]
    return stored, meant


@pytest.fixture(params=CONFIGS)
def raw(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("form", ["apart", "fused", "fp8"])
def test_layers_are_what_was_written(
    tmp_path: Path, raw: dict[str, Any], form: str, shards: int
) -> None:
    tensors = small.random_tensors(parse_config(raw))
    stored, meant = tensors, tensors
    if form == "fused":
        stored = fused(tensors, raw)
    if form == "fp8":
        stored, meant = in_fp8(tensors)
    root = small.write_checkpoint(tmp_path / "source", raw, stored, shards)
    assert_all_layers(open_checkpoint(root), meant, raw)


def test_every_form_is_quantized_alike(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    """One file, shards or fused experts: not a byte of the output differs."""
    recipe = own_recipe(tmp_path / "own.yaml")
    tensors = small.random_tensors(parse_config(RAW))
    forms = {
        "one": (tensors, 1), "shards": (tensors, 4), "fused": (fused(tensors, RAW), 3),
    }  # fmt: skip
    outputs = []
    for name, (stored, shards) in forms.items():
        source = small.write_checkpoint(tmp_path / name, RAW, stored, shards)
        options = CalibrateOptions(
            source, (recipe,), tmp_path / f"{name} out", *texts, 4, 32, evaluation_windows=2
        )
        output = calibrate(options)[0].checkpoint
        files = [*output.glob("model*"), output / "config.json"]
        outputs.append({file.name: file.read_bytes() for file in sorted(files)})
    assert outputs[0] == outputs[1] == outputs[2]


def test_fp8_source_end_to_end(tmp_path: Path, texts: tuple[Path, Path]) -> None:
    """Its kept matrices come out in bfloat16, no FP8 is left, and both are close."""
    stored, _ = in_fp8(small.random_tensors(parse_config(ODD)))
    raw = ODD | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    source = small.write_checkpoint(tmp_path / "source", raw, stored)
    recipe = own_recipe(tmp_path / "own.yaml")
    options = CalibrateOptions(
        source, (recipe,), tmp_path / "out", *texts, 4, 32, evaluation_windows=2
    )
    finished = calibrate(options)[0]
    written = [t for f in finished.checkpoint.glob("*.safetensors") for t in load_file(f).items()]
    assert {str(tensor.dtype) for _, tensor in written} <= {
        "torch.bfloat16", "torch.float32", "torch.int8", "torch.int32", "torch.int64"
    }  # fmt: skip
    kept = {name: t.dtype for name, t in written if "kv_b_proj" in name or "eh_proj" in name}
    assert set(kept.values()) == {torch.bfloat16}
    assert finished.run.accuracy is not None
    assert finished.run.accuracy.kl_mean < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_float_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = small.random_tensors(parse_config(small.GLM5), dtype=dtype)
    root = small.write_checkpoint(tmp_path / "source", tensors=tensors)
    assert_all_layers(open_checkpoint(root), tensors, small.GLM5)


def test_mtp_layer_with_embedded_copies(tmp_path: Path) -> None:
    tensors = small.random_tensors(parse_config(small.GLM5))
    copies = {
        "model.layers.3.embed_tokens.weight": tensors[names.EMBEDDING].clone(),
        "model.layers.3.shared_head.head.weight": tensors[names.LM_HEAD].clone(),
    }
    root = small.write_checkpoint(tmp_path / "source", tensors=tensors | copies)
    checkpoint = open_checkpoint(root)
    assert_all_layers(checkpoint, tensors, small.GLM5)
    assert checkpoint.optional_layer_tensors(3).keys() == copies.keys()


def test_experts_of_several_dtypes_lose_nothing(tmp_path: Path) -> None:
    tensors = small.random_tensors(parse_config(small.GLM5), dtype=torch.float32)
    for expert, dtype in enumerate((torch.bfloat16, torch.float16)):
        name = names.expert_name(1, expert, "down_proj") + ".weight"
        tensors[name] = tensors[name].to(dtype)
    root = small.write_checkpoint(tmp_path / "source", tensors=tensors)
    stack = open_checkpoint(root).layer(1).matrices[names.DOWN]
    assert isinstance(stack, torch.Tensor)
    assert stack.dtype == torch.float32
    for expert in range(3):
        name = names.expert_name(1, expert, "down_proj") + ".weight"
        assert torch.equal(stack[expert], tensors[name].float())


# Reading ahead, and what it holds on to


def test_layers_come_in_order_and_one_ahead() -> None:
    read: list[int] = []

    def layer(number: int) -> Layer:
        read.append(number)
        return Layer(number, {}, {})

    source = stream.layers(layer, range(4))
    assert next(source).number == 0
    time.sleep(0.05)
    assert read in ([0, 1], [0])
    assert [layer.number for layer in source] == [1, 2, 3]
    assert read == [0, 1, 2, 3]
    assert list(stream.layers(layer, range(0))) == []


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_an_error_on_the_reading_thread_comes_out(broken: int) -> None:
    def layer(number: int) -> Layer:
        if number == broken:
            raise CheckpointError("shard 3: gone", "fetch it")
        return Layer(number, {}, {})

    source = stream.layers(layer, range(4))
    assert [next(source).number for _ in range(broken)] == list(range(broken))
    with pytest.raises(CheckpointError, match="shard 3: gone; fetch it"):
        next(source)


def test_a_shard_lost_while_streaming_is_named(tmp_path: Path) -> None:
    root = small.write_checkpoint(tmp_path / "source")
    checkpoint = open_checkpoint(root)
    (root / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        list(stream.layers(checkpoint.layer, range(4)))
