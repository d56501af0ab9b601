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


with joined("cpu"):
    assert gloo_threads()
    import_module("torch._dynamo")
deadline = time.monotonic() + 5  # the kernel lists a thread for a moment after it was joined
while gloo_threads() and time.monotonic() < deadline:
    time.sleep(0.05)
assert not gloo_threads()
