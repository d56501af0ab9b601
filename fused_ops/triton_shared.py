"""What several Triton kernels share."""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals. Of libraries, only triton is imported.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def holder(number, bounds, count, STEPS: tl.constexpr):
    """Which of `count` spans holds `number`, by STEPS bisections of bounds [count + 1]."""
    low = (number * 0).to(tl.int32)  # Gluon, which uses this too, has another full()
    for step in tl.static_range(STEPS):
        middle = low + (1 << (STEPS - 1 - step))
        there = tl.load(bounds + tl.minimum(middle, count))
        low = tl.where((middle < count) & (there <= number), middle, low)
    return low
