"""A bench's record as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from reports.record import Latency, RunRecord


def lines(run: RunRecord) -> list[str]:
    """Returns the table for people: each op at each shape, then whole passes, then the notes."""
    found: list[str] = []
    for at, row in enumerate(run.latency):
        head = _head(row)
        if not at or head != _head(run.latency[at - 1]):
            found.append(head)
        found.append(_time(row))
    for one in run.assembled:
        found.append(
            f"{one.stage}, assembled, context {one.context}, batch {one.batch}: "
            f"{one.total_s:.3g} s, {one.tokens_per_s:.3g} tokens a second"
        )
        found += [
            f"  {part.op:<32} {part.time_s:9.3g} s in {part.calls} calls" for part in one.parts
        ]
    for sweep in run.sweeps:
        rates = ", ".join(f"{p.batch}: {p.tokens_per_s:.3g}/s" for p in sweep.points)
        found.append(
            f"{sweep.op}, context {sweep.context}, tokens by batch {rates}; most at batch "
            f"{sweep.peak_batch}"
        )
    return found + run.notes


def checked(op: str, count: int, failures: Sequence[Any], as_json: bool) -> int:
    """Prints what fails of `op`'s matrix; returns 1 if anything does."""
    if as_json:
        told = {"op": op, "cases": count, "failures": [asdict(failure) for failure in failures]}
        click.echo(json.dumps(told, indent=1))
    else:
        for failure in failures:
            click.echo(f"{failure.case}: {failure.problem}")
        click.echo(f"{op}: {count - len(failures)} of {count} cases pass")
    return 1 if failures else 0


def _head(row: Latency) -> str:
    shape = " ".join(f"{name}={size}" for name, size in row.shape.items())
    return f"{row.op} {row.dtype} {shape}"


def _time(row: Latency) -> str:
    text = (
        f"  {row.implementation:<15}{row.median_s * 1e3:11.3f} ms "
        f"[{row.low_s * 1e3:.3f} - {row.high_s * 1e3:.3f}] x{row.calls}"
    )
    if row.p99_s is not None:
        text += f", p99 {row.p99_s * 1e3:.3f}"
    if row.cpu_s is not None:
        text += f", CPU {row.cpu_s * 1e3:.3f}"
    if row.floor_s:
        text += f", floor {row.floor_s * 1e3:.3f} ({row.bound})"
    return text + (f", WRONG: {row.problem}" if row.problem else "")
