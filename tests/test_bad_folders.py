"""evaluate, verify, export, report and compare on folders and records that they cannot take."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from glm5q import names, pipeline
from glm5q.pipeline import CalibrateOptions
from tests.commands import copy, edit_json, edit_shard, refused, run
from tests.runs import small_run


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> CalibrateOptions:
    return small_run(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="module")
def output(asked: CalibrateOptions) -> Path:
    """A finished run's checkpoint and record."""
    return pipeline.calibrate(asked)[0].checkpoint


def test_evaluate_with_folders_swapped(asked: CalibrateOptions, output: Path) -> None:
    data = ("--data", str(asked.evaluation_data), "--sequence-length", "32", "--windows", "2")
    refused("evaluate", output, asked.source, *data, says=("quant_method", "compressed-tensors"))
    refused("evaluate", asked.source, output, says=("no evaluation text", "--data"))
    refused("evaluate", asked.source, output / "none", *data, says=("none", "no such folder"))
    refused("evaluate", asked.source, output, *data, "--output", output, says=("record",))
    seen = ("--data", str(asked.data), "--sequence-length", "32", "--windows", "2")
    refused("evaluate", asked.source, output, *seen, says=("text.jsonl", "calibration saw"))


@pytest.mark.parametrize("key", ["num_experts_per_tok", "index_topk", "rms_norm_eps", "rope_theta"])
def test_evaluate_against_another_model(
    asked: CalibrateOptions, output: Path, tmp_path: Path, key: str
) -> None:
    other = copy(output, tmp_path / "other")
    values = {"rope_parameters": {"rope_theta": 5.0}} if key == "rope_theta" else {key: 1}
    edit_json(other / "config.json", lambda raw: raw.update(values))
    data = ("--data", str(asked.evaluation_data), "--sequence-length", "32", "--windows", "2")
    refused("evaluate", asked.source, other, *data, says=("other", key, "like with like"))


BROKEN = (
    "truncated", "missing shard", "missing tensor", "no groups",
    "wrong shape", "nonsense",
)  # fmt: skip


def broken(output: Path, to: Path, how: str) -> Path:
    """A quantized checkpoint with one thing wrong in its layer 1."""
    folder = copy(output, to)
    shard = folder / "model-00003-of-00006.safetensors"
    name = "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    if how == "truncated":
        os.truncate(shard, 3000)
    elif how == "missing shard":
        shard.unlink()
    elif how == "missing tensor":
        edit_shard(shard, lambda tensors: tensors.__delitem__(name))
        index = folder / "model.safetensors.index.json"
        edit_json(index, lambda raw: raw["weight_map"].__delitem__(name))
    elif how == "wrong shape":
        edit_shard(shard, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    else:
        section = {"config_groups": {} if how == "no groups" else {"group_0": "int4"}}
        edit_json(folder / "config.json", lambda raw: raw["quantization_config"].update(section))
    return folder


@pytest.mark.parametrize("how", BROKEN)
def test_broken_quantized_checkpoint(
    asked: CalibrateOptions, output: Path, tmp_path: Path, how: str
) -> None:
    folder = broken(output, tmp_path / "broken", how)
    data = ("--data", str(asked.evaluation_data), "--sequence-length", "32", "--windows", "2")
    refused("evaluate", asked.source, folder, *data, says=("broken",))


def test_a_perplexity_that_no_float_holds(
    asked: CalibrateOptions, output: Path, tmp_path: Path
) -> None:
    """Over 709 nats a token: infinite in record, page and comparison, not an OverflowError."""
    folder, record = copy(output, tmp_path / "loud"), tmp_path / "loud.json"
    (index,) = folder.glob("*.index.json")
    shard = folder / json.loads(index.read_text())["weight_map"][names.LM_HEAD]
    edit_shard(shard, lambda tensors: tensors[names.LM_HEAD].mul_(1e5))
    data = ("--data", str(asked.evaluation_data), "--sequence-length", "32", "--windows", "2")
    done = run("evaluate", asked.source, folder, *data, "--output", record)
    assert done.exit_code == 0, done.exception or done.output
    found = json.loads(record.read_text())["accuracy"]
    assert found["perplexity_quantized"] == math.inf
    assert min(found["window_nll"]) > 709
    assert run("report", record).exit_code == 0
    compared = run("compare", record, record)
    assert compared.exit_code == 0, compared.exception or compared.output


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"schema_version": 1}', "\xff", "9" * 5000]
)
@pytest.mark.parametrize("name", ["report", "compare"])
def test_record_that_is_none(tmp_path: Path, name: str, content: str) -> None:
    record = tmp_path / "report.json"
    record.write_text(content, encoding="latin-1")
    more = [record] if name == "compare" else []
    refused(name, record, *more, says=("report.json",), fix=False)
    assert not (tmp_path / "report.html").exists()


def test_record_that_is_not_there(tmp_path: Path) -> None:
    refused("report", tmp_path / "none.json", says=("none.json", "no such record"))
    refused("report", tmp_path, says=("report.json",))


@pytest.mark.parametrize("place", ["/proc/none/page.html", "x" * 5000])
def test_page_that_cannot_be_written(output: Path, place: str) -> None:
    refused("report", output, "--output", place, says=("cannot be written",))


@pytest.mark.parametrize("name", ["verify", "export"])
def test_checkpoint_that_is_not_quantized(
    asked: CalibrateOptions, tmp_path: Path, name: str
) -> None:
    more = ["--format", "modelslim", "--output", str(tmp_path / "o")] if name == "export" else []
    refused(name, asked.source, *more, says=("quant",))
    refused(name, tmp_path, *more, says=(str(tmp_path),))
    refused(name, tmp_path / "none", *more, says=("none",))
