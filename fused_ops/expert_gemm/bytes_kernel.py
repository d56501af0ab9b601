"""Rows and codes to bytes, e4m3 or int8, in Triton for GPUs that convert to e4m3 (sm_89 on)."""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_float8(codes, out, count, N: tl.constexpr):
    """out = e4m3 of int8 codes, N a program."""
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    values = tl.load(codes + place, mask=place < count, other=0).to(tl.float32)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < count)


@triton.jit
def round_row(x, codes, scale, x_row, columns, REACH: tl.constexpr, N: tl.constexpr):
    """A row's codes, e4m3 or int8, and float32 scale, absmax / REACH or 1; N pads columns.

    What reference.quantize_rows gives on a GPU, where torch multiplies by 1 / REACH; but a negative
    zero loses its sign. A quotient is a product and its remainder's (Markstein): rounded as IEEE's,
    in a quarter of the instructions. None is so far above REACH that it would not round to it.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N)
    inside = column < columns
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(values), 0)
    factor = tl.where(absmax > 0, absmax * (1.0 / REACH), 1.0)
    tl.store(scale + row, factor)
    lift = tl.where(factor < 2.0**-100, 2.0**64, 1.0)  # the inverse of less would be infinite
    factor *= lift
    values *= lift
    inverse = tl.div_rn(1.0, factor)
    quotient = values * inverse
    quotient = tl.fma(tl.fma(-quotient, factor, values), inverse, quotient)
    if codes.dtype.element_ty == tl.int8:
        quotient = (quotient + 12582912.0) - 12582912.0  # 1.5 x 2 ** 23: to even
    tl.store(codes + row * columns + column, quotient.to(codes.dtype.element_ty), mask=inside)
