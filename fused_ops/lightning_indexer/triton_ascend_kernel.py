"""Lightning Indexer in Triton for Ascend: a chunk of queries' scores, then an exact selection.

triton_kernel.py's one kernel keeps lists in memory that the program which wrote them reads again.
Triton 3.2, which Ascend's frontend is, dies on its nested loops, and an NPU splits a program over
vector cores that share no order of memory. Here no program reads what it wrote. A gather reads what
its mask leaves out too, so every address is inside and D is the vectors' own size.
"""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals; Triton 3.2's, which Ascend's frontend is.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score(
    query, key, weights, key_scale, blocks, pages, scores,
    query_token, query_head, page_stride, row_stride, scale_page, scale_row, page_count,
    first_block, first_token, width, heads,
    Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """scores[Q tokens, K keys] = key scale x sum over heads of weight x ReLU(query . key)."""
    block = blocks + (first_block + tl.program_id(0)) * 6
    sequence, first = tl.load(block), tl.load(block + 1).to(tl.int64)
    start, sees = tl.load(block + 3), tl.load(block + 4)
    keys, end = tl.load(block + 2), tl.load(block + 5)
    position = tl.program_id(1) * K + tl.arange(0, K)
    if tl.program_id(1) * K < sees + Q - 1:
        lane, column = tl.arange(0, Q * H), tl.arange(0, D)
        token, head = start + lane // H, lane % H
        real = (token < end) & (head < heads)
        token, head = tl.minimum(token, end - 1).to(tl.int64), tl.minimum(head, heads - 1)
        inside = position < keys
        if PAGE > 0:
            spot = tl.where(inside, position, 0)
            page = tl.load(pages + sequence * page_count + spot // PAGE, mask=inside, other=0)
            page, slot = tl.maximum(page, 0).to(tl.int64), (spot % PAGE).to(tl.int64)
            at = page * page_stride + slot * row_stride
            scale_at = page * scale_page + slot * scale_row
        else:
            at = (first + position) * row_stride
            scale_at = (first + position) * scale_row
        near = query + (token * query_token + head.to(tl.int64) * query_head)[:, None]
        q = tl.load(near + column[None, :], mask=real[:, None], other=0)
        k = tl.load(key + at[:, None] + column[None, :], mask=inside[:, None], other=0)
        dots = tl.dot(q, tl.trans(k))
        weight = tl.load(weights + token * heads + head, mask=real, other=0.0)
        weighted = tl.maximum(dots.to(tl.float32), 0.0) * weight[:, None]
        total = tl.sum(tl.reshape(weighted, (Q, H, K)), 1)
        if HAS_SCALE:
            total = total * tl.load(key_scale + scale_at, mask=inside, other=0.0)[None, :]
        row = start + tl.arange(0, Q)
        place = (row - first_token).to(tl.int64)[:, None] * width + position[None, :]
        # Keys a query does not see are stored too, and not read: under a mask that is no rectangle
        # the whole tile would be read and written back, rows of other programs with it.
        tl.store(scores + place, total, mask=(row < end)[:, None])


@triton.jit
def ordered(values):
    """Floats as int32 in the same order; -0 equals +0."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def select(scores, counts, out, row_stride, topk, N: tl.constexpr):
    """One row: the `topk` largest of its count, ascending, ties to the lowest, -1 after the last.

    Four passes find the threshold's bytes from the top: in each, the byte at which the count from
    above reaches what is still wanted. A fifth writes.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    lane, bins = tl.arange(0, N), tl.arange(0, 512)
    prefix = tl.full((), 0, tl.int32)
    room = tl.full((), 0, tl.int32) + topk
    eligible = tl.full((), 0, tl.int32)
    for level in tl.static_range(4):
        shift = 24 - 8 * level
        found = tl.zeros((512,), tl.int32)
        start = tl.full((), 0, tl.int32)
        while start < count:  # the interpreter's range takes no tensor (3.6.0 on numpy 2.4)
            at = start + lane
            x = tl.load(scores + row * row_stride + at, mask=at < count, other=float("-inf"))
            code = ordered(x)
            match = (at < count) & (code > -2139095041)  # ordered(-inf) is never chosen
            code = code ^ -2147483648  # bytes of an unsigned number
            if level > 0:
                match = match & (((code ^ prefix) >> (shift + 8)) == 0)
            found += tl.histogram(tl.where(match, (code >> shift) & 255, 256), 512)
            start += N
        found = tl.where(bins < 256, found, 0)
        if level == 0:
            eligible = tl.sum(found, 0)
        from_here = tl.sum(found, 0) - tl.cumsum(found, 0) + found  # this byte and those above
        enough = (from_here >= room) & (bins < 256)
        digit = tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0)
        room -= tl.sum(tl.where(bins > digit, found, 0), 0)
        prefix = prefix | (digit << shift)
    threshold = prefix ^ -2147483648
    written = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < count:
        at = start + lane
        x = tl.load(scores + row * row_stride + at, mask=at < count, other=float("-inf"))
        code = ordered(x)
        real = (at < count) & (code > -2139095041)
        equal = (real & (code == threshold)).to(tl.int32)
        fits = (equal > 0) & (tl.cumsum(equal, 0) <= room)
        taken = (real & ((code > threshold) | fits | (eligible <= topk))).to(tl.int32)
        place = written + tl.cumsum(taken, 0) - 1
        tl.store(out + row * topk + place, at, mask=taken > 0)
        written += tl.sum(taken, 0)
        room -= tl.sum(equal, 0)
        start += N
    start = tl.full((), 0, tl.int32)
    while start < topk:
        at = start + lane
        none = tl.full((N,), -1, tl.int32)
        tl.store(out + row * topk + at, none, mask=(at >= written) & (at < topk))
        start += N
