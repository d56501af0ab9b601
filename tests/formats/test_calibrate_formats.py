"""`glm5q calibrate` in each format, from an FP8 source, read back by `glm5q verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from glm5q import quant
from glm5q.config import parse_config
from glm5q.verify import verify
from recipes import files
from tests import small
from tests.commands import refused, run

KEPT = ("gate.weight", "weights_proj.weight", "eh_proj.weight", "embed_tokens.weight")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random small GLM-5 in FP8 blocks, what GLM-5-FP8 keeps kept."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in small.random_tensors(parse_config(small.GLM5)).items():
        if tensor.dim() == 2 and not name.endswith(KEPT) and name != "lm_head.weight":
            codes, scale = quant.quantize_fp8_blocks(tensor)
            scale = torch.exp2(scale.log2().ceil())  # as some releases: no code of 448 in a block
            codes, _ = quant.quantize_fp8_blocks(tensor, scale)
            tensors[name], tensors[name + "_scale_inv"] = codes, scale
        else:
            tensors[name] = tensor
    folder = tmp_path_factory.mktemp("fp8")
    small.write_text(folder / "text.jsonl", 8000)
    return small.write_checkpoint(folder / "source", small.GLM5, tensors)


def recipe(name: str, folder: Path) -> Path:
    """A shipped recipe with plain rounding: the formats are tested here, not the methods."""
    raw: dict[str, Any] = yaml.safe_load(files.text(name))
    for plan in raw["weights"].values():
        if plan["method"] in ("gptq", "rtn"):
            for key in ("damping", "ridge", "act_order", "pooling"):
                plan.pop(key, None)
            plan |= {"method": "rtn", "clip": {"steps": 2, "lowest": 0.9}}
    for effort in raw.get("efforts", {}).values():
        effort |= {"descent": 0, "guidance": False}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def calibrate(fp8: Path, plan: Path, output: Path, *arguments: str) -> Path:
    result = run(
        "calibrate", fp8, "--recipe", plan, "--data", fp8.parent / "text.jsonl",
        "--output", output, "--windows", "4", "--sequence-length", "32",
        "--eval-windows", "2", *arguments,
    )  # fmt: skip
    assert result.exit_code == 0, result.exception or result.output
    return output


@pytest.mark.parametrize("name", ["h200", "atlas-800t-a3", "h200-sglang"])
def test_calibrated_from_fp8_verifies_with_its_record(name: str, fp8: Path, tmp_path: Path) -> None:
    output = calibrate(fp8, recipe(name, tmp_path), tmp_path / "out")
    report = verify(output, fp8)
    assert {row.check: row.detail for row in report.rows if row.status == "fail"} == {}
    status = {row.check: row.detail for row in report.rows}
    assert status["record"] == "bytes and schemes a layer as claimed, weight errors too"


def test_kept_layers_of_an_fp8_source_are_bfloat16_and_say_so(fp8: Path, tmp_path: Path) -> None:
    """A kept FP8 matrix grows to two bytes, not to four, and the record names the dtype."""
    output = calibrate(fp8, recipe("h200", tmp_path), tmp_path / "out")
    tensors: dict[str, Tensor] = {}
    for file in output.glob("*.safetensors"):
        tensors |= load_file(file)
    kept = tensors["model.layers.1.self_attn.kv_b_proj.weight"]
    assert kept.dtype == torch.bfloat16
    assert tensors["model.layers.3.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16


def test_fp8_that_stays_fp8_keeps_its_bytes(fp8: Path, tmp_path: Path) -> None:
    output = calibrate(fp8, recipe("h200-sglang", tmp_path), tmp_path / "out")
    mine: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for folder, tensors in ((output, mine), (fp8, theirs)):
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
    same = [n for n in theirs if n + "_scale_inv" in theirs and ".experts." not in n]
    assert len(same) > 20
    for name in same:
        assert torch.equal(mine[name].view(torch.uint8), theirs[name].view(torch.uint8)), name
        assert torch.equal(mine[name + "_scale_inv"], theirs[name + "_scale_inv"]), name


def test_format_option_replaces_the_recipe_s(fp8: Path, tmp_path: Path) -> None:
    plan = recipe("atlas-800t-a3", tmp_path)
    output = calibrate(fp8, plan, tmp_path / "out", "--format", "compressed-tensors")
    report = verify(output, fp8)
    assert report.format == "compressed-tensors"
    assert report.ok


def test_format_option_that_cannot_hold_the_recipe_is_refused(fp8: Path, tmp_path: Path) -> None:
    data = fp8.parent / "text.jsonl"
    command = ("calibrate", fp8, "--recipe", "h200", "--data", data, "--output", tmp_path / "o")
    refused(*command, "--format", "modelslim", says=("format modelslim", "groups of 128"))
    refused(*command, "--format", "gguf", says=("gguf: no such format",))
