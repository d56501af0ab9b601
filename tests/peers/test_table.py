"""The comparison's arithmetic, the reader's layouts, and its judge, without any other tool."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.data import Windows
from calibrate.evaluate import evaluate
from glm5q.checkpoint import open_checkpoint
from glm5q.formats.quantized import open_any
from tests.commands import run
from tests.peers import driver, judge, reader, table
from tests.peers.peers import GROUPS, OURS, PEERS
from tests.small import GLM5, write_checkpoint


def test_a_mean_has_numpys_standard_error() -> None:
    values = [0.3, 0.1, 0.7, 0.2, 0.5]
    found = table.mean(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.standard_error == pytest.approx(np.std(values, ddof=1) / np.sqrt(5))


def test_differences_are_paired() -> None:
    """Windows that differ widely in level and not at all in difference leave no error."""
    base = [1.0, 5.0, 9.0, 2.0]
    found = table.paired([value + 0.25 for value in base], base)
    assert found.mean == pytest.approx(0.25)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match=r"argument 2 is shorter"):
        table.paired(base, base[:3])


def test_one_window_has_no_error() -> None:
    with pytest.raises(ValueError, match="two windows"):
        table.mean([1.0])


def test_each_row_is_compared_with_each_of_ours() -> None:
    window_kl = {"ours": [1.0, 3.0], "other": [2.0, 6.0]}
    found = table.against(window_kl, ["ours"])
    assert found["other"]["ours"]["mean"] == pytest.approx(2.0)
    assert found["other"]["ours"]["ratio"] == pytest.approx(2.0)
    assert found["ours"] == {}


def test_lines_are_sorted_by_kl() -> None:
    rows = [
        {"name": n, "kl_mean": kl, "kl_se": 0.001, "quantize_s": 1, "peak_rss_bytes": 2e9}
        for n, kl in (("worse", 0.02), ("better", 0.01))
    ]
    found = table.lines(rows)
    assert [line.split()[0] for line in found] == ["row", "better", "worse"]
    assert "10.000" in found[1]


def test_compressed_tensors_words_are_read_as_its_own_packer_writes_them() -> None:
    pack = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (5, 24), generator=torch.Generator().manual_seed(0))
    words = pack.pack_to_int32(codes.to(torch.int8), 4)
    assert torch.equal(reader.nibbles(words, 1) - 8, codes.to(torch.int32))


@pytest.mark.parametrize("offset", [0, 1])
def test_gptq_columns_by_hand(offset: int) -> None:
    """Eight rows, eight columns in two groups, which columns are in which said by g_idx."""
    codes = torch.arange(64).view(8, 8) * 7 % 16
    words = [sum(int(code) << 4 * place for place, code in enumerate(row)) for row in codes]
    zeros = sum((row % 2 + 7 - offset) << 4 * row for row in range(8))  # 7 and 8 in turn
    tensors = {
        "m.qweight": torch.tensor([words]).to(torch.int32),
        "m.qzeros": torch.tensor([[zeros], [zeros]]).to(torch.int32),
        "m.scales": torch.stack((torch.arange(1.0, 9), 10 * torch.arange(1.0, 9))).half(),
        "m.g_idx": torch.tensor([0, 1] * 4, dtype=torch.int32),
    }
    scale = torch.arange(1.0, 9).unsqueeze(1) * torch.tensor([1.0, 10.0] * 4)
    zero = (torch.arange(8) % 2 + 7).unsqueeze(1)
    assert torch.equal(reader.gptq_columns(tensors, "m", offset), (codes - zero) * scale)


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "marlin"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="marlin"):
        dict(reader.decoded(tmp_path))


def test_the_judge_says_what_evaluate_says(tmp_path: Path) -> None:
    """Windows' KL of another checkpoint, as `glm5q evaluate` finds them."""
    source, other = tmp_path / "source", tmp_path / "other"
    write_checkpoint(source, GLM5, seed=0)
    write_checkpoint(other, GLM5, seed=1)
    tokens = torch.randint(0, 256, (3, 48), generator=torch.Generator().manual_seed(2))
    found = judge.Judge(Windows("made up", tokens, 1, 0), source, reuse=False).row(other)
    wanted = evaluate(open_checkpoint(source), open_any(other), tokens, quantize_activations=False)
    assert found["window_kl"] == wanted.token_kl.double().mean(1).tolist()


def test_a_plain_checkpoint_says_what_was_changed(tmp_path: Path) -> None:
    """A folder in AutoGPTQ's layout: experts decoded, a norm changed, the MTP layer not there."""
    source, theirs = tmp_path / "source", tmp_path / "theirs"
    write_checkpoint(source, GLM5 | {"num_nextn_predict_layers": 0}, seed=0)
    tensors = dict(load(source))
    theirs.mkdir()
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = "model.layers.1.mlp.experts.3.up_proj"
    rows, columns = tensors.pop(f"{name}.weight").shape
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 31), 1 << 31, (columns // 8, rows), generator=generator)
    tensors[f"{name}.qweight"] = words.to(torch.int32)
    tensors[f"{name}.qzeros"] = torch.full((1, rows // 8), 0x77777777, dtype=torch.int32)
    tensors[f"{name}.scales"] = torch.ones((1, rows), dtype=torch.float16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, theirs / "model.safetensors")
    raw["quantization_config"] = {"quant_method": "gptq", "checkpoint_format": "gptq"}
    (theirs / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    kept = reader.write_plain(theirs, source, tmp_path / "plain")
    assert kept == reader.Kept(("model.norm.weight",), "dropped")
    open_checkpoint(tmp_path / "plain")
    found = dict(load(tmp_path / "plain"))[f"{name}.weight"]
    assert found.shape == (rows, columns)
    assert (found.min(), found.max()) == (-8, 7)


def test_rows_are_named_apart_and_their_recipes_are_valid(tmp_path: Path) -> None:
    labels = [f"{name} {label}" for name in OURS for label in GROUPS]
    every = labels + [peer.name for peer in PEERS]
    assert len({driver.slug(name) for name in every}) == len(every)
    for variant in OURS.values():
        recipe = driver.weight_only("a row", variant, None)
        file = tmp_path / f"{variant}.yaml"
        file.write_text(json.dumps(recipe), encoding="utf-8")
        assert run("recipes", "validate", file).exit_code == 0
        experts = recipe["weights"].pop("routed_expert")
        assert (experts["bits"], experts["group_size"], experts["activation"]) == (4, None, None)
        assert {plan["method"] for plan in recipe["weights"].values()} == {"keep"}


def load(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return [item for file in folder.glob("*.safetensors") for item in load_file(file).items()]
