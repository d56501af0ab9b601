"""Joins the ranks that torchrun started; fails if a gloo thread is left when it has left them."""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from calibrate.ranks import joined


def gloo_threads() -> list[str]:
    found = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it ended meanwhile
            found.append(file.read_text().strip())
    return [name for name in found if "gloo" in name]


def comes(wanted: bool) -> bool:
    """Whether gloo's threads are there, or gone, before long.

    A thread names itself after it has started, and the kernel lists it a moment after it was
    joined; on a busy machine both take a while.
    """
    deadline = time.monotonic() + 30
    while bool(gloo_threads()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(gloo_threads()) == wanted


with joined("cpu"):
    assert comes(True)
    import_module("torch._dynamo")
assert comes(False)
