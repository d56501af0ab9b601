"""Sparse Flash Attention on Ascend: launches of Triton kernels with tiles that fit its cores."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fused_ops.sparse_attention.contract import KvFormat
from fused_ops.triton_ascend import Launch, Runner, on_npu
from fused_ops.triton_support import power_of_two

KERNELS = "fused_ops.sparse_attention.triton_ascend_kernel"
# H heads a program, N rows gathered at a time. 32 heads overflow the 192 KiB of a vector core.
TILES = {"H": 16, "N": 32}


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
    tiles: Mapping[str, int] = TILES,
    run: Runner = on_npu,
) -> tuple[Tensor, Tensor]:
    """As reference.sparse_attention, for plain rows."""
    if kv_format != "plain":
        raise ValueError(f"this kernel reads plain rows, not {kv_format}")
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, heads, value_dim), dtype=query.dtype, device=query.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=query.device)
    if tokens == 0:
        return out, lse
    query, latent, indices = (
        x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
        for x in (query, latent, indices)
    )
    at_once = min(tiles["H"], power_of_two(heads))
    paged = page_table is not None
    sequences = len(offsets) - 1
    bounds = offsets.to(query.device, torch.int32)
    keys = bounds if key_offsets is None else key_offsets.to(query.device, torch.int32)
    pages = indices if page_table is None else page_table.contiguous()
    run(
        Launch(
            module=KERNELS,
            kernel="attend",
            grid=(tokens, -(-heads // at_once)),
            args={
                "query": query, "latent": latent, "indices": indices, "offsets": bounds,
                "key_offsets": keys, "pages": pages, "out": out, "lse": lse,
                "query_token": query.stride(0), "query_head": query.stride(1),
                "page_stride": latent.stride(0) if paged else 0, "row_stride": latent.stride(-2),
                "index_stride": indices.stride(0), "page_count": pages.shape[1], "heads": heads,
                "sequences": sequences, "scale": float(scale),
            },
            constants={
                "SELECTED": indices.shape[1], "VALUE": value_dim, "REST": dim - value_dim,
                "H": at_once, "N": tiles["N"], "PAGE": latent.shape[1] if paged else 0,
                "STEPS": (sequences - 1).bit_length(),
            },
        )
    )  # fmt: skip
    return out, lse
