"""Sparse Flash Attention in portable Triton: a program is one token and a block of its heads."""
# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are Triton's language, constants in capitals, and triton is not always installed.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_ops.sparse_attention.contract import KvFormat
from fused_ops.triton_support import block_table, interpreted, power_of_two

HEADS = 64  # a program's most; Ascend's accumulator holds 16
BLOCK = 32  # rows gathered at a time


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


def sparse_attention(
    query: Tensor,
    latent: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale: float,
    value_dim: int,
    *,
    kv_format: KvFormat = "plain",
    key_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.sparse_attention, for plain rows."""
    if kv_format != "plain":
        raise ValueError(f"this kernel reads plain rows, not {kv_format}")
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, heads, value_dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=query.device)
    query, latent, indices = (
        x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
        for x in (query, latent, indices)
    )
    block = min(HEADS, power_of_two(heads))
    pages = indices if page_table is None else page_table.contiguous()
    attend[(tokens, triton.cdiv(heads, block))](
        query, latent, indices, block_table(offsets, key_offsets, 1, query.device), pages, out, lse,
        query.stride(0), query.stride(1),
        0 if page_table is None else latent.stride(0), latent.stride(-2), indices.stride(0),
        pages.shape[1], heads, dim - value_dim, value_dim, scale,
        SELECTED=indices.shape[1], H=block, N=BLOCK,
        V=power_of_two(value_dim), R=power_of_two(dim - value_dim),
        PAGE=0 if page_table is None else latent.shape[1],
        HAS_REST=dim > value_dim, WIDEN=interpreted(),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return out, lse
