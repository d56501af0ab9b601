"""`glm5q export`: the same codes in another format, or one line saying why not."""

from __future__ import annotations

import filecmp
import json
import time
from pathlib import Path

import pytest

from glm5q.verify import verify
from tests import outputs
from tests.commands import refused, run


def export(checkpoint: Path, name: str, output: Path, *arguments: str) -> Path:
    result = run("export", checkpoint, "--format", name, "--output", output, *arguments)
    assert result.exit_code == 0, result.exception or result.output
    return output


def test_modelslim_to_compressed_tensors_and_back_is_byte_equal(tmp_path: Path) -> None:
    original = outputs.quantized("atlas-800t-a3")
    started = time.perf_counter()
    plain = export(original, "compressed-tensors", tmp_path / "ct")
    assert time.perf_counter() - started < 20
    assert verify(plain, outputs.source()).ok
    again = export(plain, "modelslim", tmp_path / "ms", "--copy-mtp")
    assert verify(again, outputs.source()).ok
    for file in sorted(original.iterdir()):
        if file.suffix in (".safetensors", ".json") and file.name != "report.json":
            assert filecmp.cmp(file, again / file.name, shallow=False), file.name


def test_exporting_to_its_own_format_changes_no_weight(tmp_path: Path) -> None:
    packed = outputs.quantized("h200")
    again = export(packed, "compressed-tensors", tmp_path / "packed")
    for file in sorted(packed.glob("*.safetensors")):
        assert filecmp.cmp(file, again / file.name, shallow=False), file.name


def test_config_for_vllm_alone(tmp_path: Path) -> None:
    folder = export(outputs.quantized("h200"), "compressed-tensors", tmp_path / "v", "--vllm-only")
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert raw["format"] == "mixed-precision"
    assert all("Linear" not in group["targets"] for group in raw["config_groups"].values())
    report = verify(folder, outputs.source())
    assert report.ok
    assert {row.check: row.status for row in report.rows}["engine SGLang"] == "skip"
    assert "SGLang" not in (folder / "README.md").read_text()


def test_every_output_says_how_to_serve_it(tmp_path: Path) -> None:
    for recipe, command in (
        ("h200", "vllm serve . --tensor-parallel-size 8"),
        ("h200-sglang", "--quantization w4afp8"),
        ("atlas-800t-a3", "vllm serve . --quantization ascend"),
    ):
        text = (outputs.quantized(recipe) / "README.md").read_text()
        assert command in text
        assert "## What was verified" in text
    exported = export(outputs.quantized("cpu"), "compressed-tensors", tmp_path / "x")
    text = (exported / "README.md").read_text()
    assert "exported from `compressed-tensors`" in text
    assert "Quantized stream run on the CPU; not served in an engine." in text


@pytest.mark.parametrize(
    ("recipe", "name", "reason"),
    [
        ("h200", "modelslim", "has groups of 128, vLLM-Ascend takes one scale a row"),
        ("cpu", "modelslim", "has groups of 128"),
        ("h200", "sglang-w4afp8", "attention is int8 channel + int8, w4afp8 wants method fp8"),
        ("h200-sglang", "compressed-tensors", "is FP8 in blocks"),
        ("h200-sglang", "onnx", "has FP8 blocks"),
    ],
)
def test_refuses_codes_that_are_not_the_format_s(
    recipe: str, name: str, reason: str, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    command = ("export", outputs.quantized(recipe), "--format", name, "--output", output)
    refused(*command, says=("cannot become " + name, reason))
    assert not output.exists()


def test_refuses_a_source_and_an_unknown_format(tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(
        "export",
        outputs.source(),
        "--format",
        "modelslim",
        "--output",
        out,
        says=("not quantized",),
    )
    refused("export", outputs.quantized("cpu"), "--format", "gguf", "--output", out, says=("gguf",))
