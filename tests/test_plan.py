"""`glm5q plan`: exact sizes, what fits, what is refused, and how it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from glm5q import pipeline, plan_view, releases, tiny
from recipes import files
from tests import small
from tests.commands import refused, run


def planned(*arguments: str) -> dict[str, Any]:
    result = run("plan", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def layout(found: dict[str, Any], label: str) -> dict[str, Any]:
    return next(row for row in found["layouts"] if row["layout"] == label)


def test_the_fp8_release_to_the_byte() -> None:
    found = planned("glm-5.2", "--recipe", "source-fp8")
    assert found["weights"]["total_bytes"] == 755_617_140_416
    assert found["weights"]["source_bytes"] == 1_506_659_919_872
    assert planned("glm-5", "--recipe", "source-fp8")["weights"]["total_bytes"] == 756_162_687_872


def test_glm5_on_one_atlas_at_200k() -> None:
    """vLLM-Ascend documents GLM-5 W4A8 on one Atlas 800 A3 of 16 x 64 GB, TP16 EP16, 200,000."""
    found = planned("glm-5", "--recipe", "atlas-800t-a3", "--context", "200k")
    assert (found["count"], found["context"], found["concurrency"]) == (16, 200_000, 1)
    assert layout(found, "TP16 EP16")["fits"] is True
    assert found["smallest_count"] == 16
    assert found["verification"].startswith("declared")


def test_what_vendors_publish_fits() -> None:
    """vLLM-Ascend: W4A8 without MTP on one A2 of 8 x 64 GB at 32,768."""
    found = planned(
        "glm-5", "--recipe", "atlas-800i-a2", "--context", "32768", "--no-mtp", "--reserve", "0.05"
    )
    assert layout(found, "TP8")["fits"] is True
    fp8 = planned("glm-5", "--recipe", "source-fp8", "--chip", "h20", "--context", "32k")
    assert all(not row.get("fits") for row in fp8["layouts"])  # 756 GB do not go on 8 x 96


def test_parts_add_up_and_the_verdict_follows() -> None:
    found = planned("glm-5.2", "--recipe", "h200", "--count", "8", "--concurrency", "4")
    for row in found["layouts"]:
        if row["legal"]:
            assert sum(row["parts"].values()) == row["total_bytes"]
            assert row["fits"] is (row["total_bytes"] <= row["capacity_bytes"])
            assert row["fits"] is (row["max_concurrency"] >= 4)
            assert row["fits"] is (row["max_context"] >= found["context"])
    chip = found["chip"]
    assert row["capacity_bytes"] == chip["memory_bytes"]["value"]
    assert {chip["memory_bytes"]["grade"], found["decode"]["grade"]} <= {"measured", "vendor"}
    assert found["decode"]["inputs"]["bandwidth"]["source"]


def test_a_checkpoint_is_planned_with_its_own_bytes(tmp_path: Path) -> None:
    """The router's float32 weights, as transformers saves them, count four bytes."""
    raw = small.GLM5
    tensors = small.random_tensors(small.parse_config(raw))
    gate = "model.layers.1.mlp.gate.weight"
    narrow = small.write_checkpoint(tmp_path / "a", raw, tensors)
    wide = small.write_checkpoint(tmp_path / "b", raw, tensors | {gate: tensors[gate].float()})
    sizes = [
        planned(str(root), "--recipe", "metax-c500")["weights"]["by_role"]["router"]
        for root in (narrow, wide)
    ]
    assert sizes[1] - sizes[0] == 2 * tensors[gate].numel()


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small.GLM5))
    found = planned(str(tmp_path), "--recipe", "metax-c500")
    whole = small.write_checkpoint(tmp_path / "whole")
    assert found["weights"] == planned(str(whole), "--recipe", "metax-c500")["weights"]
    assert found["context"] == 512  # as long as it was made for


@pytest.mark.parametrize("name", files.shipped())
def test_every_recipe_plans_every_release(name: str) -> None:
    for model in ("glm-5", "glm-5.2"):
        found = planned(model, "--recipe", name)
        assert found["layouts"]
        if name != "cpu":
            assert 2 <= (found["smallest_count"] or 64) <= 64
    for figure in (found["chip"]["memory_bytes"], found["chip"]["bandwidth_bytes_s"]):
        assert figure["source"]
        assert (figure["value"] is None) == (figure["grade"] == "unknown")


def test_unknown_figures_give_no_number() -> None:
    found = planned("glm-5", "--recipe", "kunlunxin-p800")
    assert found["decode"]["total_s"] is None
    assert found["prefill"]["tokens_per_s"] is None
    assert "bandwidth" in found["decode"]["unknown"]
    text = run("plan", "glm-5", "--recipe", "kunlunxin-p800").stdout
    assert "decode: unknown, for want of bandwidth" in text
    assert "bandwidth unknown" in text


REFUSALS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fp8 on Ascend": (("glm-5", "--recipe", "h200", "--chip", "ascend-910c"), ("no fp8",)),
    "fp8 cache on Ascend": (("glm-5", "--recipe", "atlas-800t-a3", "--kv", "fp8"), ("--kv fp8",)),
    "no such chip": (("glm-5", "--recipe", "h200", "--chip", "h300"), ("h300", "h200")),
    "no such recipe": (("glm-5", "--recipe", "h300"), ("h300", "no such recipe")),
    "no such model": (("glm-6", "--recipe", "h200"), ("glm-6", "glm-5.2")),
    "too long": (("glm-5", "--recipe", "h200", "--context", "300k"), ("300000", "202752")),
    "odd count": (("glm-5", "--recipe", "h200", "--count", "7"), ("--count 7", "does not divide")),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_planned(case: str) -> None:
    arguments, says = REFUSALS[case]
    refused("plan", *arguments, says=says)


@pytest.mark.parametrize(
    ("text", "tokens"), [("200k", 200_000), ("1M", 10**6), ("4,096", 4096), ("1.5k", 1500)]
)
def test_context_in_words(text: str, tokens: int) -> None:
    assert planned("glm-5.2", "--recipe", "h200", "--context", text)["context"] == tokens


def config_of(folder: Path, model: str = "glm-5.2", **changes: Any) -> str:
    """A folder with a release's config.json and other values."""
    (folder / "config.json").write_text(json.dumps(releases.raw_config(model) | changes))
    return str(folder)


def test_the_smallest_machine_is_no_power_of_two(tmp_path: Path) -> None:
    """48 heads and 96 experts divide by 6: what the table says fits is not said to need eight."""
    heads = {"num_attention_heads": 48, "num_key_value_heads": 48, "n_routed_experts": 96}
    model = config_of(tmp_path, **heads)
    load = ("--recipe", "h200", "--context", "1M", "--concurrency", "3")
    found = planned(model, *load, "--count", "6")
    assert any(row.get("fits") for row in found["layouts"])
    assert found["smallest_count"] == 6
    for count in (1, 2, 3, 4):
        fewer = planned(model, *load, "--count", str(count))
        assert not any(row.get("fits") for row in fewer["layouts"])
    assert "does not" in run("plan", model, *load, "--count", "5").stderr


def test_the_smallest_machine_is_what_the_tables_say() -> None:
    """Weights of 404 GB are on no two H200 of 150, and 64 heads do not divide by three."""
    arguments = ("glm-5", "--recipe", "h200", "--context", "1k")
    assert planned(*arguments)["smallest_count"] == 4
    for count, fits in (("2", False), ("4", True)):
        rows = planned(*arguments, "--count", count)["layouts"]
        assert any(row.get("fits") for row in rows) is fits


def test_without_mtp_there_is_none() -> None:
    arguments = ("glm-5.2", "--recipe", "h200")
    found, whole = planned(*arguments, "--no-mtp"), planned(*arguments)
    assert found["weights"]["mtp_bytes"] == 0
    assert sum(found["weights"]["by_role"].values()) == found["weights"]["total_bytes"]
    assert whole["weights"]["mtp_bytes"] > 0
    total = whole["weights"]["total_bytes"] - whole["weights"]["mtp_bytes"]
    assert found["weights"]["total_bytes"] == total
    (line,) = [x for x in run("plan", *arguments, "--no-mtp").stdout.splitlines()
               if x.startswith("weights: ")]  # fmt: skip
    assert line.endswith(", no MTP")
    assert "of it MTP" in run("plan", *arguments).stdout


def test_a_context_that_was_lowered_is_said(tmp_path: Path) -> None:
    short = config_of(tmp_path, max_position_embeddings=131_072)
    arguments = ("plan", short, "--recipe", "h200")
    said = [x for x in run(*arguments).stdout.splitlines() if "the model was made for no more" in x]
    assert said == ["note: 131,072 tokens a request, not 200,000: the model was made for no more"]
    for others in ((*arguments, "--context", "131072"), ("plan", "glm-5", "--recipe", "h200")):
        assert "made for no more" not in run(*others).stdout


def test_a_prefill_is_of_one_prompt_a_group() -> None:
    arguments = ("glm-5", "--recipe", "h200", "--count", "8", "--context", "4096")
    arguments = (*arguments, "--concurrency", "4000")
    found = planned(*arguments)
    groups = int(found["best"].split()[0].removeprefix("DP"))
    assert groups > 1
    assert found["prefill"]["tokens"] == groups * 4096
    text = run("plan", *arguments).stdout
    assert f"{found['best']}, {groups} x 4,096, prefill: at least " in text
    assert f" for {groups * 4096:,} tokens, {found['prefill']['tokens_per_s']:,.0f} to" in text
    assert f"{found['best']}, 4,000 x 4,096, decode: at least " in text


BAD_NUMBERS = (
    ("--reserve", "nan"), ("--reserve", "inf"), ("--reserve", "0.91"), ("--disk", "nan"),
    ("--disk", "1e-320"), ("--disk", "999999"), ("--disk", "inf"), ("--concurrency", "1000001"),
    ("--concurrency", "99999999999999999"), ("--concurrency", "0"),
)  # fmt: skip


@pytest.mark.parametrize(("option", "value"), BAD_NUMBERS)
def test_numbers_that_are_none(option: str, value: str) -> None:
    result = run("plan", "glm-5", "--recipe", "h200", option, value)
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 2
    assert option in result.stderr


def test_numbers_at_their_ends() -> None:
    ends = ("--reserve", "0", "--disk", "1e6", "--concurrency", "1000000", "--context", "1M")
    text = run("plan", "glm-5.2", "--recipe", "h200", *ends, "--json").stdout
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", text))
    found = json.loads(text)
    assert found["layouts"][0]["parts"]["reserve"] == 0
    printed = run("plan", "glm-5.2", "--recipe", "h200", *ends).stdout
    assert printed.isascii()
    for row in found["layouts"]:
        if row["legal"]:
            cells = next(x for x in printed.splitlines() if x.startswith(row["layout"] + " "))
            assert f" {row['total_bytes'] / 1e9:.1f} " in cells


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "200kk", "nan", "9999999m"])
def test_context_that_is_none(text: str) -> None:
    result = run("plan", "glm-5", "--recipe", "h200", "--context", text)
    assert result.exit_code == 2


def show(model: str, recipe: str, **console: Any) -> str:
    printer = Console(record=True, file=open("/dev/null", "w"), highlight=False, **console)  # noqa: PTH123, SIM115
    plan_view.show(pipeline.plan(pipeline.PlanOptions(model, recipe)), printer)
    return printer.export_text()


def test_prints_in_80_columns_and_plain() -> None:
    text = show("glm-5", "atlas-800t-a3", width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "TP16 EP16" in text
    bar = next(line for line in text.splitlines() if re.fullmatch(r"[WMKIASR.]+\|?[.]*", line))
    assert 64 <= len(bar) <= 65
    piped = run("plan", "glm-5", "--recipe", "atlas-800t-a3").stdout
    assert "\x1b" not in piped
    assert piped.isascii()


def test_a_screen_too_narrow_cuts_no_number() -> None:
    text = show("glm-5", "atlas-800t-a3", width=40)
    assert text.isascii()
    rows = run("plan", "glm-5", "--recipe", "atlas-800t-a3", "--markdown").stdout.splitlines()
    tables = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if "|" in row]
    printed = {" ".join(line.split()) for line in text.splitlines()}
    assert {" ".join(cells) for cells in tables if cells[0] != "---"} <= printed


def test_markup_in_a_name_is_only_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "GLM [int4]"
    whole = small.write_checkpoint(folder)
    result = run("plan", whole, "--recipe", "metax-c500")
    assert result.exit_code == 0


def test_markdown_has_the_json_s_numbers() -> None:
    arguments = ("glm-5", "--recipe", "h200", "--count", "4", "--context", "200k")
    found, table = planned(*arguments), run("plan", *arguments, "--markdown").stdout
    for row in found["layouts"]:
        cells = next(x for x in table.splitlines() if x.startswith(f"| {row['layout']} |"))
        assert f"| {row['total_bytes'] / 1e9:.1f} |" in cells
        assert f"| {row['max_context']:,} |" in cells


def test_embedded_is_the_default() -> None:
    assert planned("--recipe", "h200")["model"] == str(tiny.path())


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['glm5q', 'plan', '--help']\n"
        "from glm5q.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich', 'pydantic'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
