"""Launches of triton_kernel."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fused_ops.sparse_attention.contract import KvFormat
from fused_ops.sparse_attention.triton_kernel import attend
from fused_ops.triton_support import block_table, interpreted, power_of_two

HEADS = 64  # a program's most; Ascend's accumulator holds 16
BLOCK = 32  # rows gathered at a time


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
