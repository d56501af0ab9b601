"""What verifying found: a row a check, and which sizes of parallelism fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "fail", "skip", "note"]
SHOWN = 8  # problems named in a row's detail; the others are counted


@dataclass(frozen=True)
class Row:
    """One check. `detail` is what was looked at, or why not; `problems` name tensors or files."""

    check: str
    status: Status
    detail: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fit:
    """Whether an engine can split the model over `size` devices, `why` not if it cannot."""

    engine: str
    size: int
    expert_parallel: bool
    fits: bool
    why: str


@dataclass(frozen=True)
class Report:
    """All rows, and the table of parallelism."""

    root: str
    format: str
    rows: tuple[Row, ...]
    parallel: tuple[Fit, ...]

    @property
    def ok(self) -> bool:
        return all(row.status != "fail" for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok} | asdict(self)


def row(check: str, problems: Iterable[str], detail: str) -> Row:
    """Returns a failed row if there are problems, else a good one with `detail`."""
    found = tuple(problems)
    if not found:
        return Row(check, "ok", detail)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return Row(check, "fail", "; ".join(found[:SHOWN]) + more, found)
