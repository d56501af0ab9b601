"""Triton kernels of the gradients of calibrate.rows' steps, each in one pass; sums are float32."""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_gradients(
    x, slope, weight, other, out, half, stride, columns, eps,
    ADD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """out = the gradient at x of x / rms(x) x weight, `slope` being that of the product.

    ADD adds `other`, the gradient at x by another way, and rounds the sum to `half` as well.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SPAN)
    inside = column < columns
    place = row * columns + column
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(slope + place, mask=inside, other=0.0).to(tl.float32)
    given *= tl.load(weight + column, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
    along = tl.sum(given * values, axis=0) / columns * scale * scale
    found = (given - values * along) * scale
    if ADD:
        found += tl.load(other + place, mask=inside, other=0.0)
        tl.store(half + place, found.to(half.dtype.element_ty), mask=inside)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_gradients(
    both, slope, gates, order, out, of_gates, squares, width,
    SPAN: tl.constexpr,
):  # fmt: skip
    """out = the gradient at `both` of gate x (silu(both's first half) x its second), row by row.

    `slope` [rows, width] is that of the bracket were every gate one. Row r is number `order[r]` of
    `gates`, of their gradients `of_gates` and of the mean squares of `out`'s rows in `squares`.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(order + row)
    column = tl.arange(0, SPAN)
    inside = column < width
    left = row * 2 * width + column
    gate = tl.load(both + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + left + width, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(slope + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    tl.store(of_gates + number, tl.sum(silu * up * given, axis=0))
    given *= tl.load(gates + number)
    of_up = given * silu
    of_gate = given * up * sigmoid * (1.0 + gate - silu)
    square = tl.sum(of_up * of_up + of_gate * of_gate, axis=0) / (2 * width)
    tl.store(squares + number, square)
    tl.store(out + left, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + left + width, of_up.to(out.dtype.element_ty), mask=inside)
