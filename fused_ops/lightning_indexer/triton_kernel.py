"""Lightning Indexer in portable Triton: scores and exact selection in one pass over the keys.

A program scores a segment of keys for a few queries, adds what may still be chosen to a short list
and now and then cuts the list back to the best; the [queries, keys] scores never exist. Lists are
in order of position, so that of equal scores the lowest stay, whatever the split.
"""
# mypy: ignore-errors
# ruff: noqa: C901, N803
# Kernels are Triton's language, constants in capitals. Of libraries, only triton is imported:
# compilers of other chips read this file where there is no torch.

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.triton_shared import holder

NEVER = tl.constexpr(-2147483648)  # below ordered(x) of every x: cannot be chosen


@triton.jit
def ordered(values):
    """Floats as int32 in the same order; -0 equals +0, -inf is NEVER."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values == float("-inf"), NEVER, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def fence(CUDA: tl.constexpr):
    """What this program wrote to memory, all of it may read. Other chips keep a program's order."""
    if CUDA:
        tl.debug_barrier()


@triton.jit
def bound(codes, wanted):
    """The greatest t that at least `wanted` of `codes` reach, or one that exactly `wanted` reach.

    NEVER where they are not so many. False position, every other step a bisection: counts are near
    to linear between floats of one exponent, so a few steps do, and 64 always.
    """
    low = tl.full((), NEVER, tl.int64)
    high = tl.max(codes, 0).to(tl.int64) + 1
    below = tl.sum((codes > NEVER).to(tl.int32), 0)  # that reach low
    if below > wanted:
        low = tl.min(tl.where(codes > NEVER, codes, 2147483647), 0).to(tl.int64)
        above = tl.full((), 0, tl.int32)  # that reach high
        step = tl.full((), 0, tl.int32)
        while (high - low > 1) & (below != wanted):
            share = (below - wanted).to(tl.float32) / (below - above).to(tl.float32)
            guess = (share * (high - low).to(tl.float32)).to(tl.int64)
            guess = tl.where(step % 2 == 0, guess, (high - low) // 2)
            trial = low + tl.minimum(tl.maximum(guess, 1), high - low - 1)
            reach = tl.sum((codes >= trial.to(tl.int32)).to(tl.int32), 0)
            enough = reach >= wanted
            low, below = tl.where(enough, trial, low), tl.where(enough, reach, below)
            high, above = tl.where(enough, high, trial), tl.where(enough, above, reach)
            step += 1
    return low.to(tl.int32)


@triton.jit
def best(codes, wanted):
    """(int32 which `codes` are the `wanted` largest, ties to the first; the bound they reach)."""
    least = bound(codes, wanted)
    kept = ((codes >= least) & (codes > NEVER)).to(tl.int32)
    if tl.sum(kept, 0) > wanted:
        equal = (codes == least).to(tl.int32)
        room = wanted - tl.sum((codes > least).to(tl.int32), 0)
        kept = tl.where((equal > 0) & (tl.cumsum(equal, 0) > room), 0, kept)
    return kept, least


@triton.jit
def spread(N: tl.constexpr):
    """0 .. N - 1, a thread's entries far apart.

    Lists are written entry by entry. Four neighbours a thread, as the compiler would read them, are
    moved through shared memory before every such write: on an H200 that took half the time.
    """
    return tl.max_contiguous(tl.arange(0, N), 1)


@triton.jit
def cut(codes, places, count, topk, ROOM: tl.constexpr, CUDA: tl.constexpr):
    """Cuts the list of `count` at the pointers to its best `topk`: (count, bound)."""
    lane = spread(ROOM)
    code = tl.load(codes + lane, mask=lane < count, other=NEVER)
    kept, least = best(code, topk)
    place = tl.load(places + lane, mask=kept > 0, other=0)
    slot = tl.cumsum(kept, 0) - 1
    fence(CUDA)
    tl.store(codes + slot, code, mask=kept > 0)
    tl.store(places + slot, place, mask=kept > 0)
    fence(CUDA)
    return tl.minimum(count, topk), least


@triton.jit
def emit(codes, places, count, topk, out, out_codes, ROOM: tl.constexpr, CODES: tl.constexpr):
    """Writes the best `topk` of a list to `out`, -1 after the last, and their codes if CODES."""
    lane = spread(ROOM)
    code = tl.load(codes + lane, mask=lane < count, other=NEVER)
    kept, _ = best(code, topk)
    place = tl.load(places + lane, mask=kept > 0, other=0)
    slot = tl.cumsum(kept, 0) - 1
    tl.store(out + slot, place, mask=kept > 0)
    written = tl.sum(kept, 0)
    rest = (lane >= written) & (lane < topk)
    tl.store(out + lane, tl.full((ROOM,), -1, tl.int32), mask=rest)
    if CODES:
        tl.store(out_codes + slot, code, mask=kept > 0)
        tl.store(out_codes + lane, tl.full((ROOM,), NEVER, tl.int32), mask=rest)


@triton.jit
def select(
    scores, places, out, held_codes, held_places, rows, keys, row_stride, topk,
    CODED: tl.constexpr, SEGMENT: tl.constexpr, ROOM: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Rows of given scores, or, CODED, of lists that `index` left: `places` names their keys."""
    codes = held_codes + tl.program_id(0).to(tl.int64) * ROOM
    listed = held_places + tl.program_id(0).to(tl.int64) * ROOM
    lane = spread(SEGMENT)
    row = tl.program_id(0)
    while row < rows:  # the interpreter's range takes no tensor (3.6.0 on numpy 2.4)
        base = row.to(tl.int64) * row_stride
        count = tl.full((), 0, tl.int32)
        least = tl.full((), NEVER, tl.int32)
        start = tl.full((), 0, tl.int32)
        while start < keys:
            at = start + lane
            if CODED:
                code = tl.load(scores + base + at, mask=at < keys, other=NEVER)
                place = tl.load(places + base + at, mask=at < keys, other=0)
            else:
                code = ordered(tl.load(scores + base + at, mask=at < keys, other=float("-inf")))
                place = at
            new = (code > least).to(tl.int32)  # an equal one comes later and loses
            slot = count + tl.cumsum(new, 0) - 1
            tl.store(codes + slot, code, mask=new > 0)
            tl.store(listed + slot, place, mask=new > 0)
            count += tl.sum(new, 0)
            fence(CUDA)
            if count > ROOM - SEGMENT:
                count, least = cut(codes, listed, count, topk, ROOM, CUDA)
            start += SEGMENT
        emit(codes, listed, count, topk, out + row.to(tl.int64) * topk, out, ROOM, False)
        fence(CUDA)
        row += tl.num_programs(0)


@triton.jit
def row_of(position, inside, first, pages, page_stride, row_stride, PAGE: tl.constexpr):
    """int64 offsets of a sequence's rows at `position`, packed from row `first` or in `pages`."""
    if PAGE > 0:
        page = tl.load(pages + position // PAGE, mask=inside, other=0).to(tl.int64)
        return page * page_stride + (position % PAGE).to(tl.int64) * row_stride
    return (first + position).to(tl.int64) * row_stride


@triton.jit
def index(
    query, key, weights, key_scale, offsets, key_offsets, blocks, pages,
    out, out_codes, scores, held_codes, held_places,
    query_token, query_head, page_stride, row_stride, scale_page, scale_row, page_count,
    sequences, works, heads, topk,
    PARTS: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, SEGMENT: tl.constexpr, ROOM: tl.constexpr, PAGE: tl.constexpr,
    STEPS: tl.constexpr, HAS_SCALE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
    CUDA: tl.constexpr,
):  # fmt: skip
    """Blocks of Q queries of one sequence, each over one of PARTS shares of its keys.

    score = key scale x sum over heads of weight x ReLU(query . key); a tile is keys by queries x
    heads, so that a thread holds the heads of a score. `out` [tokens, PARTS, topk] holds positions,
    ascending.
    """
    worker = tl.program_id(0).to(tl.int64)
    scores += worker * Q * SEGMENT
    held_codes += worker * Q * ROOM
    held_places += worker * Q * ROOM
    lane, column, turn = tl.arange(0, Q * H), tl.arange(0, D), tl.arange(0, Q)
    tile, spot = tl.arange(0, K), spread(SEGMENT)
    work = tl.program_id(0)
    while work < works:
        number, part = work // PARTS, work % PARTS
        sequence = holder(number, blocks, sequences, STEPS)
        # 32 bits from here on: wider ones take twice the registers.
        start = tl.load(offsets + sequence).to(tl.int32)
        start += (number - tl.load(blocks + sequence).to(tl.int32)) * Q
        end = tl.load(offsets + sequence + 1).to(tl.int32)
        first = tl.load(key_offsets + sequence).to(tl.int32)
        listing = pages + sequence * page_count
        keys = tl.load(key_offsets + sequence + 1).to(tl.int32) - first
        sees = keys - (end - start) + 1  # keys the first query sees
        limit = tl.minimum(sees + Q - 1, keys)
        share = tl.cdiv(tl.cdiv(limit, SEGMENT), PARTS) * SEGMENT
        token = (start + lane // H).to(tl.int64)
        head = lane % H
        real = (token < end) & (head < heads)
        asked = query + (token * query_token + head.to(tl.int64) * query_head)[:, None]
        within = (column < DIM)[None, :]
        q = tl.load(asked + column[None, :], mask=real[:, None] & within, other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        weight = tl.load(weights + token * heads + head, mask=real, other=0.0)
        count = tl.zeros((Q,), tl.int32)
        least = tl.full((Q,), NEVER, tl.int32)
        low = part * share
        high = tl.minimum(limit, low + share)
        while low < high:
            tiles = tl.minimum(SEGMENT // K, tl.cdiv(high - low, K))
            for step in range(tiles if CUDA else SEGMENT // K):
                position = low + step * K + tile
                inside = position < high
                at = row_of(position, inside, first, listing, page_stride, row_stride, PAGE)
                near = inside[:, None]
                if D > DIM:
                    near = near & within
                k = tl.load(key + at[:, None] + column[None, :], mask=near, other=0.0)
                if WIDEN:
                    k = k.to(tl.float32)
                dots = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                weighted = tl.maximum(dots.to(tl.float32), 0.0) * weight[None, :]
                total = tl.sum(tl.reshape(weighted, (K, Q, H)), 2)
                tl.store(scores + turn[None, :] * SEGMENT + (step * K + tile)[:, None], total)
            fence(CUDA)
            place = low + spot
            score = tl.load(scores + turn[:, None] * SEGMENT + spot[None, :])
            if HAS_SCALE:
                inside = place < high
                at = row_of(place, inside, first, listing, scale_page, scale_row, PAGE)
                score *= tl.load(key_scale + at, mask=inside, other=0.0)[None, :]
            seen = tl.where(start + turn < end, tl.minimum(sees + turn, high), 0)
            code = ordered(tl.where(place[None, :] < seen[:, None], score, float("-inf")))
            new = (code > least[:, None]).to(tl.int32)
            slot = (turn * ROOM + count)[:, None] + tl.cumsum(new, 1) - 1
            tl.store(held_codes + slot, code, mask=new > 0)
            listed = tl.broadcast_to(place[None, :], (Q, SEGMENT))
            tl.store(held_places + slot, listed, mask=new > 0)
            count += tl.sum(new, 1)
            fence(CUDA)
            if tl.max(count, 0) > ROOM - SEGMENT:
                for row in range(Q):
                    codes, places = held_codes + row * ROOM, held_places + row * ROOM
                    held = tl.sum(tl.where(turn == row, count, 0), 0)
                    held, bar = cut(codes, places, held, topk, ROOM, CUDA)
                    count = tl.where(turn == row, held, count)
                    least = tl.where(turn == row, bar, least)
            low += SEGMENT
        for row in range(Q):
            if start + row < end:
                held = tl.sum(tl.where(turn == row, count, 0), 0)
                place = ((start + row) * PARTS + part).to(tl.int64) * topk
                emit(
                    held_codes + row * ROOM, held_places + row * ROOM, held, topk,
                    out + place, out_codes + place, ROOM, PARTS > 1,
                )  # fmt: skip
        fence(CUDA)
        work += tl.num_programs(0)
