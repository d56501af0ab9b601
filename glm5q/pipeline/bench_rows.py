"""What a bench times, as keys of a table, and its times as rows of a record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fused_ops.op import OpRequest
from reports import record as records
from targets import bench, passes

ENOUGH = 20  # calls from which one can be the 99th percentile
WINDOWS = 5  # a row's spread is that of so many windows' medians


@dataclass(frozen=True)
class Key:
    """A piece of work that can be looked up: an OpRequest's shape is a table."""

    text: str
    work: passes.Work

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def key_of(work: passes.Work) -> Key:
    if isinstance(work, OpRequest):
        shape = sorted(work.shape.items())
        return Key(f"{work.op} {work.dtype} {shape}", work)
    return Key(repr(work), work)


def label(key: Key) -> str:
    work = key.work
    return work.op if isinstance(work, OpRequest) else f"linear {work.columns} to {work.features}"


def row_of(timing: bench.Timing) -> records.Latency:
    return records.Latency(
        op=timing.op,
        implementation=timing.implementation,
        target=timing.target,
        shape=dict(timing.shape),
        dtype=timing.dtype,
        **spread(timing.calls_s),
        floor_s=timing.floor_s,
        how="measured",
        device=timing.device,
        bound=timing.bound,
        cpu_s=timing.cpu_s,
        memory_bytes=timing.memory_bytes,
        problem=timing.problem,
    )


def spread(calls: Sequence[float]) -> dict[str, Any]:
    """Median of all calls, least and most of their windows' medians, p99 where a call can be it."""
    size = max(1, len(calls) // WINDOWS)
    windows = [statistics.median(calls[low : low + size]) for low in range(0, len(calls), size)]
    ordered = sorted(calls)
    return {
        "median_s": statistics.median(calls),
        "low_s": min(windows),
        "high_s": max(windows),
        "p99_s": ordered[int(0.99 * len(ordered))] if len(ordered) >= ENOUGH else None,
        "calls": len(calls),
    }
