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
    """x rounded to an integer of LOW .. HIGH, as float32; a product before fuses with the sum."""
    return tl.minimum(tl.maximum(x + ROUND, ROUND + LOW), ROUND + HIGH) - ROUND


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
def subtract_weight(
    codes, scales, weight, out, rows, columns, groups, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out = codes x scales - weight, all transposed, BLOCK columns a program."""
    start, expert = tl.program_id(1) * BLOCK, tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    for inner in range(BLOCK):
        column = start + inner
        group = expert * groups + column // (columns // groups)
        step = tl.load(scales + group * rows + row, mask=live, other=1.0)
        place = (expert * columns + column) * rows + row
        code = tl.load(codes + place, mask=live, other=0).to(tl.float32)
        w = tl.load(weight + place, mask=live, other=0.0).to(tl.float32)
        tl.store(out + place, (code * step - w).to(out.dtype.element_ty), mask=live)


@triton.jit
def turn(x, out, rows, columns, SIDE: tl.constexpr):
    """out [experts, columns, rows] = x [experts, rows, columns], a square tile a program."""
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    near = (row < rows)[:, None] & (column < columns)[None, :]
    start = expert * rows * columns
    tile = tl.load(x + start + row[:, None].to(tl.int64) * columns + column[None, :], mask=near)
    place = out + start + column[:, None].to(tl.int64) * rows + row[None, :]
    near = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(place, tl.trans(tile), mask=near)


@triton.jit
def search_clip(
    weight, square, shares, scales, codes, rows, columns,
    STEPS: tl.constexpr, REACH: tl.constexpr, BFLOAT16: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """rtn.search_scale and rtn.rtn: weight and codes [experts, rows, columns].

    `scales` come out as [experts, groups, rows]; one of a share below zero is so too. A group is
    held in PIECES, so that few threads share a row and what a row costs is spread on more columns.
    """
    expert, group = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = (expert * rows + row[:, None]) * columns + group * WIDTH
    weights, counts = (), ()
    full = tl.zeros((ROWS,), tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * (SPAN // PIECES) + tl.arange(0, SPAN // PIECES)
        near = (row < rows)[:, None] & (column < WIDTH)[None, :]
        w = tl.load(weight + start + column[None, :], mask=near, other=0.0).to(tl.float32)
        place = square + expert * columns + group * WIDTH + column
        counts = counts + (tl.load(place, mask=column < WIDTH, other=0.0),)
        weights = weights + (w,)
        full = tl.maximum(full, tl.max(tl.abs(w), axis=1))
    full = full / REACH
    best = stored_scale(full, BFLOAT16)
    least = tl.full((ROWS,), float("inf"), tl.float32)
    for step in range(STEPS):
        share = tl.load(shares + step)
        scale = stored_scale(full * tl.abs(share), BFLOAT16) * tl.where(share < 0, -1.0, 1.0)
        inverse = (1.0 / scale)[:, None]
        sums = tl.zeros((ROWS, SPAN // PIECES), tl.float32)
        for piece in tl.static_range(PIECES):
            w = weights[piece]
            difference = nearest(w * inverse, LOW, HIGH) * scale[:, None] - w
            sums += difference * difference * counts[piece][None, :]
        error = tl.sum(sums, axis=1)
        better = error < least
        least = tl.where(better, error, least)
        best = tl.where(better, scale, best)
    groups = columns // WIDTH
    tl.store(scales + (expert * groups + group) * rows + row, best, mask=row < rows)
    for piece in tl.static_range(PIECES):
        column = piece * (SPAN // PIECES) + tl.arange(0, SPAN // PIECES)
        near = (row < rows)[:, None] & (column < WIDTH)[None, :]
        exact = tl.div_rn(
            weights[piece], best[:, None] + tl.zeros((ROWS, SPAN // PIECES), tl.float32)
        )
        tl.store(codes + start + column[None, :], nearest(exact, LOW, HIGH).to(tl.int8), mask=near)


@triton.jit
def round_block(
    fed, pitch, weight, scales, order, corner, errors, precise, codes, rows, columns, groups,
    start, LOW: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr, MICRO: tl.constexpr,
    ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """gptq's rounding of BLOCK columns of `order` from the last to the first, each fed by those
    rounded before it.

    `fed` [experts, BLOCK, rows] float32, experts `pitch` apart, is what later blocks feed in times
    the diagonal of the factor, of which `corner` [experts, blocks, BLOCK, BLOCK] has the block.
    Writes `codes` in the weight's own order; the errors in this one, as they are in `precise`
    [experts, BLOCK, rows] and in their dtype for earlier blocks in `errors`.
    """
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    block = expert * BLOCK * rows + row
    whole = expert * columns * rows + row
    fed += expert * pitch
    pairs = corner + (expert * columns + start) * BLOCK
    order += expert * columns + start
    for step in range(BLOCK // MICRO):
        micro = BLOCK // MICRO - 1 - step
        if step > 0:
            feed_micro(
                fed, precise + expert * BLOCK * rows, pairs, step, row, rows, BLOCK, MICRO, DOT
            )
        # All that is read comes before anything is written: a store holds up every later load.
        weights, steps, feeds = (), (), ()
        for index in tl.static_range(MICRO):
            local = micro * MICRO + MICRO - 1 - index
            column = tl.load(order + local)
            group = expert * groups + column // (columns // groups)
            steps = steps + (tl.load(scales + group * rows + row, mask=live, other=1.0),)
            place = whole + column * rows
            w = tl.load(weight + place, mask=live, other=0.0)
            weights = weights + (w.to(tl.float32),)
            feeds = feeds + (tl.load(fed + local * rows + row, mask=live, other=0.0),)
        done, rounded = (), ()
        for index in tl.static_range(MICRO):
            local = micro * MICRO + MICRO - 1 - index
            total = feeds[index]
            for before in tl.static_range(index):
                later = micro * MICRO + MICRO - 1 - before
                total += done[before] * tl.load(pairs + local * BLOCK + later)
            x = weights[index] + total * (1.0 / tl.load(pairs + local * BLOCK + local))
            code = nearest(x * (1.0 / steps[index]), LOW, HIGH)
            rounded = rounded + (code,)
            done = done + (weights[index] - code * steps[index],)
        for index in tl.static_range(MICRO):
            local = micro * MICRO + MICRO - 1 - index
            place = whole + tl.load(order + local) * rows
            tl.store(codes + place, rounded[index].to(tl.int8), mask=live)
            tl.store(precise + block + local * rows, done[index], mask=live)
            place = whole + (start + local) * rows
            tl.store(errors + place, done[index].to(errors.dtype.element_ty), mask=live)


@triton.jit
def feed_micro(
    fed, changes, pairs, step, row, rows,
    BLOCK: tl.constexpr, MICRO: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """fed += pairs x the changes of later columns, for the MICRO columns of this step."""
    tl.debug_barrier()  # other threads wrote the changes
    mine = BLOCK - (step + 1) * MICRO + tl.arange(0, MICRO)
    live = row < rows
    place = fed + mine[:, None] * rows + row[None, :]
    sums = tl.load(place, mask=live[None, :], other=0.0)
    for part in range(step):
        later = BLOCK - (part + 1) * MICRO + tl.arange(0, MICRO)
        left = tl.load(pairs + mine[:, None] * BLOCK + later[None, :])
        right = tl.load(
            changes + later[:, None] * rows + row[None, :], mask=live[None, :], other=0.0
        )
        sums = tl.dot(left, right, sums, input_precision=DOT)
    tl.store(place, sums, mask=live[None, :])
    tl.debug_barrier()


@triton.jit
def halves(x, ROWS: tl.constexpr, N: tl.constexpr):
    """The even and the odd columns of x [ROWS, N]."""
    return tl.split(tl.reshape(x, (ROWS, N // 2, 2)))


@triton.jit
def columns_of(x, ROWS: tl.constexpr):
    """The sixteen columns of x [ROWS, 16] in order, by way of shared memory at most."""
    even, odd = halves(x, ROWS, 16)
    even0, even2 = halves(even, ROWS, 8)
    odd1, odd3 = halves(odd, ROWS, 8)
    pair0, pair4 = halves(even0, ROWS, 4)
    pair2, pair6 = halves(even2, ROWS, 4)
    pair1, pair5 = halves(odd1, ROWS, 4)
    pair3, pair7 = halves(odd3, ROWS, 4)
    c0, c8 = tl.split(pair0)
    c1, c9 = tl.split(pair1)
    c2, c10 = tl.split(pair2)
    c3, c11 = tl.split(pair3)
    c4, c12 = tl.split(pair4)
    c5, c13 = tl.split(pair5)
    c6, c14 = tl.split(pair6)
    c7, c15 = tl.split(pair7)
    return c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15


@triton.jit
def move_block(
    gradient, changes, pitch, weight, scales, gram, difference, codes, rows, columns, groups,
    start, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """descent's pass over BLOCK columns, sixteen at a time: each code to its best given the others.

    `gradient` [experts, BLOCK, rows] float32, experts `pitch` apart, is (rounded - weight) x gram
    before any move of this block; `gram` [experts, columns, columns]. Writes codes, `difference` =
    rounded - weight, and `changes` [experts, BLOCK, rows] of the rounded weight.
    """
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    block = expert * BLOCK * rows + row
    whole = (expert * columns + start) * rows + row
    pairs = gram + (expert * columns + start) * columns + start
    # A block is one group, or all of them are: fits() says so.
    scale = tl.load(scales + (expert * groups + start // WIDTH) * rows + row, mask=live, other=1.0)
    inverse = 1.0 / scale
    for micro in range(BLOCK // 16):
        mine = micro * 16 + tl.arange(0, 16)
        place = gradient + expert * pitch + mine[:, None] * rows + row[None, :]
        sums = tl.load(place, mask=live[None, :], other=0.0)
        tl.debug_barrier()  # other threads wrote the changes
        for part in range(micro):
            earlier = part * 16 + tl.arange(0, 16)
            left = tl.load(pairs + mine[:, None] * columns + earlier[None, :])
            spot = changes + expert * BLOCK * rows + earlier[:, None] * rows + row[None, :]
            right = tl.load(spot, mask=live[None, :], other=0.0)
            sums = tl.dot(left, right, sums, input_precision=DOT)
        slopes = columns_of(tl.trans(sums), ROWS)
        # All that is read comes before anything is written: a store holds up every later load.
        olds, weights, curves = (), (), ()
        for index in tl.static_range(16):
            inner = micro * 16 + index
            old = tl.load(codes + whole + inner * rows, mask=live, other=0)
            olds = olds + (old.to(tl.float32),)
            weights = weights + (tl.load(weight + whole + inner * rows, mask=live, other=0.0),)
            curves = curves + (1.0 / tl.load(pairs + inner * columns + inner).to(tl.float32),)
        news, done = (), ()
        for index in tl.static_range(16):
            slope = slopes[index]
            for before in tl.static_range(index):
                pair = pairs + (micro * 16 + index) * columns + micro * 16 + before
                slope += done[before] * tl.load(pair).to(tl.float32)
            new = nearest(olds[index] - slope * (curves[index] * inverse), LOW, HIGH)
            news = news + (new,)
            done = done + ((new - olds[index]) * scale,)
        for index in tl.static_range(16):
            inner = micro * 16 + index
            tl.store(codes + whole + inner * rows, news[index].to(tl.int8), mask=live)
            change = done[index].to(changes.dtype.element_ty)
            tl.store(changes + block + inner * rows, change, mask=live)
            after = news[index] * scale - weights[index].to(tl.float32)
            tl.store(
                difference + whole + inner * rows,
                after.to(difference.dtype.element_ty),
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
    whole, near = (expert * columns + start) * rows, live[None, :]
    place = inner[:, None] * rows + row[None, :]  # in all that is a block or begins at it
    pairs = gram + (expert * columns + start) * columns + start
    square = tl.load(pairs + inner[:, None] * columns + inner[None, :])
    codes_here = tl.load(codes + whole + place, mask=near, other=0).to(square.dtype)
    # A code has few bits: exact in bfloat16. The square is its own transpose: one product for both.
    product = tl.dot(square, codes_here, input_precision=DOT)
    q = codes_here.to(tl.float32)
    changes += expert * BLOCK * rows
    moved = tl.load(changes + place, mask=near, other=0.0).to(tl.float32)
    slopes = tl.load(gradient + expert * pitch + place, mask=near, other=0.0)
    slope = tl.sum(slopes * q + product * moved, axis=0)
    curvature = tl.sum(product * q, axis=0)
    scales += (expert * groups + start // BLOCK) * rows
    scale = tl.load(scales + row, mask=live, other=1.0)
    sign = tl.where(scale < 0, -1.0, 1.0)
    wanted = sign * (scale - slope / tl.maximum(curvature, 1e-30))
    change = sign * stored_scale(tl.maximum(wanted, 0.0), BFLOAT16) - scale
    gain = 2 * change * slope + change * change * curvature
    before = scale
    scale = tl.where((gain < 0) & (wanted > 0), scale + change, scale)
    tl.debug_barrier()  # threads of several warps have read the same rows' scales
    tl.store(scales + row, scale, mask=live)
    w = tl.load(weight + whole + place, mask=near, other=0.0).to(tl.float32)
    after = q * scale[None, :] - w
    moved += q * (scale - before)[None, :]
    tl.store(changes + place, moved.to(changes.dtype.element_ty), mask=near)
    tl.store(difference + whole + place, after.to(difference.dtype.element_ty), mask=near)
