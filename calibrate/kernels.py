"""Triton kernels of batched rounding: clip search, GPTQ's recursion, coordinate descent.

Matrices lie transposed, [experts, in, out], so that a column's rows are neighbours: a thread owns
rows, walks the columns of a block, and holds a few columns' changes in registers. What one block
of columns does to the next is a matrix product outside.
"""
# mypy: ignore-errors
# ruff: noqa: N803, RUF005
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding it leaves the nearest integer, ties to even
TINY = tl.constexpr(1.1754943508222875e-38)  # bfloat16's smallest normal, as quant.round_scale


@triton.jit
def nearest(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x rounded to an integer of LOW .. HIGH, as float32. Clamped first: |x| may be huge."""
    bounded = tl.minimum(tl.maximum(x, LOW), HIGH)
    return (bounded + ROUND) - ROUND


@triton.jit
def stored_scale(scale, BFLOAT16: tl.constexpr):
    """quant.round_scale in float32: rounded to its stored dtype, 1 where it cannot be used."""
    stored = scale
    if BFLOAT16:  # by hand: the interpreter's cast cuts off
        bits = scale.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        stored = bits.to(tl.float32, bitcast=True)
    return tl.where((stored >= TINY) & (stored < float("inf")), stored, 1.0)


@triton.jit
def search_clip(
    weight, square, shares, scales, rows, columns,
    STEPS: tl.constexpr, REACH: tl.constexpr, BFLOAT16: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """rtn.search_scale: weight [experts, rows, columns], scales [experts, groups, rows]."""
    expert, group = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = group * WIDTH + tl.arange(0, SPAN)
    inside = tl.arange(0, SPAN) < WIDTH
    near = (row < rows)[:, None] & inside[None, :]
    place = (expert * rows + row[:, None]) * columns + column[None, :]
    w = tl.load(weight + place, mask=near, other=0.0).to(tl.float32)
    importance = tl.load(square + expert * columns + column, mask=inside, other=0.0)
    full = tl.max(tl.abs(w), axis=1) / REACH
    best = stored_scale(full, BFLOAT16)
    least = tl.full((ROWS,), float("inf"), tl.float32)
    for step in range(STEPS):
        scale = stored_scale(full * tl.load(shares + step), BFLOAT16)
        codes = nearest(w * (1.0 / scale)[:, None], LOW, HIGH)
        difference = codes * scale[:, None] - w
        error = tl.sum(difference * difference * importance[None, :], axis=1)
        better = error < least
        least = tl.where(better, error, least)
        best = tl.where(better, scale, best)
    groups = columns // WIDTH
    tl.store(scales + (expert * groups + group) * rows + row, best, mask=row < rows)


@triton.jit
def round_block(
    fed, weight, scales, group, feedback, errors, precise, codes, rows, columns, groups, start,
    LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr, MICRO: tl.constexpr,
    ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """gptq's rounding of BLOCK columns, each fed by those before it.

    `fed` [experts, BLOCK, rows] is what earlier blocks feed in; `feedback` [experts, BLOCK, BLOCK]
    float32 is M of this block. Writes `codes`, and the errors both as they are, for this block,
    and in the dtype of `errors`, for later ones.
    """
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    block = expert * BLOCK * rows + row
    whole = expert * columns * rows + row
    pairs = feedback + expert * BLOCK * BLOCK
    for micro in range(BLOCK // MICRO):
        if micro > 0:
            feed_micro(
                fed + expert * BLOCK * rows, precise + expert * BLOCK * rows, pairs, 1, BLOCK,
                fed + expert * BLOCK * rows, micro, row, rows, MICRO, DOT,
            )  # fmt: skip
        done = ()
        for index in tl.static_range(MICRO):
            local = micro * MICRO + index
            column = start + local
            w = tl.load(weight + whole + column * rows, mask=live, other=0.0).to(tl.float32)
            scale = tl.load(
                scales
                + (expert * groups + tl.load(group + expert * columns + column)) * rows
                + row,
                mask=live,
                other=1.0,
            )
            x = w + tl.load(fed + block + local * rows, mask=live, other=0.0)
            for before in tl.static_range(index):
                x += done[before] * tl.load(pairs + (micro * MICRO + before) * BLOCK + local)
            code = nearest(x * (1.0 / scale), LOW, HIGH)
            error = w - code * scale
            done = done + (error,)
            tl.store(codes + whole + column * rows, code.to(tl.int8), mask=live)
            tl.store(precise + block + local * rows, error, mask=live)
            tl.store(errors + whole + column * rows, error.to(errors.dtype.element_ty), mask=live)


@triton.jit
def feed_micro(
    source, changes, pairs, pair_row, pair_column, target, micro, row, rows,
    MICRO: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """target[micro] = source[micro] + pairs x the changes of the block's earlier columns."""
    tl.debug_barrier()  # other threads wrote the changes
    mine = micro * MICRO + tl.arange(0, MICRO)
    live = row < rows
    place = mine[:, None] * rows + row[None, :]
    sums = tl.load(source + place, mask=live[None, :], other=0.0)
    for part in range(micro):
        earlier = part * MICRO + tl.arange(0, MICRO)
        left = tl.load(pairs + mine[:, None] * pair_row + earlier[None, :] * pair_column)
        right = tl.load(
            changes + earlier[:, None] * rows + row[None, :], mask=live[None, :], other=0.0
        )
        sums = tl.dot(left.to(tl.float32), right, sums, input_precision=DOT)
    tl.store(target + place, sums, mask=live[None, :])
    tl.debug_barrier()


@triton.jit
def move_block(
    gradient, local, changes, pitch, weight, scales, gram, difference, codes, rows, columns, groups,
    start, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MICRO: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """descent's pass over BLOCK columns: each code to its best given the others.

    `gradient` [experts, BLOCK, rows] float32, experts `pitch` apart, is (rounded - weight) x gram
    before any move of this block; `gram` [experts, columns, columns]. Writes codes, `difference` =
    rounded - weight, and `changes` [experts, BLOCK, rows] of the rounded weight. `local` is scratch
    as large.
    """
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    block = expert * BLOCK * rows + row
    whole = expert * columns * rows + row
    pairs = gram + (expert * columns + start) * columns + start
    for micro in range(BLOCK // MICRO):
        feed_micro(
            gradient + expert * pitch, changes + expert * BLOCK * rows, pairs, columns, 1,
            local + expert * BLOCK * rows, micro, row, rows, MICRO, DOT,
        )  # fmt: skip
        done = ()
        for index in tl.static_range(MICRO):
            inner = micro * MICRO + index
            column = start + inner
            scale = tl.load(
                scales + (expert * groups + column // WIDTH) * rows + row, mask=live, other=1.0
            )
            slope = tl.load(local + block + inner * rows, mask=live, other=0.0)
            for before in tl.static_range(index):
                slope += done[before] * tl.load(
                    pairs + inner * columns + micro * MICRO + before
                ).to(tl.float32)
            curvature = tl.load(pairs + inner * columns + inner).to(tl.float32)
            old = tl.load(codes + whole + column * rows, mask=live, other=0).to(tl.float32)
            new = nearest(old - slope * (1.0 / (curvature * scale)), LOW, HIGH)
            change = (new - old) * scale
            done = done + (change,)
            w = tl.load(weight + whole + column * rows, mask=live, other=0.0).to(tl.float32)
            tl.store(codes + whole + column * rows, new.to(tl.int8), mask=live)
            tl.store(changes + block + inner * rows, change, mask=live)
            tl.store(
                difference + whole + column * rows,
                (new * scale - w).to(difference.dtype.element_ty),
                mask=live,
            )


@triton.jit
def refit_block(
    gradient, changes, pitch, weight, scales, gram, difference, codes, rows, columns, groups, start,
    BFLOAT16: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """descent's least-squares scale of the one group of BLOCK columns, kept if it helps.

    `changes` of the rounded weight come in as moves' and go out with the scale's.
    """
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    inner = tl.arange(0, BLOCK)
    pairs = gram + (expert * columns + start) * columns + start
    square = tl.load(pairs + inner[:, None] * columns + inner[None, :]).to(tl.float32)
    block = expert * BLOCK * rows + inner[:, None] * rows + row[None, :]
    whole = (expert * columns + start) * rows + inner[:, None] * rows + row[None, :]
    q = tl.load(codes + whole, mask=live[None, :], other=0).to(tl.float32)
    moved = tl.load(changes + block, mask=live[None, :], other=0.0)
    place = gradient + expert * pitch + inner[:, None] * rows + row[None, :]
    slope = tl.load(place, mask=live[None, :], other=0.0)
    slope += tl.dot(square, moved, input_precision=DOT)
    curvature = tl.sum(tl.dot(square, q, input_precision=DOT) * q, axis=0)
    slope = tl.sum(slope * q, axis=0)
    place = scales + (expert * groups + start // BLOCK) * rows + row
    scale = tl.load(place, mask=live, other=1.0)
    wanted = scale - slope / tl.maximum(curvature, 1e-30)
    change = stored_scale(tl.maximum(wanted, 0.0), BFLOAT16) - scale
    gain = 2 * change * slope + change * change * curvature
    before = scale
    scale = tl.where((gain < 0) & (wanted > 0), scale + change, scale)
    tl.store(place, scale, mask=live)
    w = tl.load(weight + whole, mask=live[None, :], other=0.0).to(tl.float32)
    after = q * scale[None, :] - w
    moved += q * (scale - before)[None, :]
    tl.store(changes + block, moved, mask=live[None, :])
    tl.store(difference + whole, after.to(difference.dtype.element_ty), mask=live[None, :])


@triton.jit
def add_choices(
    rows, place, gates, out, columns, CHOICES: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """out[token] = the sum of gate x row over the token's choices, in their order, in float32.

    `rows` [tokens x choices, columns] are sorted by expert, `place` [tokens, choices] says where.
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
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)


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
