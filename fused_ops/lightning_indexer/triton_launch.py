"""Launches of triton_kernel."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fused_ops.lightning_indexer.triton_kernel import score, select
from fused_ops.triton_support import block_table, interpreted, power_of_two

WORKSPACE_BYTES = 256 << 20
ROWS = 128  # queries x heads of a score tile; more reuse of keys, more registers
KEYS = 128  # keys of a score tile
SCAN = 2048  # scores a selection step looks at


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
