"""Stage L3: an op's test matrix, run on this CPU from Ascend's IR and judged by its definition.

Code that reads outside its tensors ends its process, so the cases run in one of their own: the
program `python -m targets.ascend.numeric`, with JSON on stdin and a line of JSON a case on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fused_ops import op as ops
from fused_ops import testkit
from targets.ascend.toolchain import StageError
from targets.ascend.x86 import X86

IMPLEMENTATION = "triton-ascend"
INFINITE = float("inf")


@dataclass(frozen=True)
class Judged:
    """One case: `error` and `allowed` relative, 0 where exact; `problem` is None if it holds."""

    case: str
    error: float
    allowed: float
    problem: str | None


def judge(
    op: str,
    environment: Path,
    die: str,
    *,
    tiles: Mapping[str, int] | None = None,
    sources: Mapping[str, Path] | None = None,
    containing: str = "",
) -> list[Judged]:
    """Runs the cases of `op` that the implementation takes and whose name has `containing`.

    `sources` as X86's. A case that ends the process is the last, with that as its problem.
    """
    request = {
        "op": op,
        "environment": str(environment),
        "die": die,
        "tiles": tiles,
        "sources": {module: str(path) for module, path in (sources or {}).items()},
        "containing": containing,
    }
    found = subprocess.run(
        [sys.executable, "-m", "targets.ascend.numeric"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    judged = [Judged(**line) for line in lines if "error" in line]
    if found.returncode < 0:
        problem = f"the code ended its process with signal {-found.returncode}"
        judged.append(Judged(lines[-1]["case"], INFINITE, 0.0, problem))
    elif found.returncode:
        raise RuntimeError(f"the numeric stage of {op} failed: {found.stderr.strip()}")
    return judged


def _verdicts(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields each case's name before it runs, and its verdict after."""
    implementation = _implementation(request["op"])
    function = ops.resolve(implementation.entry)
    tiles = {} if request["tiles"] is None else {"tiles": request["tiles"]}
    sources = {module: Path(path) for module, path in request["sources"].items()}
    with tempfile.TemporaryDirectory() as work:
        run = X86(Path(request["environment"]), request["die"], Path(work), sources)
        for case in testkit.fitting(request["op"], implementation, "ascend"):
            if request["containing"] not in case.name:
                continue
            yield {"case": case.name}
            try:
                verdict = testkit.run(case, partial(function, run=run, **tiles))
            except StageError as error:
                verdict = testkit.Verdict(INFINITE, 0.0, str(error))
            yield asdict(Judged(case.name, verdict.error, verdict.allowed, verdict.problem))


def _implementation(op: str) -> ops.Implementation:
    """The implementation, as if an NPU were here: what runs it is X86."""
    for implementation in ops.load(op).implementations:
        if implementation.name == IMPLEMENTATION:
            return replace(implementation, available=None)
    raise ValueError(f"{op} has no {IMPLEMENTATION}")


def main() -> None:
    for line in _verdicts(json.load(sys.stdin)):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
