"""Routed experts' product in portable Triton: a program is some features of one expert, some rows.

Four-bit codes stand two in a signed byte, a group's first half of columns low and its second half
high, so that unpacking needs no interleaving. Features are the product's rows: an expert with few
tokens fills a matrix unit with its weights.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806
# Kernels are Triton's language, constants in capitals. Nothing but triton is imported: compilers of
# other chips read this file where there is no torch.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(packed, CUDA: tl.constexpr):
    """(low, high) four-bit codes of signed bytes; on CUDA times 16, four bytes an instruction."""
    if CUDA:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; "
            "and.b32 $1, $2, 0xF0F0F0F0; }",
            "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return (packed << 4) >> 4, packed >> 4


@triton.jit
def products(
    codes, rows, row_in, base, columns,
    STEP: tl.constexpr, EVEN: tl.constexpr, BITS: tl.constexpr, SUM: tl.constexpr,
    WIDEN: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """[features, ROWS] of SUM: a group's codes at `codes` [features, STEP] times rows' columns.

    int32 of int8 rows; float32 of bfloat16 ones, which hold float8 and the codes exactly.
    """
    code: tl.constexpr = tl.int8 if tl.int32 == SUM else (tl.float32 if WIDEN else tl.bfloat16)
    column = tl.arange(0, STEP)
    near = row_in[:, None] if EVEN else row_in[:, None] & (base + column < columns)[None, :]
    first = tl.load(rows[:, None] + (base + column)[None, :], mask=near, other=0)
    packed = tl.load(codes)
    if BITS == 8:
        return tl.dot(packed.to(code), tl.trans(first.to(code)), out_dtype=SUM)
    far = row_in[:, None] if EVEN else row_in[:, None] & (base + STEP + column < columns)[None, :]
    second = tl.load(rows[:, None] + (base + STEP + column)[None, :], mask=far, other=0)
    low, high = halves(packed, CUDA)
    sums = tl.dot(low.to(code), tl.trans(first.to(code)), out_dtype=SUM)
    return tl.dot(high.to(code), tl.trans(second.to(code)), sums, out_dtype=SUM)


@triton.jit
def multiply(
    x, codes, scale, x_scale, tiles, out, x_row, columns, features,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr,
    EVEN: tl.constexpr, HAS_X_SCALE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
    SUM: tl.constexpr, WIDEN: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """N features of ROWS rows of one expert; a group's SUM is scaled in float32 after it."""
    tile = tiles + tl.program_id(0) * 3
    expert, end = tl.load(tile).to(tl.int64), tl.load(tile + 2)
    if expert < 0:
        return
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    feature = tl.program_id(1) * N + tl.arange(0, N)
    row_in, feature_in = row < end, feature < features
    STEP: tl.constexpr = WIDTH // 2 if BITS == 4 else WIDTH
    at = expert * GROUPS * features + tl.minimum(feature, features - 1)
    weights = codes + (at * STEP)[:, None] + tl.arange(0, STEP)[None, :]
    rows = x + tl.minimum(row, end - 1).to(tl.int64) * x_row
    whole = tl.zeros((N, ROWS), SUM)
    total = tl.zeros((N, ROWS), tl.float32)
    scales = scale + (expert if CHANNEL else expert * GROUPS) * features + feature
    factor = tl.load(scales, mask=feature_in, other=0.0)
    for group in range(0, GROUPS):
        sums = products(
            weights, rows, row_in, group * WIDTH, columns, STEP, EVEN, BITS, SUM, WIDEN, CUDA
        )
        if CHANNEL:
            whole += sums
        else:
            total += sums.to(tl.float32) * factor[:, None]
            # The next group's scales are asked for here: a step would wait for its own.
            scales += features
            factor = tl.load(scales, mask=feature_in & (group + 1 < GROUPS), other=0.0)
        weights += STEP * features
    if CHANNEL:
        total = whole.to(tl.float32) * factor[:, None]
    if CUDA and BITS == 4:
        total = total * 0.0625  # halves are sixteenfold
    if HAS_X_SCALE:
        total = total * tl.load(x_scale + row, mask=row_in, other=0.0)[None, :]
    place = out + row.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=row_in[None, :] & feature_in[:, None])


@triton.jit
def gated(both, inner, start, N: tl.constexpr):
    """silu(gate) x up of features `start` on of a row of gates and, `inner` further, ups."""
    feature = start + tl.arange(0, N)
    gate = tl.load(both + feature, mask=feature < inner, other=0.0)
    up = tl.load(both + inner + feature, mask=feature < inner, other=0.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def requantize(
    both, codes, scale, inner, REACH: tl.constexpr, ROUND: tl.constexpr, N: tl.constexpr
):
    """A row's silu(gate) x up / scale, scale = largest / REACH; to whole numbers, if ROUND."""
    row = tl.program_id(0).to(tl.int64)
    both += row * 2 * inner
    codes += row * inner
    largest = tl.full((), 0.0, tl.float32)
    start = tl.full((), 0, tl.int32)
    while start < inner:  # the interpreter's range takes no tensor (3.6.0 on numpy 2.4)
        largest = tl.maximum(largest, tl.max(tl.abs(gated(both, inner, start, N)), 0))
        start += N
    factor = tl.where(largest > 0, largest / REACH, 1.0)
    tl.store(scale + row, factor)
    start = tl.full((), 0, tl.int32)
    while start < inner:
        value = gated(both, inner, start, N) / factor
        value = tl.minimum(tl.maximum(value, -REACH), REACH)
        if ROUND:
            value = (value + 12582912.0) - 12582912.0  # 1.5 x 2 ** 23: to even
        feature = start + tl.arange(0, N)
        tl.store(codes + feature, value.to(codes.dtype.element_ty), mask=feature < inner)
        start += N


@triton.jit
def list_tiles(offsets, tiles, experts, E: tl.constexpr, ROWS: tl.constexpr):
    """tiles [n, 3] of at most ROWS rows: (expert, first row, the expert's end); E pads experts."""
    expert = tl.arange(0, E)
    real = expert < experts
    start = tl.load(offsets + expert, mask=real, other=0).to(tl.int32)
    end = tl.load(offsets + expert + 1, mask=real, other=0).to(tl.int32)
    count = (end - start + ROWS - 1) // ROWS
    first = tl.cumsum(count, 0) - count
    most = tl.max(count, 0)
    step = tl.full((), 0, tl.int32)
    while step < most:
        more = step < count
        at = tiles + (first + step) * 3
        tl.store(at, expert, mask=more)
        tl.store(at + 1, start + step * ROWS, mask=more)
        tl.store(at + 2, end, mask=more)
        step += 1
