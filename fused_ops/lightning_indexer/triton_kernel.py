"""Lightning Indexer in portable Triton: a chunk of queries' scores, then an exact radix selection.

The scores of at most WORKSPACE_BYTES are held at once, so memory does not grow with queries x keys.
"""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals, and triton is not always installed.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_ops.triton_support import block_table, interpreted, power_of_two

WORKSPACE_BYTES = 256 << 20
ROWS = 128  # queries x heads of a score tile; more reuse of keys, more registers
KEYS = 128  # keys of a score tile
SCAN = 2048  # scores a selection step looks at


@triton.jit
def score(
    query, key, weights, key_scale, blocks, pages, scores,
    query_token, query_head, page_stride, row_stride, scale_page, scale_row, page_count,
    first_block, first_token, width, heads, dim,
    Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr,
    HAS_SCALE: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scores[Q tokens, K keys] = key scale x sum over heads of weight x ReLU(query . key)."""
    block = blocks + (first_block + tl.program_id(0)) * 6
    sequence, first = tl.load(block), tl.load(block + 1).to(tl.int64)
    start, sees = tl.load(block + 3), tl.load(block + 4)
    keys, end = tl.load(block + 2), tl.load(block + 5)
    position = tl.program_id(1) * K + tl.arange(0, K)
    if tl.program_id(1) * K < sees + Q - 1:
        lane, column = tl.arange(0, Q * H), tl.arange(0, D)
        token, head = (start + lane // H).to(tl.int64), lane % H
        inside = position < keys
        if PAGE > 0:
            page = tl.load(pages + sequence * page_count + position // PAGE, mask=inside, other=0)
            page, slot = page.to(tl.int64), (position % PAGE).to(tl.int64)
            at = page * page_stride + slot * row_stride
            scale_at = page * scale_page + slot * scale_row
        else:
            at = (first + position) * row_stride
            scale_at = (first + position) * scale_row
        real = (token < end) & (head < heads)
        near = query + (token * query_token + head.to(tl.int64) * query_head)[:, None]
        within = (column < dim)[None, :]
        q = tl.load(near + column[None, :], mask=real[:, None] & within, other=0.0)
        k = tl.load(key + at[:, None] + column[None, :], mask=inside[:, None] & within, other=0.0)
        if WIDEN:
            q, k = q.to(tl.float32), k.to(tl.float32)
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        weight = tl.load(weights + token * heads + head, mask=real, other=0.0)
        weighted = tl.maximum(dots, 0.0) * weight[:, None]
        total = tl.sum(tl.reshape(weighted, (Q, H, K)), 1)
        if HAS_SCALE:
            total = total * tl.load(key_scale + scale_at, mask=inside, other=0.0)[None, :]
        row = start + tl.arange(0, Q)
        place = (row - first_token).to(tl.int64)[:, None] * width + position[None, :]
        seen = position[None, :] < sees + tl.arange(0, Q)[:, None]
        tl.store(scores + place, total, mask=seen & inside[None, :] & (row < end)[:, None])


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


def select_topk(scores: Tensor, topk: int) -> Tensor:
    """As reference.select_topk."""
    rows, keys = scores.shape
    scores = scores if scores.stride(1) == 1 or keys == 1 else scores.contiguous()
    out = torch.empty((rows, topk), dtype=torch.int32, device=scores.device)
    counts = torch.full((rows,), keys, dtype=torch.int32, device=scores.device)
    select[(rows,)](scores, counts, out, scores.stride(0), topk, N=SCAN, num_warps=8)
    return out


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    head_weights: Tensor,
    offsets: Tensor,
    topk: int,
    *,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    key_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
) -> Tensor:
    """As reference.lightning_indexer; fp8 and int8 codes go through bfloat16, which holds them."""
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, topk), dtype=torch.int32, device=query.device)
    if tokens == 0:
        return out
    if query.dtype != torch.float32:
        query, key = query.to(torch.bfloat16), key.to(torch.bfloat16)
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    weights = head_weights.float()
    weights = (weights if query_scale is None else weights * query_scale).contiguous()
    scale = weights if key_scale is None else key_scale.float()
    paged = page_table is not None
    pages = page_table.contiguous() if page_table is not None else out
    padded = power_of_two(heads, 1)
    at_once = max(1, ROWS // padded)
    blocks = block_table(offsets, key_offsets, at_once, query.device)
    starts = [*blocks[:, 3].tolist(), tokens]
    counts = torch.cat(
        [sees + torch.arange(end - start) for start, end, sees in
         zip(starts[:-1], starts[1:], blocks[:, 4].tolist(), strict=True)]
    ).to(query.device, torch.int32)  # fmt: skip
    width = triton.cdiv(int(blocks[:, 2].max()), KEYS) * KEYS
    chunk = max(1, WORKSPACE_BYTES // (4 * width * at_once))  # blocks
    scores = torch.empty((min(chunk * at_once, tokens), width), device=query.device)
    for low in range(0, len(starts) - 1, chunk):
        high = min(low + chunk, len(starts) - 1)
        first, last = starts[low], starts[high]
        score[(high - low, width // KEYS)](
            query, key, weights, scale, blocks, pages, scores,
            query.stride(0), query.stride(1), key.stride(0) if paged else 0, key.stride(-2),
            scale.stride(0), scale.stride(-1), pages.shape[1], low, first, width, heads, dim,
            Q=at_once, H=padded, D=power_of_two(dim), K=KEYS, PAGE=key.shape[1] if paged else 0,
            HAS_SCALE=key_scale is not None, WIDEN=interpreted(),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=8, num_stages=2,
        )  # fmt: skip
        select[(last - first,)](
            scores, counts[first:last], out[first:last], width, topk, N=SCAN, num_warps=8
        )
    return out
