"""`glm5q bench --check-only`: someone else's function through an op's matrix, from their folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fused_ops import testkit

PORTS = '''
import torch
from fused_ops.lightning_indexer.reference import select_topk
from fused_ops.sparse_attention.reference import sparse_attention


def right(*args, **kwargs):
    return sparse_attention(*args, **kwargs)


def nan(*args, **kwargs):
    out, lse = sparse_attention(*args, **kwargs)
    out.view(-1)[0] = torch.nan
    return out, lse


def unmasked(query, latent, indices, *rest, **kwargs):
    return sparse_attention(query, latent, indices.clamp(min=0), *rest, **kwargs)


def one_tie(scores, topk):
    """The first chosen key of a tie that was cut off gives its place to a later, equal one."""
    chosen = select_topk(scores, topk)
    for row in range(scores.shape[0]):
        taken = chosen[row][chosen[row] >= 0].long()
        left = torch.ones(scores.shape[1], dtype=torch.bool)
        left[taken] = False
        tied = left & torch.isin(scores[row], scores[row, taken])
        if tied.any():
            late = tied.nonzero()[0, 0]
            taken[(scores[row, taken] == scores[row, late]).nonzero()[0, 0]] = late
            chosen[row, : len(taken)] = taken.sort().values
            return chosen
    return chosen


def broken(*args):
    print("hello")
    raise RuntimeError("not ported yet\\nand more")


def leaves(*args):
    raise SystemExit(0)


def cheat(scores, topk):
    """Of scores that are all equal, the first keys are right."""
    scores.fill_(0)
    return select_topk(scores, topk)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("port")
    (found / "ports.py").write_text(PORTS)
    return found


def check(folder: Path, op: str, function: str) -> tuple[int, dict[str, str], int]:
    """Returns the exit code, what fails by case, and how many cases there are."""
    command = [sys.executable, "-P", "-m", "glm5q", "bench", "--check-only", "--json"]
    command += ["--op", op, "--impl", f"ports:{function}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    told = json.loads(done.stdout)
    failures = {failure["case"]: failure["problem"] for failure in told["failures"]}
    return done.returncode, failures, told["cases"]


def test_a_right_function_passes_every_case(folder: Path) -> None:
    code, failures, count = check(folder, "sparse_attention", "right")
    assert (code, failures) == (0, {})
    assert count == len(testkit.cases("sparse_attention"))


def test_a_nan_fails_by_name(folder: Path) -> None:
    code, failures, count = check(folder, "sparse_attention", "nan")
    assert code == 1
    assert len(failures) == count  # it is in every result
    assert all("inf" in problem for problem in failures.values())


def test_reading_none_as_the_first_key_fails_by_name(folder: Path) -> None:
    code, failures, count = check(folder, "sparse_attention", "unmasked")
    assert code == 1
    assert 0 < len(failures) <= count
    assert set(failures) <= {case.name for case in testkit.cases("sparse_attention")}


def test_one_tie_the_wrong_way_fails_where_there_are_ties(folder: Path) -> None:
    code, failures, count = check(folder, "select_topk", "one_tie")
    assert code == 1
    assert 0 < len(failures) < count
    assert any("equal" in name or "rounded" in name for name in failures)


def test_an_exception_is_a_failure_of_its_case(folder: Path) -> None:
    code, failures, count = check(folder, "select_topk", "broken")
    assert code == 1
    assert set(failures.values()) == {"raised RuntimeError: not ported yet"}
    assert len(failures) == count


def test_leaving_the_process_is_a_failure(folder: Path) -> None:
    code, failures, count = check(folder, "select_topk", "leaves")
    assert (code, len(failures)) == (1, count)


def test_overwritten_inputs_do_not_make_it_right(folder: Path) -> None:
    code, failures, count = check(folder, "select_topk", "cheat")
    assert code == 1
    assert len(failures) > count / 2
    assert set(failures.values()) == {"changed its argument 0"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--op", "softmax", "--impl", "ports:right"], "no such op"),
        (["--op", "select_topk", "--impl", "ports:absent"], "--impl ports:absent"),
        (["--op", "select_topk", "--impl", "nowhere:f"], "--impl nowhere:f"),
        (["--op", "select_topk", "--impl", "./ports.py:right"], "--impl ./ports.py:right"),
        (["--op", "select_topk", "--impl", "ports"], "not of the form module:function"),
        (["--op", "select_topk"], "needs --op and --impl"),
    ],
)
def test_names_that_do_not_exist_are_one_line(folder: Path, words: list[str], message: str) -> None:
    command = [sys.executable, "-P", "-m", "glm5q", "bench", "--check-only", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
