"""Sparse Flash Attention in portable Triton: a program is one token and a block of its heads."""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals. Nothing but triton is imported: compilers of
# other chips read this file where there is no torch.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    query, latent, indices, tokens, pages, out, lse,
    query_token, query_head, page_stride, row_stride, index_stride, page_count,
    heads, rest, value, scale,
    SELECTED: tl.constexpr, H: tl.constexpr, V: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr, HAS_REST: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """H heads of one token over SELECTED rows, N at a time; V and R pad value and rest dims."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    column, tail = tl.arange(0, V), tl.arange(0, R)
    sequence = tl.load(tokens + token * 6)
    first = tl.load(tokens + token * 6 + 1).to(tl.int64)
    keys = tl.load(tokens + token * 6 + 2)
    head_in, column_in, tail_in = head < heads, column < value, tail < rest
    at = query + token * query_token + head[:, None].to(tl.int64) * query_head
    near = tl.load(at + column[None, :], mask=head_in[:, None] & column_in[None, :], other=0.0)
    if WIDEN:
        near = near.to(tl.float32)
    if HAS_REST:
        far = tl.load(
            at + value + tail[None, :], mask=head_in[:, None] & tail_in[None, :], other=0.0
        )
        if WIDEN:
            far = far.to(tl.float32)
    top = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    sums = tl.zeros((H, V), tl.float32)
    for start in range(0, SELECTED, N):
        slot = start + tl.arange(0, N)
        position = tl.load(indices + token * index_stride + slot, mask=slot < SELECTED, other=-1)
        chosen = (position >= 0) & (position < keys)
        position = tl.where(chosen, position, 0)
        if PAGE > 0:
            page = tl.load(pages + sequence * page_count + position // PAGE, mask=chosen, other=0)
            row = page.to(tl.int64) * page_stride + (position % PAGE).to(tl.int64) * row_stride
        else:
            row = (first + position) * row_stride
        rows = tl.load(
            latent + row[:, None] + column[None, :],
            mask=chosen[:, None] & column_in[None, :], other=0.0,
        )  # fmt: skip
        if WIDEN:
            rows = rows.to(tl.float32)
        logits = tl.dot(near, tl.trans(rows), input_precision=PRECISION)
        if HAS_REST:
            more = tl.load(
                latent + row[:, None] + value + tail[None, :],
                mask=chosen[:, None] & tail_in[None, :], other=0.0,
            )  # fmt: skip
            if WIDEN:
                more = more.to(tl.float32)
            logits += tl.dot(far, tl.trans(more), input_precision=PRECISION)
        logits = tl.where(chosen[None, :], logits * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)  # nothing chosen yet: no inf - inf
        weight = tl.exp(logits - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None]
        sums += tl.dot(weight.to(rows.dtype), rows, input_precision=PRECISION)
        top = peak
    some = total > 0
    result = tl.where(some[:, None], sums / tl.where(some, total, 1.0)[:, None], 0.0)
    place = (token * heads + head[:, None]) * value + column[None, :]
    tl.store(
        out + place, result.to(out.dtype.element_ty), mask=head_in[:, None] & column_in[None, :]
    )
    logged = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + token * heads + head, logged, mask=head_in)
