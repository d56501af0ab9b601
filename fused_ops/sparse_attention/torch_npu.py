"""Sparse Flash Attention through torch_npu's fused ops on Atlas A2 and A3.

bfloat16 by npu_sparse_flash_attention, int8 rows of 656 bytes by
npu_kv_quant_sparse_flash_attention. Never run on an NPU: checked against the schemas and meta
kernels of torch_npu 2.13.0 and run with CPU functions under its schemas.

sparse_mode is 0, which masks nothing: causality is the indexer's, and an index after the query
counts here as it does in the reference. For the indexer's own indices 0 and 3 are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_ops.npu_support import ascending, call, one_head, sequences
from fused_ops.op import UnsupportedOp
from fused_ops.sparse_attention.contract import LATENT_DIM, ROPE_DIM, TILE, KvFormat

ABSORBED = 2  # attention_mode; the default 0 is not valid on A2 and A3
PER_TILE = 2  # quant mode: a scale for 128 codes
IN_ROWS = 1  # quant_scale_repo_mode: a row carries its scales


def sparse_attention(
    query: Tensor,
    latent: Tensor | tuple[Tensor, Tensor],
    indices: Tensor,
    offsets: Tensor,
    scale: float,
    value_dim: int,
    *,
    kv_format: KvFormat = "plain",
    key_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As reference.sparse_attention; the log-sum-exp is None for paged keys and int8 rows.

    `latent` may be (latent [..., 512], rotated [..., 64]), as NPU caches keep them: the op wants
    them apart and one [..., 576] is copied to be split. Raises UnsupportedOp for fp8 rows and for
    sizes the ops do not take.
    """
    if kv_format == "fp8_656" or value_dim != LATENT_DIM:
        raise UnsupportedOp(f"torch_npu has no {kv_format} rows with {value_dim} value features")
    parts = (latent,) if isinstance(latent, Tensor) else latent
    if query.shape[0] == 0 or parts[0].numel() == 0:
        return _nothing(query, value_dim)
    chosen = ascending(_inside(indices, offsets, key_offsets))
    call_with = {
        **sequences(
            offsets, key_offsets, page_table, query.device,
            lengths="actual_seq_lengths_kv", layout="layout_kv",
        ),
        "sparse_indices": chosen.unsqueeze(1),
        "scale_value": scale,
        "sparse_block_size": 1,
        "sparse_mode": 0,
        "attention_mode": ABSORBED,
    }  # fmt: skip
    lse: Tensor | None = None
    if kv_format == "plain":
        output, lse = _plain(query, parts, page_table, call_with)
    else:
        output = _int8(query, parts[0], page_table, call_with)
    nothing = (chosen[:, 0] < 0).unsqueeze(1)  # what the ops give then is not documented
    output = output.masked_fill(nothing.unsqueeze(2), 0)
    return output, None if lse is None else lse.masked_fill(nothing, -torch.inf)


def _plain(
    query: Tensor, parts: tuple[Tensor, ...], page_table: Tensor | None, call_with: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    key = one_head(parts[0][..., :LATENT_DIM], page_table)
    rope = parts[1] if len(parts) > 1 else parts[0][..., LATENT_DIM:]
    output, largest, total = call(
        "npu_sparse_flash_attention",
        query=query[..., :LATENT_DIM].contiguous(),
        key=key,
        value=key,
        query_rope=query[..., LATENT_DIM:].contiguous(),
        key_rope=one_head(rope, page_table),
        return_softmax_lse=page_table is None,
        **call_with,
    )
    return output, None if page_table is not None else (largest + total.log()).squeeze(0)


def _int8(
    query: Tensor, rows: Tensor, page_table: Tensor | None, call_with: dict[str, Any]
) -> Tensor:
    key = one_head(rows, page_table).view(torch.int8)
    output: Tensor = call(
        "npu_kv_quant_sparse_flash_attention",
        query=query.contiguous(),
        key=key,
        value=key,
        key_quant_mode=PER_TILE,
        value_quant_mode=PER_TILE,
        quant_scale_repo_mode=IN_ROWS,
        tile_size=TILE,
        rope_head_dim=ROPE_DIM,
        **call_with,
    )
    return output


def _inside(indices: Tensor, offsets: Tensor, key_offsets: Tensor | None) -> Tensor:
    """Returns indices with -1 for those outside the keys of their query's sequence."""
    token = torch.arange(indices.shape[0], device=indices.device)
    sequence = torch.searchsorted(offsets[1:].to(indices.device), token, right=True)
    keys = (offsets if key_offsets is None else key_offsets).diff().to(indices.device)
    limit = keys[sequence].unsqueeze(1)
    return torch.where((indices >= 0) & (indices < limit), indices, -1)


def _nothing(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
    return query.new_zeros((*query.shape[:2], value_dim)), lse
