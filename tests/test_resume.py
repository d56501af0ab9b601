"""Killed at any moment, the same command goes on and ends byte-equal; no other run does."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glm5q import pipeline
from glm5q.checkpoint import Checkpoint
from glm5q.errors import OutputError
from glm5q.pipeline import CalibrateOptions, describe
from tests import small
from tests.commands import INDEX, edit_shard, looks_whole
from tests.runs import RAW, STATE, command, contents, own_recipe, small_run
from tests.warm import Warm

RANDOM_KILLS = 20


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> CalibrateOptions:
    """What every run here asks for; `output` is each test's own."""
    return small_run(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    with Warm(tmp_path_factory.mktemp("logs")) as process:
        yield process


@pytest.fixture(scope="module")
def uninterrupted(
    warm: Warm, asked: CalibrateOptions, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], float]:
    """What a run without a kill leaves, and the processor time it takes in seconds."""
    output = tmp_path_factory.mktemp("uninterrupted") / "out"
    ended = warm.run(*command(asked, output))
    assert ended.code == 0, ended.stderr
    return contents(output), ended.cpu_s


def assert_not_whole_unless_true(output: Path) -> None:
    """An index stands only over shards that are all there."""
    if looks_whole(output):
        weight_map = json.loads((output / INDEX).read_text())["weight_map"]
        assert (output / "config.json").exists()
        for file in set(weight_map.values()):
            named = {name for name, where in weight_map.items() if where == file}
            assert load_file(output / file).keys() == named


# Kills


def test_killed_at_random_moments(
    warm: Warm, asked: CalibrateOptions, uninterrupted: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    wanted, whole_s = uninterrupted
    moments = random.Random(5)
    killed = tries = 0
    while killed < RANDOM_KILLS:
        tries += 1
        assert tries < 3 * RANDOM_KILLS
        output = tmp_path / str(tries)
        moment_s = moments.uniform(0.0, 0.95) * whole_s
        if warm.run(*command(asked, output), kill_after_s=moment_s).code != -signal.SIGKILL:
            continue  # it had ended
        killed += 1
        if output.exists():
            assert_not_whole_unless_true(output)
        finished = (output / "report.html").exists() and not (output / STATE / "run.json").exists()
        ended = warm.run(*command(asked, output))
        assert ended.code == finished, ended.stderr
        assert ("not empty" in ended.stderr) == finished
        assert contents(output) == wanted


def test_killed_before_every_kind_of_write(
    warm: Warm, asked: CalibrateOptions, uninterrupted: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    """The n-th run dies before its n-th change on the disk, until one ends by itself."""
    output = tmp_path / "out"
    kills = 0
    while True:
        ended = warm.run(*command(asked, output), kill_at=kills + 1, within=str(output))
        if ended.code != -signal.SIGKILL:
            break
        kills += 1
        if output.exists():
            assert_not_whole_unless_true(output)
        assert kills < 200
    if ended.code:  # the last kill came while a finished run dropped its state
        assert "not empty" in ended.stderr
        assert (output / "report.html").exists()
    assert kills >= 15
    assert contents(output) == uninterrupted[0]


def test_interrupted_from_the_keyboard(
    warm: Warm, asked: CalibrateOptions, uninterrupted: tuple[dict[str, str], float], tmp_path: Path
) -> None:
    pid = warm.start(*command(asked, tmp_path / "out"))
    while not (tmp_path / "out" / STATE / "shard-00001.json").exists():
        time.sleep(0.01)
    warm.kill(pid, signal.SIGINT)
    ended = warm.wait()
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1] == "Aborted!"
    assert warm.run(*command(asked, tmp_path / "out")).code == 0
    assert contents(tmp_path / "out") == uninterrupted[0]


# The same run, stopped in process


class Stopped(BaseException):
    """What stops a run here, as Ctrl-C does."""


def stop_at(options: CalibrateOptions, moment: str) -> None:
    """Runs until the progress text starts with `moment`."""

    def update(what: str, _done: float, _of: float) -> None:
        if what.startswith(moment):
            raise Stopped

    with pytest.raises(Stopped):
        pipeline.calibrate(options, update)


def finish(options: CalibrateOptions) -> tuple[dict[str, str], int]:
    """Returns (contents, layers taken over from earlier runs)."""
    finished = pipeline.calibrate(options)
    return contents(options.output), finished[0].run.resumed_layers


@pytest.fixture
def options(asked: CalibrateOptions, tmp_path: Path) -> CalibrateOptions:
    torch.set_num_threads(1)  # as the warm process: sums may depend on it
    return replace(asked, output=tmp_path / "out")


@pytest.mark.parametrize(
    ("moment", "layers"), [("layer 0", 0), ("layer 2", 2), ("layers", 4), ("evaluating", 4)]
)
def test_stopped_in_process(
    options: CalibrateOptions, uninterrupted: tuple[dict[str, str], float], moment: str, layers: int
) -> None:
    stop_at(options, moment)
    assert (options.output / STATE).exists()
    assert looks_whole(options.output) == (moment == "evaluating")
    assert finish(options) == (uninterrupted[0], layers)


def test_shard_damaged_after_its_commit_is_done_again(
    options: CalibrateOptions, uninterrupted: tuple[dict[str, str], float]
) -> None:
    """And the index of the run before it no longer stands while that happens."""
    stop_at(options, "evaluating")
    os.truncate(options.output / "model-00003-of-00006.safetensors", 5000)
    stop_at(options, "layer 2")
    assert not looks_whole(options.output)
    assert finish(options) == (uninterrupted[0], 4)


def test_leftovers_and_lost_state_do_no_harm(
    options: CalibrateOptions, uninterrupted: tuple[dict[str, str], float]
) -> None:
    stop_at(options, "layer 2")
    (options.output / STATE / "partial" / "model-00004-of-00006.safetensors").write_bytes(b"half")
    (options.output / STATE / "partial" / ".tmpX7a9").write_bytes(b"safetensors' own")
    (options.output / "report.json.partial").write_text("{")
    states = sorted((options.output / STATE).glob("shard-*.json"))
    states[0].write_text("[]")
    states[1].write_text(json.dumps(json.loads(states[1].read_text()) | {"result": {"layer": 0}}))
    states[2].write_text("{")
    assert finish(options) == (uninterrupted[0], 0)


def test_several_recipes_resume_together(options: CalibrateOptions) -> None:
    second = own_recipe(options.output.parent / "second.yaml", "cpu")
    both = replace(options, recipes=(*options.recipes, second))
    stop_at(both, "layer 2")
    finished = pipeline.calibrate(both)
    assert [one.run.resumed_layers for one in finished] == [2, 2]


def test_a_failure_in_the_second_report_keeps_the_first_resumable(
    options: CalibrateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = own_recipe(options.output.parent / "second.yaml", "cpu")
    both = replace(options, recipes=(*options.recipes, second))
    write = describe.write

    def second_fails(*arguments: Any) -> Any:
        if arguments[1].parent.name == "second":
            raise Stopped
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(describe, "write", second_fails)
        with pytest.raises(Stopped):
            pipeline.calibrate(both)
    assert [one.run.resumed_layers for one in pipeline.calibrate(both)] == [4, 4]


# Other runs


def another_recipe(options: CalibrateOptions) -> CalibrateOptions:
    return replace(options, recipes=(own_recipe(options.output.parent / "own.yaml", "cpu"),))


def one_number_in_the_recipe(options: CalibrateOptions) -> CalibrateOptions:
    recipe = own_recipe(options.output.parent / "own.yaml", damping=0.051)
    return replace(options, recipes=(recipe,))


def another_seed(options: CalibrateOptions) -> CalibrateOptions:
    return replace(options, recipes=(own_recipe(options.output.parent / "own.yaml", seed=1),))


def flip_lowest_bit(tensor: torch.Tensor) -> None:
    tensor.view(torch.int16)[0, 0] ^= 1


def one_bit_of_the_source(options: CalibrateOptions) -> CalibrateOptions:
    source = small.write_checkpoint(options.output.parent / "source", RAW)
    name = "model.layers.2.mlp.experts.0.up_proj.weight"
    weight_map = json.loads((source / INDEX).read_text())["weight_map"]
    edit_shard(source / weight_map[name], lambda t: flip_lowest_bit(t[name]))
    return replace(options, source=source)


def other_text(options: CalibrateOptions) -> CalibrateOptions:
    return replace(options, data=small.write_text(options.output.parent / "x.jsonl", 4000, seed=3))


OTHERS: dict[str, Callable[[CalibrateOptions], CalibrateOptions]] = {
    "recipe": another_recipe, "a number in the recipe": one_number_in_the_recipe,
    "seed": another_seed, "source": one_bit_of_the_source, "data": other_text,
    "windows": lambda options: replace(options, windows=3),
    "sequence length": lambda options: replace(options, sequence_length=16),
    "eps": lambda options: replace(options, latent_norm_eps=1e-6),
}  # fmt: skip
SAID = {  # what the refusal names, where it is not what changed
    "a number in the recipe": "recipe", "seed": "recipe", "windows": "recipe",
    "sequence length": "recipe",
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_never_resumes(options: CalibrateOptions, what: str) -> None:
    stop_at(options, "layer 1")
    before = {file.name: file.stat().st_mtime_ns for file in options.output.iterdir()}
    with pytest.raises(OutputError) as refused:
        pipeline.calibrate(OTHERS[what](options))
    assert "unfinished run with another" in str(refused.value)
    assert SAID.get(what, what) in str(refused.value)
    assert {file.name: file.stat().st_mtime_ns for file in options.output.iterdir()} == before
    assert finish(options)[1] == 1


def test_a_finished_folder_is_not_taken_again(options: CalibrateOptions) -> None:
    finish(options)
    before = contents(options.output)
    with pytest.raises(OutputError, match="not empty"):
        pipeline.calibrate(options)
    assert contents(options.output) == before


def test_a_folder_in_use_is_refused_before_the_source_is_read(
    options: CalibrateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes minutes at full size. Nothing is written either."""
    options.output.mkdir()
    (options.output / "mine.txt").write_text("mine")
    monkeypatch.setattr(Checkpoint, "scan", None)
    with pytest.raises(OutputError, match=r"not empty \(mine.txt is there\)"):
        pipeline.calibrate(options)
    assert [file.name for file in options.output.iterdir()] == ["mine.txt"]


def test_a_read_that_failed_once_is_in_the_record(
    options: CalibrateOptions,
    uninterrupted: tuple[dict[str, str], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures, read = [3], os.preadv

    def sometimes(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        failures[0] -= 1
        if failures[0] in (0, -9):
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", sometimes)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    notes = pipeline.calibrate(options)[0].run.notes
    said = [note for note in notes if "a read failed and was repeated" in note]
    assert sum(int(note.split(", ")[1].split()[0]) for note in said) == 2
    assert contents(options.output) == uninterrupted[0]


def test_two_processes_on_one_folder(
    warm: Warm, asked: CalibrateOptions, options: CalibrateOptions,
    uninterrupted: tuple[dict[str, str], float],
) -> None:  # fmt: skip
    pid = warm.start(*command(asked, options.output))
    while not (options.output / STATE / "shard-00001.json").exists():
        time.sleep(0.01)
    warm.kill(pid, signal.SIGSTOP)
    with pytest.raises(OutputError, match="another run is writing here"):
        pipeline.calibrate(options)
    warm.kill(pid, signal.SIGCONT)
    assert warm.wait().code == 0
    assert contents(options.output) == uninterrupted[0]
