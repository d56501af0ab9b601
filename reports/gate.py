"""`--fail-if`: conditions on a comparison that a build must not meet."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from glm5q.errors import UserError
from reports.comparison import Cell, Comparison, Metric
from reports.terminal import plain
from reports.text import FORMATS

_CONDITION = re.compile(r"\s*([\w.*\-]+)\s*(>=|<=|>|<)\s*([-+.\deE]+?)(x?)\s*")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True)
class Condition:
    """`kl_mean>1.05x`: `relative` limits are multiples of the baseline. `metric` may have `*`."""

    metric: str
    sign: str
    limit: float
    relative: bool


def check(comparison: Comparison, expression: str) -> tuple[str, ...]:
    """Returns a line for every condition that a run other than the baseline meets; empty is a pass.

    `expression` holds one condition or several with commas between. A value that is missing or not
    a number meets every condition; a pattern covers the metrics that the baseline has. Raises
    UserError for what does not parse or is not known.
    """
    found = []
    for condition in parse(expression):
        for metric in _matching(comparison, condition.metric):
            base = metric.cells[0].value
            if base is None and "*" in condition.metric:
                continue
            for name, cell in zip(comparison.names[1:], metric.cells[1:], strict=True):
                if line := _breach(condition, metric, base, cell):
                    found.append(f"{name}: {line}")
    return tuple(found)


def parse(expression: str) -> list[Condition]:
    """Raises UserError, in one line, for the first condition that is not one."""
    conditions = []
    for part in expression.split(","):
        match = _CONDITION.fullmatch(part)
        try:
            if match is None:
                raise ValueError
            conditions.append(
                Condition(match[1], match[2], float(match[3]), relative=match[4] == "x")
            )
        except ValueError:
            raise UserError(
                f"--fail-if: {part.strip()!r} is not a condition",
                "write it as 'kl_mean>1.05x' or 'top1_agreement<0.95'",
            ) from None
    return conditions


def _matching(comparison: Comparison, pattern: str) -> list[Metric]:
    found = [metric for metric in comparison.metrics if fnmatchcase(metric.key, pattern)]
    if not found:
        known = [metric.key for metric in comparison.metrics]
        near = difflib.get_close_matches(pattern, known, 3) or known[:6]
        raise UserError(f"--fail-if: no metric {pattern!r} here", f"there is {', '.join(near)}")
    return found


def _breach(condition: Condition, metric: Metric, base: float | None, cell: Cell) -> str | None:
    if cell.value is None:
        return f"{metric.key} was not measured"
    if condition.relative and base is None:
        return f"{metric.key} was not measured in the baseline"
    limit = condition.limit * base if condition.relative and base is not None else condition.limit
    sound = math.isfinite(cell.value) and math.isfinite(limit)
    if sound and not _OPERATORS[condition.sign](cell.value, limit):
        return None
    show = FORMATS[metric.form]
    times = f" ({condition.limit:g}x the baseline)" if condition.relative else ""
    return plain(f"{metric.key} {show(cell.value)} {condition.sign} {show(limit)}{times}")
