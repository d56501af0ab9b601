"""Sparse Flash Attention in portable Triton: a program is one token, some heads, some of its rows.

Parts of one token's rows are joined by `join`, so that few tokens still fill a chip.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806
# Kernels are Triton's language, constants in capitals. Of libraries, only triton is imported:
# compilers of other chips read this file where there is no torch.

from __future__ import annotations

import triton
import triton.language as tl

from fused_ops.triton_shared import holder


@triton.jit
def from_e4m3(bits):
    """float32 of float8 (e4m3) bytes, by way of float16's bits: not every chip has the type."""
    bits = bits.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def unpacked(rows, chosen, code, KV: tl.constexpr):
    """([N, 512], [N, 64]) of cache rows of 656 bytes at `rows` [N]: fp8 if KV is 1, int8 if 2."""
    SCALES: tl.constexpr = 512 if KV == 1 else 640
    ROPE: tl.constexpr = 528 if KV == 1 else 512
    column, tile, tail = tl.arange(0, 512), tl.arange(0, 4), tl.arange(0, 64)
    codes = tl.load(rows[:, None] + column[None, :], mask=chosen[:, None], other=0)
    codes = from_e4m3(codes) if KV == 1 else codes.to(tl.int8, bitcast=True).to(tl.float32)
    scales = (rows + SCALES).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales[:, None] + tile[None, :], mask=chosen[:, None], other=0.0)
    tiles = tl.reshape(codes, (rows.shape[0], 4, 128)) * scales[:, :, None]
    rope = (rows + ROPE).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(rope[:, None] + tail[None, :], mask=chosen[:, None], other=0.0)
    return tl.reshape(tiles, (rows.shape[0], 512)).to(code), rope.to(code)


@triton.jit
def gathered(
    latent, first, position, chosen, pages, page_stride, row_stride, code,
    VALUE: tl.constexpr, REST: tl.constexpr, V: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    KV: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """([N, V], [N, R]) the chosen rows at `position` [N]; zeros where nothing is chosen."""
    column, tail = tl.arange(0, V), tl.arange(0, R)
    place = tl.where(chosen, position, 0)
    if PAGE > 0:
        page = tl.load(pages + place // PAGE, mask=chosen, other=0)
        row = page.to(tl.int64) * page_stride + (place % PAGE).to(tl.int64) * row_stride
    else:
        row = (first + place) * row_stride
    if KV > 0:
        rows, more = unpacked(latent + row, chosen, code, KV)
    else:
        inside, beyond = chosen[:, None], chosen[:, None]
        if V > VALUE:  # a mask that spans the columns is worth having only where it is needed
            inside = inside & (column < VALUE)[None, :]
        if R > REST:
            beyond = beyond & (tail < REST)[None, :]
        rows = tl.load(latent + row[:, None] + column[None, :], mask=inside, other=0)
        more = tl.load(latent + row[:, None] + VALUE + tail[None, :], mask=beyond, other=0)
    if WIDEN:
        rows, more = rows.to(tl.float32), more.to(tl.float32)
    return rows, more


@triton.jit
def attend(
    query, latent, indices, offsets, key_offsets, pages, out, lse,
    query_token, query_head, page_stride, row_stride, index_stride, page_count, tokens, heads,
    sequences, scale,
    SELECTED: tl.constexpr, PART: tl.constexpr, VALUE: tl.constexpr, REST: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, R: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    STEPS: tl.constexpr, KV: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """H heads of a token over PART of its SELECTED rows, N at a time; V, R pad VALUE and REST.

    `scale` is in bits: log2(e) x the softmax's. KV is 0 for plain rows, 1 for fp8 and 2 for int8
    rows of 656 bytes. Softmax needs a base near the largest logit. Zero serves, and a token whose
    logits lie further than FAR bits from it is done again from its own largest: rare, exact, and
    the loop is left without the usual reduction and rescaling, which on an H200 take as long as the
    products.
    """
    FAR: tl.constexpr = 64.0
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    part = tl.program_id(2)
    column, tail, lane = tl.arange(0, V), tl.arange(0, R), tl.arange(0, N)
    sequence = holder(token, offsets, sequences, STEPS)
    first = tl.load(key_offsets + sequence).to(tl.int64)
    keys = (tl.load(key_offsets + sequence + 1) - first).to(tl.int32)
    pages += sequence * page_count
    head_in = head < heads
    at = query + token * query_token + head[:, None].to(tl.int64) * query_head
    near = tl.load(at + column[None, :], mask=head_in[:, None] & (column < VALUE)[None, :], other=0)
    far = tl.load(
        at + VALUE + tail[None, :], mask=head_in[:, None] & (tail < REST)[None, :], other=0
    )
    if WIDEN:
        near, far = near.to(tl.float32), far.to(tl.float32)
    listed = indices + token * index_stride + part * PART
    room = min(PART, SELECTED - part * PART)
    base = tl.zeros((H,), tl.float32)
    total = tl.zeros((H,), tl.float32)
    whole = total
    sums = tl.zeros((V, H), tl.float32)
    again = True
    while again:
        sums = tl.zeros((V, H), tl.float32)
        total = tl.zeros((H,), tl.float32)
        weights = tl.zeros((N // 16, 8, H), tl.float32)
        rounded = tl.zeros((N // 16, 8, H), tl.float32)
        peaks = tl.full((N // 16, 8, H), float("-inf"), tl.float32)
        position = tl.load(listed + lane, mask=lane < room, other=-1)
        for start in range(0, PART, N):
            chosen = (position >= 0) & (position < keys)
            rows, more = gathered(
                latent, first, position, chosen, pages, page_stride, row_stride,
                query.dtype.element_ty, VALUE, REST, V, R, PAGE, KV, WIDEN,
            )  # fmt: skip
            # The next list is asked for here: its rows would wait for it.
            after = start + N + lane
            position = tl.load(listed + after, mask=after < room, other=-1)
            logits = tl.zeros((N, H), tl.float32)
            # Under a condition the compiler gives each half of the warps its own half of the heads;
            # seeing a product that feeds another, it has both compute all of them.
            if start < room:
                logits = tl.dot(rows, tl.trans(near), input_precision=PRECISION) * scale
                if REST > 0:
                    logits += tl.dot(more, tl.trans(far), input_precision=PRECISION) * scale
            logits = tl.where(chosen[:, None], logits, float("-inf"))
            weight = tl.exp2(logits - base[None, :])
            # Rows a thread holds together are added at once: fewer sums to carry.
            weights += tl.sum(tl.reshape(weight, (N // 16, 2, 8, H)), 1)
            used = weight.to(rows.dtype).to(tl.float32)
            rounded += tl.sum(tl.reshape(used, (N // 16, 2, 8, H)), 1)
            peaks = tl.maximum(peaks, tl.max(tl.reshape(logits, (N // 16, 2, 8, H)), 1))
            sums = tl.dot(tl.trans(rows), weight.to(rows.dtype), sums, input_precision=PRECISION)
        total = tl.sum(tl.sum(weights, 0), 0)
        whole = tl.sum(tl.sum(rounded, 0), 0)
        peak = tl.max(tl.max(peaks, 0), 0)
        peak = tl.where(peak == float("-inf"), base, peak)
        off = tl.abs(peak - base)
        again = tl.max(off, 0) > FAR
        base = tl.where(off > FAR, peak, base)
    some = total > 0
    # Divided by the sum of the rounded weights, one row alone comes out as it is.
    result = tl.trans(sums / tl.where(some, whole, 1.0)[None, :])
    row = part * tokens + token
    place = (row * heads + head[:, None]) * VALUE + column[None, :]
    kept = head_in[:, None] & (column < VALUE)[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=kept)
    logged = (base + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
    tl.store(lse + row * heads + head, tl.where(some, logged, float("-inf")), mask=head_in)


@triton.jit
def join(
    parts, logs, out, lse, rows, PARTS: tl.constexpr, P: tl.constexpr,
    VALUE: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One (token, head) of PARTS partial results, weighted by their log-sum-exps; P pads PARTS."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, P), tl.arange(0, V)
    log = tl.load(logs + part * rows + row, mask=part < PARTS, other=float("-inf"))
    top = tl.max(log, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(log - base)
    total = tl.sum(weight, 0)
    some = total > 0
    weight = weight / tl.where(some, total, 1.0)
    at = parts + (part * rows + row)[:, None] * VALUE + column[None, :]
    inside = (part < PARTS)[:, None] & (column < VALUE)[None, :]
    value = tl.sum(tl.load(at, mask=inside, other=0.0) * weight[:, None], 0)
    tl.store(out + row * VALUE + column, value.to(out.dtype.element_ty), mask=column < VALUE)
    tl.store(lse + row, tl.where(some, base + tl.log(tl.where(some, total, 1.0)), float("-inf")))
