"""The definition of Sparse Flash Attention in plain torch: absorbed MLA over selected tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fused_ops.chunk import rows_at_once
from fused_ops.paging import sequence_rows, spans
from fused_ops.sparse_attention.contract import LATENT_DIM, ROPE_DIM, TILE, KvFormat

FP8_MAX = 448.0


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
    """Returns (output [tokens, heads, value_dim], float32 log-sum-exp [tokens, heads]).

    `query` [tokens, heads, dim] has W_UK absorbed, `latent` [tokens, dim] is one shared key head
    whose first `value_dim` features are the value. `indices` int32 [tokens, selected] are positions
    within the query's sequence, -1 for none; `offsets` [sequences + 1] bounds the sequences. A
    query with nothing selected gives zeros and -inf. Softmax in float32. More in contract.py.
    """
    tokens, heads, dim = query.shape
    output = query.new_empty((tokens, heads, value_dim))
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=query.device)
    step = rows_at_once(indices.shape[1] * dim, query.device)
    bounds = zip(
        spans(offsets), spans(offsets if key_offsets is None else key_offsets), strict=True
    )
    for sequence, ((start, end), keyed) in enumerate(bounds):
        keys = unpack_rows(sequence_rows(latent, sequence, keyed, page_table), kv_format)
        for low in range(start, end, step):
            rows = slice(low, min(low + step, end))
            output[rows], lse[rows] = _attend(query[rows], keys, indices[rows], scale, value_dim)
    return output, lse


def combine(outputs: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over parts of the keys: (float32 [tokens, heads, value_dim], lse).

    `outputs` [parts, tokens, heads, value_dim] and `lse` [parts, tokens, heads] as sparse_attention
    gives them for each part; a part with nothing selected has -inf and counts nothing.
    """
    total = lse.logsumexp(0)
    weights = torch.exp(lse - total).nan_to_num(0.0)
    return (outputs.float() * weights.unsqueeze(-1)).sum(0), total


def unpack_rows(rows: Tensor, kv_format: KvFormat) -> Tensor:
    """Returns float32 [..., 576] of cache rows; "plain" rows are only widened.

    fp8_656 (vLLM's and SGLang's fp8_ds_mla): 512 e4m3, 4 float32 scales, 64 bfloat16.
    int8_656 (Ascend's kv_quant, per tile of 128): 512 int8, 64 bfloat16, 4 float32 scales.
    """
    if kv_format == "plain":
        return rows.float()
    codes, tail = rows[..., :LATENT_DIM].contiguous(), rows[..., LATENT_DIM:]
    rope_bytes, scale_bytes = 2 * ROPE_DIM, 4 * (LATENT_DIM // TILE)
    first, second = (
        tail.split([scale_bytes, rope_bytes], -1)
        if kv_format == "fp8_656"
        else tail.split([rope_bytes, scale_bytes], -1)
    )
    scale, rope = (first, second) if kv_format == "fp8_656" else (second, first)
    # cloned: one row alone counts as contiguous and keeps a stride that no wider type can have
    scale, rope = (x.clone(memory_format=torch.contiguous_format) for x in (scale, rope))
    dtype = torch.float8_e4m3fn if kv_format == "fp8_656" else torch.int8
    values = codes.view(dtype).float().unflatten(-1, (-1, TILE))
    values = (values * scale.view(torch.float32).unsqueeze(-1)).flatten(-2)
    return torch.cat([values, rope.view(torch.bfloat16).float()], -1)


def pack_rows(latent: Tensor, kv_format: KvFormat) -> Tensor:
    """Returns uint8 rows [..., 656] of latent [..., 576]; a tile's scale is absmax / 448 or 127."""
    tiles = latent[..., :LATENT_DIM].float().unflatten(-1, (-1, TILE))
    reach = FP8_MAX if kv_format == "fp8_656" else 127.0
    absmax = tiles.abs().amax(-1)
    scale = torch.where(absmax > 0, absmax / reach, torch.ones_like(absmax))
    scaled = (tiles / scale.unsqueeze(-1)).clamp(-reach, reach).flatten(-2)
    rope = latent[..., LATENT_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    scale_bytes = scale.contiguous().view(torch.uint8)
    if kv_format == "fp8_656":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat([codes, scale_bytes, rope], -1)
    return torch.cat([scaled.round().to(torch.int8).view(torch.uint8), rope, scale_bytes], -1)


def _attend(
    query: Tensor, keys: Tensor, indices: Tensor, scale: float, value_dim: int
) -> tuple[Tensor, Tensor]:
    if keys.shape[0] == 0:
        shape = query.shape[:2]
        return query.new_zeros((*shape, value_dim)), query.new_full(shape, -torch.inf).float()
    missing = ((indices < 0) | (indices >= keys.shape[0])).unsqueeze(1)
    # embedding copies whole rows: keys[...] takes five times as long on a CPU
    gathered = embedding(indices.clamp(min=0, max=keys.shape[0] - 1), keys)
    logits = torch.bmm(query.float(), gathered.transpose(1, 2)) * scale
    logits = logits.masked_fill(missing, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).nan_to_num(0.0)
    return torch.bmm(weights, gathered[..., :value_dim]).to(query.dtype), lse
