"""Progress on stderr: what is being done, how fast, how long still. Plain lines when piped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

QUIET_S = 10.0  # between lines when nobody watches


@contextmanager
def bar() -> Iterator[Callable[[str, float, float], None]]:
    """Yields a function (what, done, of) that shows progress until the block ends."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, tuple[TaskID, float]] = {}

        def update(what: str, done: float, of: float) -> None:
            stage = _stage(what)
            if stage not in tasks:
                task = progress.add_task(escape(what), total=of, rate="")
                tasks[stage] = (task, time.monotonic())
            task, started = tasks[stage]
            rate = _rate(done, of, time.monotonic() - started)
            progress.update(task, description=escape(what), completed=done, total=of, rate=rate)

        yield update


def _stage(what: str) -> str:
    """`evaluating layer 3` and `evaluating layer 4` are one bar."""
    return what.rstrip("0123456789").strip()


def _rate(done: float, of: float, elapsed_s: float) -> str:
    if not done or elapsed_s <= 0:
        return ""
    if of > 1e6:  # bytes
        return f"{done / elapsed_s / 1e9:.2f} GB/s"
    return f"{elapsed_s / done:.1f} s each"


def _lines() -> Callable[[str, float, float], None]:
    started: dict[str, float] = {}
    shown = 0.0

    def update(what: str, done: float, of: float) -> None:
        nonlocal shown
        now = time.monotonic()
        begun = started.setdefault(_stage(what), now)
        if now - shown < QUIET_S and done < of:
            return
        shown = now
        left = (now - begun) / done * (of - done) if done else 0.0
        rate = _rate(done, of, now - begun)
        text = f"{what}: {done / of:.0%}" + (f", {rate}, {left:.0f} s left" if rate else "")
        print(text, file=sys.stderr, flush=True)

    return update
