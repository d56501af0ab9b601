"""The command line as people and scripts use it: streams, exit codes, odd paths, quick help."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5q import pipeline
from glm5q.pipeline import CalibrateOptions
from tests.commands import PROGRESS, copy, refused, run
from tests.runs import command, small_run
from tests.warm import Ended, Warm

ODD = "glm 5 [int4] [red]é"  # spaces, what rich takes for markup, and more than ASCII
COMMANDS = (
    "calibrate", "inspect", "evaluate", "verify", "export", "report", "compare", "recipes"
)  # fmt: skip


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with Warm(tmp_path_factory.mktemp("logs")) as process:
        yield process


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> CalibrateOptions:
    return small_run(tmp_path_factory.mktemp("cli"), f"source {ODD}")


@pytest.fixture(scope="module")
def output(asked: CalibrateOptions) -> Path:
    return asked.output.parent / ODD


@pytest.fixture(scope="module")
def calibrated(warm: Warm, asked: CalibrateOptions, output: Path) -> Ended:
    """A finished run in `output`."""
    return warm.run(*command(asked, output))


# Help


def test_help_is_quick() -> None:
    """Best of several in processor time: other work on the machine only ever adds to the wall's."""
    best = float("inf")
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run([sys.executable, "-m", "glm5q", "--help"], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert found.returncode == 0
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best = min(best, used)
    assert best < 0.3


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from glm5q.cli import main; from click.testing import CliRunner; "
        "[CliRunner().invoke(main, [*c.split(), '--help']) for c in sys.argv[1:]]; "
        "print(*[m for m in ('torch', 'numpy', 'pydantic', 'yaml', 'rich', 'tokenizers', 'jinja2') "
        "if m in sys.modules])"
    )
    arguments = ["", *COMMANDS, "recipes list", "recipes show", "recipes validate"]
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert found.stdout.strip() == "", found.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert name in result.stdout
    assert result.stderr == ""


# Streams and paths


def test_places_are_printed_whole(calibrated: Ended, output: Path) -> None:
    assert calibrated.code == 0, calibrated.stderr
    for path in (output, output / "report.json", output / "report.html"):
        assert f"  {path}\n" in calibrated.stdout
    lines = calibrated.stderr.splitlines()
    assert lines
    assert all(PROGRESS.match(line) for line in lines), lines


@pytest.mark.usefixtures("calibrated")
def test_json_alone_on_stdout(
    warm: Warm, asked: CalibrateOptions, output: Path, tmp_path: Path
) -> None:
    again = warm.run(*command(asked, tmp_path / ODD), "--json")
    record = json.loads(again.stdout)
    assert record["kind"] == "calibrate"
    assert record["output"] == str(tmp_path / ODD)
    assert again.stderr
    evaluate = [
        "evaluate", asked.source, output, "--data", asked.evaluation_data, "--windows", "2",
        "--sequence-length", "32", "--json",
    ]  # fmt: skip
    assert json.loads(warm.run(*map(str, evaluate)).stdout)["kind"] == "evaluate"
    assert json.loads(run("inspect", asked.source, "--json").stdout)["path"] == str(asked.source)
    assert json.loads(run("report", output, "--json").stdout) == json.loads(
        (output / "report.json").read_text()
    )
    assert {one["name"] for one in json.loads(run("recipes", "list", "--json").stdout)} >= {"h200"}


@pytest.mark.usefixtures("calibrated")
def test_tables_keep_odd_paths(asked: CalibrateOptions, output: Path) -> None:
    assert str(asked.source) in run("inspect", asked.source).stdout
    assert str(output / "report.html") in run("report", output).stdout
    assert f"'{output}'" in json.loads((output / "report.json").read_text())["command"]


@pytest.mark.usefixtures("calibrated")
def test_evaluate_writes_where_it_is_told(
    asked: CalibrateOptions, output: Path, tmp_path: Path
) -> None:
    record = tmp_path / "new" / f"{ODD}.json"
    result = run(
        "evaluate", asked.source, output, "--data", str(asked.evaluation_data), "--windows", "2",
        "--sequence-length", "32", "--output", record,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert str(record) in result.stdout
    assert record.exists()
    assert record.with_suffix(".html").exists()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    show = [sys.executable, "-m", "glm5q", "recipes", "show", "h200"]
    process = subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


@pytest.mark.usefixtures("calibrated")
def test_path_that_is_no_unicode(asked: CalibrateOptions, warm: Warm) -> None:
    """Names are bytes on Linux; one that is not UTF-8 is named, and no run ends in a traceback."""
    name = os.fsdecode(b"caf\xe9")
    try:
        source = copy(asked.source, asked.output.parent / name)
    except OSError:
        pytest.skip("not run: this file system takes UTF-8 names only")
    arguments = command(asked, asked.output.parent / f"{name} out")
    arguments[1] = source
    for ended in (warm.run(*arguments), warm.run("inspect", source), warm.run("inspect", name)):
        assert "Traceback" not in ended.stderr
        assert ended.code in (0, 1)
        assert ended.code == 0 or ended.stderr.splitlines()[-1].startswith("glm5q: ")
    shutil.rmtree(source)


# Exit codes


@pytest.mark.parametrize(
    "arguments",
    [
        ["calibrate"], ["calibrate", "x", "--recipe", "h200"], ["nothing"], ["inspect", "--nope"],
        ["evaluate", "a"], ["recipes", "show"], ["report"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--windows", "1"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--windows", "many"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--sequence-length", "8"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--eval-windows", "0"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--latent-norm-eps", "0"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--latent-norm-eps", "nan"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--latent-norm-eps", "inf"],
        ["calibrate", "x", "--recipe", "h200", "--output", "y", "--effort", "most"],
        ["evaluate", "a", "b", "--seed", "one"],
    ],
)  # fmt: skip
def test_wrong_usage(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bug(_root: Path) -> None:
        raise KeyError("model.layers.3")

    monkeypatch.setattr(pipeline, "inspect", bug)
    result = run("inspect", tmp_path)
    assert isinstance(result.exception, KeyError)
    assert result.exit_code == 1


@pytest.mark.parametrize("device", ["cuda", "cuda:9", "gpu", "", "meta", "cpu:0x", "mps"])
def test_device_that_is_not_here(asked: CalibrateOptions, tmp_path: Path, device: str) -> None:
    if device == "cuda" and pipeline_has_cuda():
        pytest.skip("not run: there is a CUDA GPU here")
    refused(
        *command(asked, tmp_path / "out"), "--device", device, says=(f"--device {device}", "cpu")
    )
    assert not (tmp_path / "out").exists()


def pipeline_has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def test_same_text_for_calibration_and_evaluation(asked: CalibrateOptions, tmp_path: Path) -> None:
    assert asked.data is not None
    twin = Path(shutil.copy(asked.data, tmp_path / "twin.jsonl"))
    arguments = [
        twin if one == asked.evaluation_data else one for one in command(asked, tmp_path / "o")
    ]
    refused(*arguments, says=("twin.jsonl", "calibration text"))


def test_windows_longer_than_the_model_was_made_for(
    asked: CalibrateOptions, tmp_path: Path
) -> None:
    arguments = ["1024" if one == "32" else one for one in command(asked, tmp_path / "o")]
    refused(*arguments, says=("1024", "max_position_embeddings", "512"))
