"""Two processes give the files of one; one that dies ends the run, and the next goes on."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calibrate import ranks, states
from calibrate.job import Place
from calibrate.ranks import BACKENDS, Ranks, joined
from calibrate.shares import Share
from calibrate.states import share_out
from glm5q.errors import UserError
from glm5q.pipeline.common import check_same, embedded_checkpoint
from glm5q.writer import file_sha256
from tests.commands import INDEX
from tests.runs import command, edit_recipe, small_run

ROOT = Path(__file__).parents[2]
ASKED = (
    "calibrate", "--recipe", "h200", "--windows", "4", "--sequence-length", "64",
    "--eval-windows", "2", "--output",
)  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
DIES = str(Path(__file__).with_name("dying_rank.py"))
ENDS = str(Path(__file__).with_name("ended_group.py"))
TIRES = str(Path(__file__).with_name("tired_rank.py"))
SHARES_A_LAYER = 2 * 2  # the codes of two candidates, of two stacks


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *(str(argument) for argument in arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def shards(output: Path) -> dict[str, str]:
    return {file.name: file_sha256(file) for file in output.glob("*.safetensors")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "out"
    ended = python("-m", "glm5q", *ASKED, output)
    assert ended.returncode == 0, ended.stderr
    return output


def test_two_ranks_give_the_codes_of_one(alone: Path, tmp_path: Path) -> None:
    """Three too, though one window is held out: two have none to measure on."""
    for size in (2, 3):
        output = tmp_path / str(size)
        ended = python(*TORCHRUN, size, "-m", "glm5q", *ASKED, output)
        assert ended.returncode == 0, ended.stderr
        assert shards(output) == shards(alone)
        assert len(shards(alone)) == 8


@pytest.mark.parametrize("step", ["guidance", "correction", "inner"])
def test_two_ranks_weigh_the_tokens_that_one_does(step: str, tmp_path: Path) -> None:
    """By the end loss's weights, which are numbered through all windows; or in both streams."""
    asked = small_run(tmp_path)
    steps = {"descent": 1, "guidance": False} | {step: True}
    edit_recipe(asked.recipes[0], lambda raw: raw["efforts"].update(fast=steps))
    for name, before in (("one", ()), ("two", (*TORCHRUN, 2))):
        ended = python(*before, "-m", "glm5q", *command(asked, tmp_path / name))
        assert ended.returncode == 0, ended.stderr
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    layers = json.loads((tmp_path / "one" / "report.json").read_text())["layers"]
    assert any(layer.get("correction") for layer in layers) == (step == "correction")
    methods = [name for layer in layers for name in (layer["experts"] or {}).get("method", [])]
    assert any("inner" in method for method in methods) == (step == "inner")


def test_a_folder_the_first_refuses_is_untouched(tmp_path: Path) -> None:
    """Also by the others, whose hidden states would lie in files there."""
    (tmp_path / "mine.txt").write_text("mine")
    ended = python(*TORCHRUN, 2, "-m", "glm5q", *ASKED, tmp_path, "--hidden-gb", "1e-7")
    assert ended.returncode != 0
    assert f"glm5q: {tmp_path}: not empty" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_device_that_is_not_there_is_said_in_a_line(tmp_path: Path) -> None:
    ended = python(*TORCHRUN, 2, "-m", "glm5q", *ASKED, tmp_path / "out", "--device", "cuda")
    assert ended.returncode != 0
    assert "glm5q: --device cuda: not usable here" in ended.stderr
    assert "glm5q/cli.py" not in ended.stderr  # no traceback of ours; torchrun has one of its own


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process, the second of two; nothing is connected."""
    for name, answer in (
        ("is_torchelastic_launched", True), ("init_process_group", None),
        ("destroy_process_group", None), ("get_rank", 1), ("get_world_size", 2),
    ):  # fmt: skip
        monkeypatch.setattr(ranks.dist, name, lambda *_, _answer=answer, **__: _answer)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


@pytest.mark.usefixtures("launched")
def test_a_peer_that_is_gone_is_said_in_a_line() -> None:
    """As gloo and NCCL say it; what else goes wrong is a bug and keeps its traceback."""
    gone = (
        RuntimeError("[pair.cc:559] Connection closed by peer [127.0.0.1]:1"),
        torch.distributed.DistBackendError("NCCL error: remote process exited"),
    )
    for error in gone:
        with pytest.raises(UserError, match="another process of this run has ended"), joined("cpu"):
            raise error
    with joined("cpu") as (_, own):
        assert own == Ranks(1, 2, 2, 1)
    with pytest.raises(RuntimeError, match="shapes"), joined("cpu"):
        raise RuntimeError("shapes differ")


@pytest.mark.usefixtures("launched")
def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="process 2 of this machine has no GPU"), joined("cuda"):
        pass


def test_processes_that_go_by_other_things_are_refused() -> None:
    class Two(Ranks):
        def all_of(self, value: list[Any], _device: object) -> list[Any]:
            return value + [one | {"data": "stale"} for one in value]

    own = [{"source": "a", "data": "b"}, {"source": "a", "data": "c"}]
    check_same(own, Place())
    with pytest.raises(UserError, match="process 1 has another data than process 0"):
        check_same(own, Place("cpu", Two(0, 2)))


def on_two_machines(*arguments: tuple[object, ...]) -> list[tuple[int, str]]:
    """Returns (exit code, stderr) of two torchruns as on two machines, each with its arguments."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = ("-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "localhost")
    with ThreadPoolExecutor() as pool:
        ended = pool.map(
            lambda number: python(
                *common, "--master-port", port, "--node-rank", number,
                "-m", "glm5q", *arguments[number],
            ),
            range(2),
        )  # fmt: skip
        return [(one.returncode, one.stderr) for one in ended]


def test_two_machines_give_the_codes_of_one(alone: Path, tmp_path: Path) -> None:
    """Each with its own copy of the source; one that differs in a bit is noticed before writing."""
    own = tmp_path / "copy"
    shutil.copytree(embedded_checkpoint(), own)
    data = embedded_checkpoint() / "calibration.jsonl"
    asked = (*ASKED, tmp_path / "out", "--data", data)
    here, there = (asked[0], embedded_checkpoint(), *asked[1:]), (asked[0], own, *asked[1:])
    for code, said in on_two_machines(here, there):
        assert code == 0, said
    assert shards(tmp_path / "out") == shards(alone)
    shutil.rmtree(tmp_path / "out")
    with next(own.glob("*.safetensors")).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))  # an exponent's bit: still finite
    for code, said in on_two_machines(here, there):
        assert code != 0
        assert "process 1 reads other bytes in the source than process 0" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_run_and_the_next_goes_on(
    rank: int, alone: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    after = SHARES_A_LAYER + 2  # in the second layer with experts
    ended = python(*TORCHRUN, 2, DIES, rank, after, *ASKED, output)
    assert ended.returncode != 0
    assert not (output / INDEX).exists()
    kept = shards(output)
    assert 3 <= len(kept) < 8
    assert {name: shards(alone)[name] for name in kept} == kept
    ended = python("-m", "glm5q", *ASKED, output, "--json")
    assert ended.returncode == 0, ended.stderr
    assert '"resumed_layers": 2' in ended.stdout
    assert shards(output) == shards(alone)


def test_no_thread_of_a_group_outlives_it() -> None:
    """One that did aborted a rank as Python ended, once in some hundred runs."""
    ended = python(*TORCHRUN, 1, ENDS)
    assert ended.returncode == 0, ended.stderr


def test_parts_cover_a_stack_once() -> None:
    for size in (1, 2, 3, 7):
        parts = [Ranks(rank, size).mine(5) for rank in range(size)]
        assert [index for part in parts for index in part] == list(range(5))
        assert all(list(Ranks(rank, size).mine(1)) == [0] for rank in range(size))


@given(
    windows=st.integers(2, 90), held_out=st.integers(1, 20), length=st.sampled_from([16, 300, 3000])
)
def test_chunks_do_not_depend_on_ranks(windows: int, held_out: int, length: int) -> None:
    """Whole chunks of one process, each window once, statistics and held-out ones apart."""
    held_out = min(held_out, windows - 1)
    alone = share_out(windows, held_out, length)
    wanted = pieces(alone)
    assert max(len(piece) for piece in wanted) <= max(1, states.CHUNK_TOKENS // length)
    assert [window for piece in wanted for window in piece] == list(range(windows))
    for size in range(2, min(9, len(pieces(alone, alone.statistics)) + 1)):
        shares = [share_out(windows, held_out, length, ranks=Ranks(r, size)) for r in range(size)]
        for kind in ("statistics", "held_out"):
            found = [piece for s in shares for piece in pieces(s, getattr(s, kind))]
            assert found == pieces(alone, getattr(alone, kind))
        numbers = torch.arange(windows)
        for share in shares:
            own = share.of(numbers).tolist()
            assert own == [*share.statistics, *share.held_out]
            assert [share.number(index) for index in range(len(own))] == own
            assert [own[index] for index in share.split] == list(share.held_out)


def pieces(share: Share, kind: range | None = None) -> list[list[int]]:
    """The numbers of the windows in each chunk, of one kind if asked."""
    found = [
        [share.number(own) for own in range(start, end)] for start, end in pairwise(share.bounds)
    ]
    return [piece for piece in found if kind is None or piece[0] in kind]


def test_two_ranks_run_about_half_each_at_full_size() -> None:
    """As many windows as 1,048,576 tokens are: none has over 52 % of either kind."""
    for size, most in ((2, 0.52), (4, 0.27)):
        for rank in range(size):
            share = share_out(512, 51, 2048, "cuda", Ranks(rank, size))
            assert len(share.statistics) <= most * 461
            assert size > 2 or len(share.held_out) <= most * 51


def test_a_layer_is_timed_on_several_ranks() -> None:
    """Only the first prints, once, and says how many there were."""
    asked = ("bench-calibrate", "--shape", "embedded", "--experts", "4", "--tokens", "512")
    ended = python(*TORCHRUN, 2, "-m", "glm5q", *asked, "--sequence-length", "64", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ranks"] == 2
    assert found["tokens"] == 512
    assert sum(found["expert_tokens"]) > 0


def test_what_went_otherwise_on_any_rank_is_in_the_record(tmp_path: Path) -> None:
    """A rank that ran out of memory in a forward starts over while the others wait."""
    output = tmp_path / "out"
    asked = ("40" if word == "4" else word for word in ASKED)
    ended = python(*TORCHRUN, 2, TIRES, 1, *asked, output, "--json")
    assert ended.returncode == 0, ended.stderr
    layers = json.loads(ended.stdout)["layers"]
    said = [f["action"] for layer in layers for f in layer["fallbacks"] if "memory" in f["reason"]]
    assert said == ["chunks of 192 tokens"]
    assert len(shards(output)) == 8


def test_fewer_windows_than_processes_are_refused() -> None:
    with pytest.raises(UserError, match="4 windows, 1 held out, are too few for 4 processes"):
        share_out(4, 1, 64, ranks=Ranks(0, 4))


def test_more_processes_than_chunks_have_smaller_chunks() -> None:
    shares = [share_out(512, 51, 2048, "cuda", Ranks(rank, 32)) for rank in range(32)]
    assert [n for share in shares for n in share.statistics] == list(range(461))
    assert {len(share.statistics) for share in shares} == {14, 15}


def test_backends_go_by_kind_of_device() -> None:
    assert BACKENDS == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
