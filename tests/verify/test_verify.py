"""Every format of every shape verifies, through the command line."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from glm5q import verify as verifying
from glm5q.verify import verify
from tests import outputs
from tests.commands import refused, run
from tests.verify.breaking import edit_json

FORMATS = {
    "h200": "compressed-tensors",
    "cpu": "compressed-tensors",
    "atlas-800t-a3": "modelslim",
    "h200-sglang": "sglang-w4afp8",
}


def failures(folder: Path, source: Path | None) -> dict[str, str]:
    """Returns the detail of each failed check."""
    rows = verify(folder, source).rows
    return {row.check: row.detail for row in rows if row.status == "fail"}


@pytest.mark.parametrize("recipe", outputs.RECIPES)
def test_verifies_against_its_source(recipe: str) -> None:
    folder = outputs.quantized(recipe)
    report = verify(folder, outputs.source())
    assert report.format == FORMATS[recipe]
    assert failures(folder, outputs.source()) == {}
    skipped = {row.check for row in report.rows if row.status == "skip"}
    assert skipped <= {"engine transformers"}


@pytest.mark.parametrize("shape", ["glm5", "glm52", "no_mtp"])
@pytest.mark.parametrize("recipe", ["h200", "atlas-800t-a3", "h200-sglang"])
def test_other_shapes_verify(recipe: str, shape: str) -> None:
    assert failures(outputs.quantized(recipe, shape), outputs.source(shape)) == {}


def test_command_prints_rows_and_sizes() -> None:
    result = run("verify", outputs.quantized("h200"), "--source", outputs.source())
    assert result.exit_code == 0, result.output
    assert "engine SGLang" in result.output
    assert "devices, expert parallel" in result.output


def test_json_has_every_row_and_exit_code_one(tmp_path: Path) -> None:
    folder = outputs.copy(outputs.quantized("h200"), tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    result = run("verify", folder, "--source", outputs.source(), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["ok"] is False
    assert {row["check"]: row["status"] for row in found["rows"]}["tokenizer"] == "fail"
    assert len(found["parallel"]) == 2 * 2 * 16


def test_refuses_what_is_not_quantized(tmp_path: Path) -> None:
    refused("verify", outputs.source(), says=("quant_method None",))
    refused("verify", tmp_path, says=("config.json",))


def test_says_what_is_wrong_with_the_folder(tmp_path: Path) -> None:
    folder = outputs.copy(outputs.quantized("h200"), tmp_path)
    refused("verify", folder, "--source", tmp_path, says=("no config.json",))
    edit_json(folder / "config.json", lambda raw: raw.__delitem__("q_lora_rank"))
    refused("verify", folder, says=("config.json", "q_lora_rank is missing"))


@pytest.mark.parametrize("header", [b"", b"[]", b'{"a": {"dtype": "F32"}}', b"\xff" * 9])
def test_a_header_of_rubbish_is_a_failed_row(header: bytes, tmp_path: Path) -> None:
    folder = outputs.copy(outputs.quantized("h200"), tmp_path)
    path = folder / "model-00002-of-00006.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert path.name in failures(folder, None)["shards"]


def test_a_schedule_that_vllm_reads_otherwise_is_noted(tmp_path: Path) -> None:
    """The real GLM-5.2 has index_topk_freq beside indexer_types; these small ones have not."""
    folder = outputs.copy(outputs.quantized("h200"), tmp_path)

    def schedule() -> str:
        rows = {row.check: row for row in verify(folder, None).rows}
        return rows["indexer schedule"].status

    assert schedule() == "note"
    edit_json(
        folder / "config.json", lambda raw: raw.update(index_topk_freq=2, index_skip_topk_offset=2)
    )
    assert schedule() == "ok"


def test_shares_no_code_with_the_writers() -> None:
    folder = Path(verifying.__file__).parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("glm5q"):
                allowed = node.module == "glm5q.errors" or str(node.module).startswith(
                    "glm5q.verify"
                )
                assert allowed, f"{file.name} imports {node.module}"


def test_sizes_of_the_real_model() -> None:
    """GLM-5's 2048 wide experts: vLLM's W4A8 kernel wants 256 a device, so TP 16 needs EP."""
    from glm5q.verify.parallel import fits

    config = {
        "num_attention_heads": 64,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    }

    def sizes(engine: str, expert_parallel: bool) -> list[int]:
        found = fits(engine, config)
        return [f.size for f in found if f.fits and f.expert_parallel is expert_parallel]

    assert sizes("vllm", False) == [1, 2, 4, 8]
    assert sizes("vllm", True) == [1, 2, 4, 8, 16]
    assert sizes("sglang", False) == [1, 2, 4, 8, 16]
    assert sizes("vllm-ascend", False) == [1, 2, 4, 8, 16]
    assert sizes("sglang-w4afp8", False) == [1, 2, 4, 8, 16]
