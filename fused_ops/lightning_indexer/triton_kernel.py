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

NEVER = tl.constexpr(-2147483648)  # below ordered(x) of every x: nothing is there
LOWEST = tl.constexpr(-2139095041)  # ordered(-inf), which cannot be chosen


@triton.jit
def ordered(values):
    """Floats as int32 in the same order; -0 equals +0, -inf is LOWEST."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def fence(CUDA: tl.constexpr):
    """What this program wrote to memory, all of it may read. Other chips keep a program's order."""
    if CUDA:
        tl.debug_barrier()


@triton.jit
def bound(codes, wanted, slack):
    """The greatest t that at least `wanted` of `codes` reach, or one that at most `slack` more do.

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
        while (high - low > 1) & (below - wanted > slack):
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
def best(codes, wanted, slack):
    """(int32 which `codes` are the `wanted` largest, ties to the first; the bound they reach).

    With `slack`, perhaps so many more of the next largest: fewer steps find such a bound.
    """
    least = bound(codes, wanted, slack)
    kept = ((codes >= least) & (codes > NEVER)).to(tl.int32)
    if tl.sum(kept, 0) - wanted > slack:
        equal = (codes == least).to(tl.int32)
        room = wanted - tl.sum((codes > least).to(tl.int32), 0)
        kept = tl.where((equal > 0) & (tl.cumsum(equal, 0) > room), 0, kept)
    return kept, least


@triton.jit
def put(base, slot, code, place, chosen, CUDA: tl.constexpr):
    """Stores (code, place) as entry `slot` of an int64 list where `chosen` is 1.

    tl.store would first move entries to threads whose writes touch: through shared memory, which
    for scattered ones takes longer than the writes. Here each thread writes those it holds.
    """
    if CUDA:
        tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b64 at; setp.ne.b32 p, $5, 0; mad.wide.s32 at, $2, 8, $1;
            @p st.global.v2.b32 [at], {$4, $3}; mov.b32 $0, 0; }""",
            "=r,l,r,r,r,r", [base.to(tl.int64), slot, code, place, chosen],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(base + slot, (code.to(tl.int64) << 32) | place.to(tl.int64), mask=chosen > 0)


@triton.jit
def put_all(pointers, values, CUDA: tl.constexpr):
    """As put: float32 `values`, where they lie in threads."""
    if CUDA:
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [pointers.to(tl.int64), values],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(pointers, values)


@triton.jit
def listed(entries, count, ROOM: tl.constexpr):
    """([ROOM] codes, places) of a list of `count`; NEVER after the last."""
    lane = tl.arange(0, ROOM)
    entry = tl.load(entries + lane, mask=lane < count, other=NEVER << 32)
    return (entry >> 32).to(tl.int32), entry.to(tl.int32)


@triton.jit
def running(new, Q: tl.constexpr, N: tl.constexpr):
    """([Q, N] sums along a row of 0 and 1, this one in; [Q] of a whole row): two rows a scan."""
    if Q == 1:
        sums, whole = tl.cumsum(new, 1), tl.sum(new, 1)
    else:
        half = 16 * tl.arange(0, 2)
        both = tl.sum(tl.reshape(new, (Q // 2, 2, N)) << half[None, :, None], 1)
        sums = tl.reshape((tl.cumsum(both, 1)[:, None, :] >> half[None, :, None]) & 0xFFFF, (Q, N))
        whole = tl.reshape((tl.sum(both, 1)[:, None] >> half[None, :]) & 0xFFFF, (Q,))
    return sums, whole


@triton.jit
def cut(entries, count, topk, slack, ROOM: tl.constexpr, CUDA: tl.constexpr):
    """Cuts the list of `count` to its best `topk`, and at most `slack` more: (count, bound)."""
    code, place = listed(entries, count, ROOM)
    kept, least = best(code, topk, slack)
    slot = tl.cumsum(kept, 0) - 1
    fence(CUDA)
    put(entries, slot, code, place, kept, CUDA)
    fence(CUDA)
    return tl.sum(kept, 0), tl.maximum(least, LOWEST)


@triton.jit
def emit(
    entries, count, topk, out, out_codes, ROOM: tl.constexpr, CODES: tl.constexpr
):  # fmt: skip
    """Writes the best `topk` of a list to `out`, -1 after the last, and their codes if CODES."""
    code, place = listed(entries, count, ROOM)
    kept, _ = best(code, topk, 0)
    slot = tl.cumsum(kept, 0) - 1
    tl.store(out + slot, place, mask=kept > 0)
    written = tl.sum(kept, 0)
    lane = tl.arange(0, ROOM)
    rest = (lane >= written) & (lane < topk)
    tl.store(out + lane, tl.full((ROOM,), -1, tl.int32), mask=rest)
    if CODES:
        tl.store(out_codes + slot, code, mask=kept > 0)
        tl.store(out_codes + lane, tl.full((ROOM,), NEVER, tl.int32), mask=rest)


@triton.jit
def select(
    scores, places, out, held, rows, keys, row_stride, topk,
    CODED: tl.constexpr, SEGMENT: tl.constexpr, ROOM: tl.constexpr, CUDA: tl.constexpr,
):  # fmt: skip
    """Rows of given scores, or, CODED, of lists that `index` left: `places` names their keys."""
    held += tl.program_id(0).to(tl.int64) * ROOM
    lane = tl.arange(0, SEGMENT)
    row = tl.program_id(0)
    while row < rows:  # the interpreter's range takes no tensor (3.6.0 on numpy 2.4)
        base = row.to(tl.int64) * row_stride
        count = tl.full((), 0, tl.int32)
        least = tl.full((), LOWEST, tl.int32)
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
            put(held, slot, code, place, new, CUDA)
            count += tl.sum(new, 0)
            fence(CUDA)
            if count > ROOM - SEGMENT:
                count, least = cut(held, count, topk, SEGMENT // 4, ROOM, CUDA)
            start += SEGMENT
        emit(held, count, topk, out + row.to(tl.int64) * topk, out, ROOM, False)
        fence(CUDA)
        row += tl.num_programs(0)


@triton.jit
def row_of(position, first, pages, page_stride, row_stride, PAGE: tl.constexpr):
    """int64 offsets of a sequence's rows at `position`, packed from row `first` or in `pages`."""
    if PAGE > 0:
        page = tl.load(pages + position // PAGE).to(tl.int64)
        return page * page_stride + (position % PAGE).to(tl.int64) * row_stride
    return (first + position).to(tl.int64) * row_stride


@triton.jit
def index(
    query, key, weights, key_scale, offsets, key_offsets, blocks, pages,
    out, out_codes, scores, held,
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
    held += worker * Q * ROOM
    lane, column, turn = tl.arange(0, Q * H), tl.arange(0, D), tl.arange(0, Q)
    tile, spot = tl.arange(0, K), tl.arange(0, SEGMENT)
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
        # Where sequences are ragged the last blocks may have no query: nothing to look at.
        limit = tl.where(start < end, tl.minimum(sees + Q - 1, keys), 0)
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
        least = tl.full((Q,), LOWEST, tl.int32)
        low = part * share
        high = tl.minimum(limit, low + share)
        while low < high:
            tiles = tl.minimum(SEGMENT // K, tl.cdiv(high - low, K))
            for step in range(tiles if CUDA else SEGMENT // K):
                # Past the last key the last one is read again: masks would cost every tile.
                position = tl.minimum(low + step * K + tile, high - 1)
                at = row_of(position, first, listing, page_stride, row_stride, PAGE)
                if D > DIM:
                    k = tl.load(key + at[:, None] + column[None, :], mask=within, other=0.0)
                else:
                    k = tl.load(key + at[:, None] + column[None, :])
                if WIDEN:
                    k = k.to(tl.float32)
                dots = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                weighted = tl.maximum(dots.to(tl.float32), 0.0) * weight[None, :]
                total = tl.sum(tl.reshape(weighted, (K, Q, H)), 2)
                at = scores + turn[None, :] * SEGMENT + (step * K + tile)[:, None]
                put_all(at, total, CUDA)
            fence(CUDA)
            score = tl.load(scores + turn[:, None] * SEGMENT + spot[None, :])
            if HAS_SCALE:
                place = tl.minimum(low + spot, high - 1)
                at = row_of(place, first, listing, scale_page, scale_row, PAGE)
                score *= tl.load(key_scale + at)[None, :]
            code = ordered(score)
            if low + SEGMENT > tl.minimum(sees, high):
                seen = tl.where(start + turn < end, tl.minimum(sees + turn, high), 0) - low
                code = tl.where(spot[None, :] < seen[:, None], code, LOWEST)
            new = (code > least[:, None]).to(tl.int32)
            slot, more = running(new, Q, SEGMENT)
            slot += (turn * ROOM + count)[:, None] - 1
            place = tl.broadcast_to((low + spot)[None, :], (Q, SEGMENT))
            put(held, slot, code, place, new, CUDA)
            count += more
            fence(CUDA)
            if tl.max(count, 0) > ROOM - SEGMENT:
                for row in range(Q):
                    length = tl.sum(tl.where(turn == row, count, 0), 0)
                    length, bar = cut(held + row * ROOM, length, topk, SEGMENT // 4, ROOM, CUDA)
                    count = tl.where(turn == row, length, count)
                    least = tl.where(turn == row, bar, least)
            low += SEGMENT
        for row in range(Q):
            if start + row < end:
                length = tl.sum(tl.where(turn == row, count, 0), 0)
                place = ((start + row) * PARTS + part).to(tl.int64) * topk
                emit(
                    held + row * ROOM, length, topk, out + place, out_codes + place, ROOM,
                    PARTS > 1,
                )  # fmt: skip
        fence(CUDA)
        work += tl.num_programs(0)
