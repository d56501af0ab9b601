"""`glm5q bench --check-only`: an op's whole test matrix on a function from anywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_ops import testkit
from fused_ops.op import OPS, resolve
from glm5q.errors import UserError
from glm5q.pipeline.common import check_device


@dataclass(frozen=True)
class Failure:
    """A case of the matrix that a function does not pass."""

    case: str
    problem: str


def check_implementation(
    op: str | None, entry: str | None, device: str = "cpu"
) -> tuple[str, int, list[Failure]]:
    """Returns `op`, how many cases it has, and those that the "module:function" `entry` fails.

    Modules are looked for in the present folder too. Raises UserError for names that do not exist.
    """
    if op is None or entry is None:
        raise UserError(
            "--check-only: needs --op and --impl", "as --op select_topk --impl mine:topk"
        )
    if op not in OPS:
        raise UserError(f"--op {op}: no such op", f"use one of {', '.join(OPS)}")
    check_device(device)
    function = _function(entry)
    verdicts = testkit.check(op, function, device)
    failures = [
        Failure(case.name, verdict.problem) for case, verdict in verdicts if verdict.problem
    ]
    return op, len(verdicts), failures


def _function(entry: str) -> Callable[..., Any]:
    fix = "give module:function, the module importable from here"
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; the glm5q program does not
    if entry.count(":") != 1:
        raise UserError(f"--impl {entry}: not of the form module:function", fix)
    try:
        function = resolve(entry)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"--impl {entry}: {error}", fix) from None
    if not callable(function):
        raise UserError(f"--impl {entry}: not a function", fix)
    return function
