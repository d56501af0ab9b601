"""Triton kernels of blocked Cholesky factors, and of the mean Grams that are factored.

Factors are upper, U of A = U' U, so that what a pivot takes off later columns lies in one row.
"""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix_grams(sums, layer, own, share, added, out, columns, SPAN: tl.constexpr):
    """out = own x sums + share x layer + `added` on the diagonal, [experts, columns, columns].

    Experts are neighbours in time, so that `layer` [columns, columns] is read once.
    """
    expert, row = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = column < columns
    place = (expert * columns + row) * columns + column
    value = tl.load(own + expert) * tl.load(sums + place, mask=inside, other=0.0)
    value += tl.load(share + expert) * tl.load(layer + row * columns + column, mask=inside)
    value += tl.where(column == row, tl.load(added + expert), 0.0)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gather_panel(
    sums, layer, own, share, added, order, out, columns, start, SIDE: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + SIDE of what mix_grams means, columns and rows in `order` (int32).

    Columns from `start` on: out [experts, SIDE, columns - start] float32.
    """
    expert, pivot = tl.program_id(1).to(tl.int64), tl.program_id(0)
    order += expert * columns
    row = tl.load(order + start + pivot).to(tl.int64)
    mine, factor, other = tl.load(own + expert), tl.load(share + expert), tl.load(added + expert)
    out += (expert * SIDE + pivot) * (columns - start)
    column = start + tl.arange(0, SPAN)
    inside = column < columns
    place = tl.load(order + column, mask=inside, other=0)
    value = mine * tl.load(sums + (expert * columns + row) * columns + place, mask=inside)
    value += factor * tl.load(layer + row * columns + place, mask=inside)
    value += tl.where(place == row, other, 0.0)
    tl.store(out + column - start, value, mask=inside)


@triton.jit
def factor_square(
    panel, work, high, low, corner, pitch, start, blocks, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Factors the square at the left of `panel` [experts, SIDE, pitch], PART rows at a time.

    Writes the inverse of its lower factor as two halves [experts, SIDE, SIDE], and the blocks on
    the diagonal of the upper one to `corner` [experts, blocks, BLOCK, BLOCK] from block
    start / BLOCK on. `work` [experts, SIDE, SIDE] float32 holds the upper factor above its
    diagonal, the inverse below it and on it. A pivot that is not positive leaves nan from there on.
    """
    expert = tl.program_id(0).to(tl.int64)
    panel += expert * SIDE * pitch
    work += expert * SIDE * SIDE
    high += expert * SIDE * SIDE
    low += expert * SIDE * SIDE
    corner += (expert * blocks + start // BLOCK) * BLOCK * BLOCK
    column, inner = tl.arange(0, SIDE), tl.arange(0, PART)
    for part in range(SIDE // PART):
        first = part * PART
        mine = first + inner
        after = column >= first
        sums = tl.load(
            panel + mine[:, None] * pitch + column[None, :], mask=after[None, :], other=0.0
        )
        for before in range(part):
            pivots = before * PART + inner
            left = tl.load(work + pivots[None, :] * SIDE + mine[:, None])
            kept = after | (column < before * PART + PART)
            right = tl.load(
                work + pivots[:, None] * SIDE + column[None, :], mask=kept[None, :], other=0.0
            )
            sums -= tl.dot(left, right, input_precision=DOT)
        place = work + mine[:, None] * SIDE + column[None, :]
        tl.store(place, sums)
        tl.debug_barrier()  # other threads wrote the square
        both = tl.arange(0, 2 * PART)
        square = tl.load(
            work + mine[:, None] * SIDE + first + both[None, :],
            mask=(both < PART)[None, :],
            other=0.0,
        )
        rows = eliminated(square, PART)
        near = mine[:, None] % BLOCK * BLOCK + (first % BLOCK + both)[None, :]
        near += first // BLOCK * BLOCK * BLOCK
        tl.store(corner + near, rows, mask=(both < PART)[None, :])
        tl.debug_barrier()
        spot = work + mine[:, None] * SIDE + first + (both - PART)[None, :]
        tl.store(spot, rows, mask=(both >= PART)[None, :])
        tl.debug_barrier()
        inverse = tl.load(work + mine[:, None] * SIDE + first + inner[None, :])
        done = tl.dot(inverse, sums, input_precision=DOT)
        within = (column >= first + PART) & (column // BLOCK == first // BLOCK)
        near = mine[:, None] % BLOCK * BLOCK + (column % BLOCK)[None, :]
        near += first // BLOCK * BLOCK * BLOCK
        tl.store(corner + near, done, mask=within[None, :])
        diagonal = after & (column < first + PART)
        tl.store(place, done, mask=(~diagonal)[None, :])
        tl.debug_barrier()
        found = tl.load(place, mask=(column < first + PART)[None, :], other=0.0)
        big = found.to(high.dtype.element_ty)
        small = (found - big.to(tl.float32)).to(low.dtype.element_ty)
        spot = mine[:, None] * SIDE + column[None, :]
        tl.store(high + spot, big)
        tl.store(low + spot, small)
        tl.debug_barrier()


@triton.jit
def eliminated(square, PART: tl.constexpr):
    """[A, 0], [PART, 2 PART], to [U, the inverse of U'] for A = U' U; U's lower half is not 0."""
    row, column = tl.arange(0, PART), tl.arange(0, 2 * PART)
    rows = square + tl.where(column[None, :] - PART == row[:, None], 1.0, 0.0)
    for index in range(PART):
        mine = tl.sum(tl.where(row[:, None] == index, rows, 0.0), axis=0)
        share = mine / tl.sum(tl.where(column == index, mine, 0.0), axis=0)
        first = tl.sum(tl.where(column[None, :] == index, rows, 0.0), axis=1)
        rows -= tl.where(row > index, first, 0.0)[:, None] * share[None, :]
    pivots = tl.sum(tl.where(row[:, None] == column[None, :], rows, 0.0), axis=1)
    return rows * (1.0 / tl.sqrt(pivots))[:, None]


@triton.jit
def finish_panel(
    panel, high, low, upper, rest, pitch, columns, width, start, SIDE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + SIDE of the upper factor, as the sum of `upper` and `rest`.

    They are the inverse of the square's lower factor, `high` + `low` [experts, SIDE, SIDE], times
    `panel` [experts, SIDE, pitch]; factors are [experts, columns, width].
    """
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = (column < pitch)[None, :]
    panel += expert * SIDE * pitch
    high += expert * SIDE * SIDE
    low += expert * SIDE * SIDE
    upper += (expert * columns + start) * width + start
    rest += (expert * columns + start) * width + start
    half = high.dtype.element_ty
    sums = tl.zeros((TALL, WIDE), tl.float32)
    for deep in range(0, SIDE, DEEP):
        pivot = deep + tl.arange(0, DEEP)
        values = tl.load(panel + pivot[:, None] * pitch + column[None, :], mask=inside, other=0.0)
        big = values.to(half)
        small = (values - big.to(tl.float32)).to(half)
        place = row[:, None] * SIDE + pivot[None, :]
        left = tl.load(high + place)
        sums = tl.dot(left, big, sums)
        sums = tl.dot(left, small, sums)
        sums = tl.dot(tl.load(low + place), big, sums)
    place = row[:, None] * width + column[None, :]
    big = sums.to(half)
    tl.store(upper + place, big, mask=inside)
    tl.store(rest + place, (sums - big.to(tl.float32)).to(half), mask=inside)
