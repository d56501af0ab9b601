"""Sparse Flash Attention in Triton for Ascend: a program is one token and some of its heads.

triton_kernel.py is laid out for a GPU's registers. Here H x VALUE float32 sums stay in UB, which
holds 16 heads of 512 features. A gather reads the rows and columns that its mask leaves out too, so
every address is inside and VALUE and REST are powers of two.
"""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals; Triton 3.2's, which Ascend's frontend is.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    query, latent, indices, offsets, key_offsets, pages, out, lse,
    query_token, query_head, page_stride, row_stride, index_stride, page_count, heads, sequences,
    scale,
    SELECTED: tl.constexpr, VALUE: tl.constexpr, REST: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """H heads of one token over SELECTED rows, N at a time; its sequence found in STEPS steps."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * H + tl.arange(0, H)
    column = tl.arange(0, VALUE)
    sequence = tl.full((), 0, tl.int32)
    for step in tl.static_range(STEPS):
        middle = sequence + (1 << (STEPS - 1 - step))
        bound = tl.load(offsets + tl.minimum(middle, sequences))
        sequence = tl.where((middle < sequences) & (bound <= token), middle, sequence)
    first = tl.load(key_offsets + sequence)
    keys = tl.load(key_offsets + sequence + 1) - first
    real = (head < heads)[:, None]
    at = query + token * query_token + head[:, None].to(tl.int64) * query_head
    near = tl.load(at + column[None, :], mask=real, other=0.0)
    if REST > 0:
        tail = tl.arange(0, REST)
        far = tl.load(at + VALUE + tail[None, :], mask=real, other=0.0)
    top = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    sums = tl.zeros((H, VALUE), tl.float32)
    for start in range(0, SELECTED, N):
        slot = start + tl.arange(0, N)
        position = tl.load(indices + token * index_stride + slot, mask=slot < SELECTED, other=-1)
        chosen = (position >= 0) & (position < keys)
        position = tl.where(chosen, position, 0)
        if PAGE > 0:
            page = tl.load(pages + sequence * page_count + position // PAGE, mask=chosen, other=0)
            row = page.to(tl.int64) * page_stride + (position % PAGE).to(tl.int64) * row_stride
        else:
            row = (first + position).to(tl.int64) * row_stride
        there = chosen[:, None]
        rows = tl.load(latent + row[:, None] + column[None, :], mask=there, other=0.0)
        logits = tl.dot(near, tl.trans(rows))
        if REST > 0:
            more = tl.load(latent + row[:, None] + VALUE + tail[None, :], mask=there, other=0.0)
            logits += tl.dot(far, tl.trans(more))
        logits = tl.where(chosen[None, :], logits * scale, float("-inf"))
        peak = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(peak == float("-inf"), 0.0, peak)  # nothing chosen yet: no inf - inf
        weight = tl.exp(logits - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(rows.dtype), rows)
        top = peak
    some = total > 0
    result = tl.where(some[:, None], sums / tl.where(some, total, 1.0)[:, None], 0.0)
    place = (token * heads + head[:, None]) * VALUE + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real)
    logged = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + token * heads + head, logged, mask=head < heads)
