"""Routed experts' product in Triton for Ascend: a program is some rows and features of one expert.

triton_kernel.py has features for rows, which fills a GPU's matrix unit at one token an expert; an
NPU would move its transposed output an element at a time, and UB overflows. Four-bit codes stand
two in a signed byte, a group's first half of columns low and its second half high, so that
unpacking is two arithmetic shifts and two dots, with nothing interleaved.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806
# Kernels are Triton's language, constants in capitals; Triton 3.2's, which Ascend's frontend is.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(
    x, codes, scale, x_scale, tiles, out, x_row, columns, features,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr,
    HAS_X_SCALE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """ROWS x N outputs of one expert; a group's sum is int32, scaled in float32 after it."""
    tile = tiles + tl.program_id(0) * 3
    expert, end = tl.load(tile).to(tl.int64), tl.load(tile + 2)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    feature = tl.program_id(1) * N + tl.arange(0, N)
    row_in, feature_in = row < end, feature < features
    STEP: tl.constexpr = WIDTH // 2 if BITS == 4 else WIDTH
    column = tl.arange(0, STEP)
    at = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
    weights = codes + expert * GROUPS * STEP * features
    weights += column[:, None] * features + feature[None, :]
    whole = tl.zeros((ROWS, N), tl.int32)
    total = tl.zeros((ROWS, N), tl.float32)
    for group in range(0, GROUPS):
        base = group * WIDTH
        near = row_in[:, None] & (base + column < columns)[None, :]
        first = tl.load(at + base, mask=near, other=0)
        packed = tl.load(weights, mask=feature_in[None, :], other=0)
        if BITS == 4:
            far = row_in[:, None] & (base + STEP + column < columns)[None, :]
            second = tl.load(at + base + STEP, mask=far, other=0)
            sums = tl.dot(first, (packed << 4) >> 4, out_dtype=tl.int32)
            sums += tl.dot(second, packed >> 4, out_dtype=tl.int32)
        else:
            sums = tl.dot(first, packed, out_dtype=tl.int32)
        if CHANNEL:
            whole += sums
        else:
            factor = tl.load(
                scale + (expert * GROUPS + group) * features + feature, mask=feature_in, other=0.0
            )
            total += sums.to(tl.float32) * factor[None, :]
        weights += STEP * features
    if CHANNEL:
        factor = tl.load(scale + expert * features + feature, mask=feature_in, other=0.0)
        total = whole.to(tl.float32) * factor[None, :]
    if HAS_X_SCALE:
        total = total * tl.load(x_scale + row, mask=row_in, other=0.0)[:, None]
    place = out + row.to(tl.int64)[:, None] * features + feature[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=row_in[:, None] & feature_in[None, :])
