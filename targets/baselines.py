"""What plain torch takes for the same work: the other side of every ratio.

These are not implementations of the ops: they round to their dtype between steps and break ties as
torch.topk happens to. Each is the fastest eager form found on CPU (2026-11-30).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from fused_ops.expert_gemm.reference import weight_codes
from fused_ops.sparse_attention.reference import unpack_rows
from fused_ops.testkit import Inputs

QUERIES_AT_ONCE = 256
TOKENS_AT_ONCE = 4  # gathered rows of four tokens fit the cache; one or eight are slower
DTYPES = {"torch-bf16": torch.bfloat16, "torch-f32": torch.float32}


def baseline(op: str, name: str, inputs: Inputs) -> Callable[[], Any] | None:
    """Returns the call to time, inputs already in `name`'s dtype, or None if there is none."""
    make = _MAKERS.get(op)
    return None if make is None else make(inputs, DTYPES[name])


def _indexer(inputs: Inputs, dtype: torch.dtype) -> Callable[[], Any]:
    query, key, weights, _, topk = inputs.args
    scale = inputs.kwargs.get("query_scale")
    query, key = query.to(dtype), key.to(dtype)
    weights = (weights if scale is None else weights * scale).to(dtype)
    past = key.shape[0] - query.shape[0]  # one sequence

    def call() -> list[Tensor]:
        found = []
        for low in range(0, query.shape[0], QUERIES_AT_ONCE):
            part = query[low : low + QUERIES_AT_ONCE]
            rows, heads, dim = part.shape
            seen = past + low + rows
            dots = (part.reshape(-1, dim) @ key[:seen].T).view(rows, heads, seen).relu_()
            scores = torch.bmm(weights[low : low + rows].unsqueeze(1), dots).squeeze(1).float()
            position = torch.arange(seen, device=key.device)
            last = past + low + position[:rows].unsqueeze(1)
            scores = scores.masked_fill(position > last, -torch.inf)
            found.append(scores.topk(min(topk, seen)).indices)
        return found

    return call


def _topk(inputs: Inputs, dtype: torch.dtype) -> Callable[[], Any]:
    scores, topk = inputs.args
    scores = scores.to(dtype)
    return lambda: scores.topk(min(topk, scores.shape[1]))


def _attention(inputs: Inputs, dtype: torch.dtype) -> Callable[[], Any]:
    query, latent, indices, _, scale, value_dim = inputs.args
    latent = unpack_rows(latent, inputs.kwargs.get("kv_format", "plain")).to(dtype)
    query, indices = query.to(dtype), indices.long()

    def call() -> list[Tensor]:
        out = []
        for low in range(0, query.shape[0], TOKENS_AT_ONCE):
            at = slice(low, low + TOKENS_AT_ONCE)
            rows = latent[indices[at]]
            logits = torch.bmm(query[at], rows.transpose(1, 2)).float() * scale
            out.append(torch.bmm(logits.softmax(-1).to(dtype), rows[..., :value_dim]))
        return out

    return call


def _gemm(inputs: Inputs, dtype: torch.dtype) -> Callable[[], Any]:
    """One linear an expert on weights of `dtype`, dequantized beforehand."""
    x, weight, offsets = inputs.args
    rows = x.to(dtype)
    matrices = [weight_codes(expert, x.shape[1]).to(dtype) for expert in weight]
    spans = list(zip(offsets.tolist()[:-1], offsets.tolist()[1:], matrices, strict=True))
    return lambda: [F.linear(rows[low:high], matrix) for low, high, matrix in spans if high > low]


_MAKERS: dict[str, Callable[[Inputs, torch.dtype], Callable[[], Any]]] = {
    "lightning_indexer": _indexer,
    "select_topk": _topk,
    "sparse_attention": _attention,
    "expert_gemm": _gemm,
}
