"""A recipe whose chip nobody saw says so, and everything made from it says it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5q.verify import verify
from recipes import files
from reports import record as records
from targets import base
from tests import outputs, small
from tests.commands import refused, run
from tests.runs import RAW

DECLARED = ("metax-c500", "enflame-s60")


@pytest.mark.parametrize("name", files.shipped())
def test_a_chip_nobody_saw_is_declared(name: str) -> None:
    recipe = files.load(name)
    chip = base.load(recipe.target)
    if chip.verification != "run":
        assert recipe.verification.startswith("declared")
        assert len(recipe.verification) > len("declared; ")


def test_every_target_has_a_recipe() -> None:
    assert {files.load(name).target for name in files.shipped()} == set(base.TARGETS)


@pytest.mark.parametrize("name", files.shipped())
def test_no_recipe_asks_for_what_its_chip_lacks(name: str) -> None:
    recipe = files.load(name)
    assert base.check_recipe_dtypes(recipe.target, recipe.activations()) == []


WITHOUT_FP8 = ("ascend-910b", "ascend-910c", "a100", "metax-c500", "enflame-s60", "hygon-bw1000",
               "cpu")  # fmt: skip


@pytest.mark.parametrize("chip", WITHOUT_FP8)
def test_fp8_is_refused_where_there_is_none(chip: str, tmp_path: Path) -> None:
    text = files.text("h200").replace("target: h200", f"target: {chip}")
    text = text.partition("\ntiles:")[0]  # h200's are refused first
    (tmp_path / "own.yaml").write_text(text)
    title = base.load(chip).title
    refused("recipes", "validate", tmp_path / "own.yaml", says=(f"{title} has no fp8",))
    source = small.write_checkpoint(tmp_path / "source")
    refused(
        "calibrate", source, "--recipe", tmp_path / "own.yaml", "--output", tmp_path / "out",
        says=(f"{title} has no fp8",),
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_the_release_s_layout_calibrates_nothing(tmp_path: Path) -> None:
    source = small.write_checkpoint(tmp_path / "source")
    arguments = ("calibrate", source, "--recipe", "source-fp8", "--output", tmp_path / "out")
    refused(*arguments, says=("source-fp8", "nothing can be calibrated", "glm5q plan"))
    refused(*arguments, "--format", "modelslim", says=("nothing can be calibrated",))
    raw = files.text("source-fp8").replace("router: {method: keep}", "router: {method: fp8}")
    (tmp_path / "own.yaml").write_text(raw)
    refused("recipes", "validate", tmp_path / "own.yaml", says=("weights.router", "has keep"))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both declared recipes on one small checkpoint, by the command line."""
    folder = tmp_path_factory.mktemp("declared")
    source = small.write_checkpoint(folder / "source", RAW)
    text = small.write_text(folder / "text.jsonl", 4000)
    other = small.write_text(folder / "other.jsonl", 2000, seed=1)
    recipes = [argument for name in DECLARED for argument in ("--recipe", name)]
    done = run(
        "calibrate", source, *recipes, "--data", text, "--eval-data", other, "--windows", "4",
        "--sequence-length", "32", "--eval-windows", "2", "--output", folder / "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (folder / "printed.txt").write_text(done.stdout)
    return folder


@pytest.mark.parametrize("name", DECLARED)
def test_every_output_repeats_it(calibrated: Path, name: str) -> None:
    said = files.load(name).verification
    folder = calibrated / "out" / name
    sentence = said[:1].upper() + said[1:]
    assert f"{sentence}." in (folder / "README.md").read_text()
    assert json.loads((folder / "report.json").read_text())["recipe"]["verification"] == said
    assert said in (folder / "report.html").read_text()
    assert said in run("report", folder, "--card").stdout
    for printed in ((calibrated / "printed.txt").read_text(), run("plan", "--recipe", name).stdout):
        assert said in " ".join(printed.split())
    assert said in run("recipes", "list", "--json").stdout


def test_an_export_repeats_it(calibrated: Path, tmp_path: Path) -> None:
    folder = calibrated / "out" / "metax-c500"
    done = run("export", folder, "--format", "modelslim", "--output", tmp_path / "other")
    assert done.exit_code == 0, done.output
    said = files.load("metax-c500").verification
    assert said[1:] in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize("name", DECLARED)
def test_its_serving_command_is_the_plugin_s(calibrated: Path, name: str) -> None:
    folder = calibrated / "out" / name
    plugin = {"metax-c500": "vLLM-MetaX (not tried)", "enflame-s60": "vLLM-GCU (not tried)"}[name]
    for text in ((folder / "README.md").read_text(), run("report", folder, "--card").stdout):
        assert plugin in text
        assert "vLLM-Ascend (" not in text
        assert "CPU build" not in text


@pytest.mark.parametrize("name", DECLARED)
def test_a_record_plans_its_own_output(calibrated: Path, name: str) -> None:
    """The memory plan's weights are the bytes written; nothing but the embedding is beside them."""
    folder = calibrated / "out" / name
    record = records.read_record(folder / "report.json")
    assert record.memory is not None
    assert record.size is not None
    (device,) = record.memory.devices
    assert device.chip == base.load(name).title
    assert device.fits
    assert device.parts["weights"] + device.parts["mtp"] == record.size.quantized_bytes
    assert list(device.parts) == [
        "weights", "mtp", "kv_cache", "index_cache", "activations", "reserve"
    ]  # fmt: skip
    layers = RAW["num_hidden_layers"] + 1
    row = 2 * (RAW["kv_lora_rank"] + RAW["qk_rope_head_dim"])
    assert record.memory.kv_bytes_per_token == layers * row
    assert record.memory.index_bytes_per_token == 3 * 2 * RAW["index_head_dim"]  # two full, and MTP
    assert f"fits 1 x {device.chip}" in " ".join(run("report", folder).stdout.split())


def test_an_output_is_not_planned_again(calibrated: Path) -> None:
    folder = calibrated / "out" / "metax-c500"
    says = (str(folder), "report.json and report.html", str(calibrated / "source"))
    line = refused("plan", folder, "--recipe", "metax-c500", says=says)
    assert "release" not in line


@pytest.mark.parametrize("name", ["a100", "rtx-4090", "h20", "metax-c500", "hygon-bw1000",
                                  "enflame-s60", "atlas-800i-a2"])  # fmt: skip
def test_new_recipes_write_what_engines_load(name: str) -> None:
    report = verify(outputs.quantized(name), outputs.source())
    assert [row for row in report.rows if row.status == "fail"] == []
    engines = {row.check for row in report.rows if row.check.startswith("engine")}
    assert engines & {"engine vLLM", "engine vLLM-Ascend"}
