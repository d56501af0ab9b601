"""Triton kernels of what a forward does to rows beside its products, each in one pass.

Rounding is as in the plain torch that stands beside each launch in rows.py.
"""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding it leaves the nearest integer, ties to even


@triton.jit
def norm_rows(
    x, added, weight, total, out, stride, columns, eps,
    ADD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """out = x / rms(x) x weight, of x + `added` where there is one; that sum goes to `total`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SPAN)
    inside = column < columns
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(added + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * columns + column, values, mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / columns + eps)
    values = values * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * columns + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    x, cos, sin, pitch, head_pitch, first,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Rotates adjacent pairs of each head's features from `first` on, in place.

    x [tokens, heads, ...]; `cos`, `sin` float32 [tokens, HALF].
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    c, s = tl.load(cos + token * HALF + pair)[None, :], tl.load(sin + token * HALF + pair)[None, :]
    head, feature = tl.arange(0, HEADS), tl.arange(0, 2 * HALF)
    place = x + token * pitch + head[:, None] * head_pitch + first + feature[None, :]
    values = tl.load(place).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (HEADS, HALF, 2)))
    turned = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (HEADS, 2 * HALF))
    tl.store(place, turned.to(x.dtype.element_ty))


@triton.jit
def add_choices(
    rows, place, gates, shared, hidden, out, columns,
    CHOICES: tl.constexpr, SHARED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """out[token] = hidden + (shared +) the sum of gate x row over its choices, in their order.

    `rows` [tokens x choices, columns] are sorted by expert, `place` [tokens, choices] says where.
    The sum is float32 and rounded to the rows' dtype, as is the shared expert's added to it.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = column < columns
    total = tl.zeros((SPAN,), tl.float32)
    for choice in tl.static_range(CHOICES):
        row = tl.load(place + token * CHOICES + choice).to(tl.int64)
        gate = tl.load(gates + token * CHOICES + choice)
        total += gate * tl.load(rows + row * columns + column, mask=inside, other=0.0).to(
            tl.float32
        )
    total = total.to(rows.dtype.element_ty).to(tl.float32)
    if SHARED:
        total += tl.load(shared + token * columns + column, mask=inside, other=0.0).to(tl.float32)
        total = total.to(rows.dtype.element_ty).to(tl.float32)
    total += tl.load(hidden + token * columns + column, mask=inside, other=0.0)
    tl.store(out + token * columns + column, total, mask=inside)


@triton.jit
def column_absmax(x, out, rows, columns, stride, TALL: tl.constexpr, STEP: tl.constexpr,
                  SPAN: tl.constexpr):  # fmt: skip
    """out [programs, columns] = the largest magnitude of TALL rows of each column."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = column < columns
    most = tl.zeros((STEP, SPAN), tl.float32)
    for step in range(TALL // STEP):
        row = part * TALL + step * STEP + tl.arange(0, STEP)
        near = (row < rows)[:, None] & inside[None, :]
        values = tl.load(x + row[:, None] * stride + column[None, :], mask=near, other=0.0)
        most = tl.maximum(most, tl.abs(values.to(tl.float32)))
    tl.store(out + part * columns + column, tl.max(most, axis=0), mask=inside)


@triton.jit
def add_grams(
    x, offsets, grams, tiles, columns, pitch,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds x' x of each expert's rows to its Gram: the tiles [TALL, WIDE] named in `tiles`.

    x [rows, columns], rows `pitch` apart, sorted by expert; `offsets` int64 [experts + 1] bounds
    them; `grams` float32 [experts, columns, columns].
    """
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    left = tl.load(tiles + tile * 2) * TALL + tl.arange(0, TALL)
    right = tl.load(tiles + tile * 2 + 1) * WIDE + tl.arange(0, WIDE)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    inside_left, inside_right = left < columns, right < columns
    total = tl.zeros((TALL, WIDE), tl.float32)
    for first in range(start, end, DEEP):
        row = first + tl.arange(0, DEEP)
        live = (row < end)[:, None]
        place = x + row[:, None] * pitch
        a = tl.load(place + left[None, :], mask=live & inside_left[None, :], other=0.0)
        b = tl.load(place + right[None, :], mask=live & inside_right[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=DOT)
    if end > start:
        place = grams + (expert * columns + left[:, None]) * columns + right[None, :]
        near = inside_left[:, None] & inside_right[None, :]
        tl.store(place, tl.load(place, mask=near, other=0.0) + total, mask=near)


@triton.jit
def mirror_grams(grams, tiles, columns, SIDE: tl.constexpr):
    """Copies what lies below the diagonal of square tiles named in `tiles` to above it."""
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(tiles + tile * 2) * SIDE + tl.arange(0, SIDE)
    column = tl.load(tiles + tile * 2 + 1) * SIDE + tl.arange(0, SIDE)
    gram = grams + expert * columns * columns
    below = (row[:, None] > column[None, :]) & (row < columns)[:, None]
    values = tl.load(gram + row[:, None].to(tl.int64) * columns + column[None, :], mask=below)
    place = gram + column[:, None].to(tl.int64) * columns + row[None, :]
    tl.store(place, tl.trans(values), mask=tl.trans(below.to(tl.int32)) > 0)


@triton.jit
def row_squares(x, other, out, columns, SPAN: tl.constexpr):
    """out[row] = the sum of (x - other)^2."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SPAN)
    inside = column < columns
    left = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(other + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum((left - right) * (left - right), axis=0))


@triton.jit
def expanded(codes, scale, row, column, inside, columns, groups):
    """codes x scale, float32, at `column` of a row; scale [rows, groups]."""
    code = tl.load(codes + row * columns + column, mask=inside, other=0).to(tl.float32)
    group = column // (columns // groups)
    return code * tl.load(scale + row * groups + group, mask=inside, other=0.0)


@triton.jit
def expand_codes(codes, scale, out, columns, groups, SPAN: tl.constexpr):
    """out = codes x scale of one row a program; scale [rows, groups]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SPAN)
    inside = column < columns
    values = expanded(codes, scale, row, column, inside, columns, groups)
    tl.store(out + row * columns + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def code_errors(codes, scale, weight, out, columns, groups, SPAN: tl.constexpr):
    """out[row] = the sums of (codes x scale - weight)^2 and of weight^2."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SPAN)
    inside = column < columns
    exact = tl.load(weight + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    difference = expanded(codes, scale, row, column, inside, columns, groups) - exact
    tl.store(out + row * 2, tl.sum(difference * difference, axis=0))
    tl.store(out + row * 2 + 1, tl.sum(exact * exact, axis=0))


@triton.jit
def gate_rows(both, out, width, SPAN: tl.constexpr):
    """out = silu(gate) x up of rows that hold gate, then up, `width` each; as torch rounds it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(both.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def nearest_e4m3(x):
    """x of -448 .. 448 rounded to e4m3 and back, ties to even, by hand as the interpreter's is not.

    Four significant bits from 2^-6 on, multiples of 2^-9 below.
    """
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
    small = (x + ROUND * 0.001953125) - ROUND * 0.001953125
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def round_rows(
    x, out, stride, columns, REACH: tl.constexpr, FP8: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """quant.quantize_activation's grid of one scale a row, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SPAN)
    inside = column < columns
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    absmax = tl.max(tl.abs(values), axis=0)
    scale = tl.where(absmax > 0, tl.div_rn(absmax, REACH), 1.0)
    scaled = tl.div_rn(values, scale + tl.zeros((SPAN,), tl.float32))
    if FP8:
        rounded = nearest_e4m3(tl.minimum(tl.maximum(scaled, -REACH), REACH))
    else:
        rounded = (scaled + ROUND) - ROUND
    place = out + row * columns + column
    tl.store(place, (rounded * scale).to(out.dtype.element_ty), mask=inside)
