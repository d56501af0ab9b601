"""The Lightning Indexer through torch_npu's fused ops on Atlas A2 and A3.

bfloat16 by npu_lightning_indexer, int8 by npu_quant_lightning_indexer. Both select by sorting whole
scores; which of equal scores they keep is not documented. Never run on an NPU: checked against the
schemas and meta kernels of torch_npu 2.13.0 and run with CPU functions under its schemas.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.npu_support import ascending, call, one_head, sequences

CAUSAL = 3  # sparse_mode: queries are a sequence's last positions


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
    """As reference.lightning_indexer for bfloat16 and int8; Raises UnsupportedOp for the rest.

    Keys that are not contiguous are copied. `key_scale` in float16, as NPU caches hold it, is used
    as it is; float32 is rounded.
    """
    if query.shape[0] == 0:
        return torch.empty((0, topk), dtype=torch.int32, device=query.device)
    bounds = sequences(
        offsets, key_offsets, page_table, query.device,
        lengths="actual_seq_lengths_key", layout="layout_key",
    )  # fmt: skip
    keys = one_head(key, page_table)
    rest = {**bounds, "sparse_count": topk, "sparse_mode": CAUSAL}
    if query_scale is None or key_scale is None:
        same = head_weights.dtype in (torch.float32, query.dtype)
        chosen, _ = call(
            "npu_lightning_indexer",
            query=query.contiguous(),
            key=keys,
            weights=(head_weights if same else head_weights.float()).contiguous(),
            **rest,
        )
    else:
        weights = half_weights(head_weights.float() * query_scale.float())
        chosen = call(
            "npu_quant_lightning_indexer",
            query=query.contiguous(),
            key=keys,
            weights=weights,
            query_dequant_scale=torch.ones_like(weights),
            key_dequant_scale=one_head(key_scale.to(torch.float16), page_table),
            query_quant_mode=0,
            key_quant_mode=0,
            **rest,
        )
    return ascending(chosen.squeeze(1))


def half_weights(weights: Tensor) -> Tensor:
    """Returns float16 [tokens, heads] of weights x query scales: a query's largest is in (0.5, 1].

    Their product must stay in float16's range. A factor a query leaves its choice alone, and a
    power of two rounds nothing.
    """
    largest = weights.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, largest.log2().ceil(), 0.0)
    return torch.ldexp(weights, -exponent).to(torch.float16)
