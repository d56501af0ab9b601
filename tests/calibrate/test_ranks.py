"""Two processes give the files of one; one that dies ends the run, and the next goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from calibrate.ranks import Ranks
from glm5q.writer import file_sha256
from tests.commands import INDEX

ROOT = Path(__file__).parents[2]
ASKED = (
    "calibrate", "--recipe", "h200", "--windows", "4", "--sequence-length", "64",
    "--eval-windows", "2", "--output",
)  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DIES = str(Path(__file__).with_name("dying_rank.py"))
SHARES_A_LAYER = 3 * 2  # the codes of three candidates, of two stacks


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
    ended = python(*TORCHRUN, "-m", "glm5q", *ASKED, tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    assert shards(tmp_path / "out") == shards(alone)
    assert len(shards(alone)) == 8


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_run_and_the_next_goes_on(
    rank: int, alone: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    after = SHARES_A_LAYER + 2  # in the second layer with experts
    ended = python(*TORCHRUN, DIES, rank, after, *ASKED, output)
    assert ended.returncode != 0
    assert not (output / INDEX).exists()
    kept = shards(output)
    assert 3 <= len(kept) < 8
    assert {name: shards(alone)[name] for name in kept} == kept
    ended = python("-m", "glm5q", *ASKED, output, "--json")
    assert ended.returncode == 0, ended.stderr
    assert '"resumed_layers": 2' in ended.stdout
    assert shards(output) == shards(alone)


def test_parts_cover_a_stack_once() -> None:
    for size in (1, 2, 3, 7):
        parts = [Ranks(rank, size).mine(5) for rank in range(size)]
        assert [index for part in parts for index in part] == list(range(5))
        assert all(list(Ranks(rank, size).mine(1)) == [0] for rank in range(size))


def test_the_sum_is_in_one_processs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank holds its part; gathered, the sum is bit for bit that of the whole."""
    whole = torch.randn(6, 200, 200, generator=torch.Generator().manual_seed(0))
    mine = whole.clone()
    mine[:3] = 0  # of the other rank

    def broadcast(part: torch.Tensor, rank: int) -> None:
        if rank == 0:
            part.copy_(whole[:3, seen[0] : seen[0] + part.shape[1]])
            seen[0] += part.shape[1]

    seen = [0]
    monkeypatch.setattr("calibrate.ranks.dist.broadcast", broadcast)
    assert torch.equal(Ranks(1, 2).sum_of_stack(mine), whole.sum(0, keepdim=True))
