"""The definition of the Lightning Indexer in plain torch: score every past key, keep the best."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.chunk import rows_at_once
from fused_ops.paging import sequence_rows, spans

FP8_MAX = 448.0
INDEX_AMAX_FLOOR = 1e-4  # DeepSeek-V3.2-Exp's act_quant; no real key is this small


def index_scores(
    query: Tensor, key: Tensor, head_weights: Tensor, key_scale: Tensor | None = None
) -> Tensor:
    """Returns float32 scores [queries, keys] = sum over heads of weight x ReLU(query . key).

    `query` is [queries, heads, dim], `key` [keys, dim], `head_weights` [queries, heads] with
    GLM-5's heads^-0.5 x dim^-0.5 already in them (glm_moe_dsa of transformers, DeepSeek-V3.2
    eq. 1), and a quantized query's scales too. `key_scale` [keys] multiplies after the sum.
    """
    queries, heads, dim = query.shape
    dots = (query.reshape(-1, dim).float() @ key.float().T).view(queries, heads, -1).relu_()
    scores = torch.bmm(head_weights.float().unsqueeze(1), dots).squeeze(1)
    return scores if key_scale is None else scores * key_scale.float()


def select_topk(scores: Tensor, topk: int) -> Tensor:
    """Returns int32 indices [queries, topk] of the largest scores, ascending, padded with -1.

    Exactly the first `topk` of a stable descending sort: equal scores go to the lowest index. Keys
    that must not be chosen hold -inf. ReLU makes plateaus of exact zeros, so ties are the rule.
    """
    queries, keys = scores.shape
    width = min(topk, keys)
    if width == 0:
        return torch.full((queries, topk), -1, dtype=torch.int32, device=scores.device)
    threshold = scores.topk(width, dim=-1).values[:, -1:]
    above, equal = scores > threshold, scores == threshold
    room = width - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    chosen &= scores > -torch.inf
    slot = chosen.cumsum(-1) - 1
    indices = torch.full((queries, topk + 1), -1, dtype=torch.int32, device=scores.device)
    position = torch.arange(keys, dtype=torch.int32, device=scores.device).expand(queries, keys)
    indices.scatter_(1, torch.where(chosen, slot, topk), torch.where(chosen, position, -1))
    return indices[:, :topk].contiguous()


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
    """Returns int32 [tokens, topk]: the positions each query attends, within its own sequence.

    `query` [tokens, heads, dim], `key` [tokens, dim], `head_weights` [tokens, heads]; `offsets`
    [sequences + 1] bounds the packed sequences. Causal; fewer than `topk` keys are padded with -1.
    With `key_offsets` a sequence has keys of its own number and its queries are the last of them.
    Scales and pages as in contract.py.
    """
    weights = head_weights.float() if query_scale is None else head_weights.float() * query_scale
    parts = []
    bounds = zip(
        spans(offsets), spans(offsets if key_offsets is None else key_offsets), strict=True
    )
    for sequence, ((start, end), keyed) in enumerate(bounds):
        count = keyed[1] - keyed[0]
        keys = sequence_rows(key, sequence, keyed, page_table)
        scale = None if key_scale is None else sequence_rows(key_scale, sequence, keyed, page_table)
        past = count - (end - start)  # keys before the first query
        step = rows_at_once(query.shape[1] * count, query.device)
        for low in range(start, end, step):
            high = min(low + step, end)
            seen = past + high - start
            part = None if scale is None else scale[:seen]
            scores = index_scores(query[low:high], keys[:seen], weights[low:high], part)
            parts.append(select_topk(_causal(scores, past + low - start), topk))
    if not parts:
        return torch.empty((0, topk), dtype=torch.int32, device=query.device)
    return torch.cat(parts)


def quantize_index(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Returns (codes as x, float32 scales [...]) of vectors x [..., dim], one scale a vector.

    fp8: GLM-5's block of 128 is the whole head, scale 2^ceil(log2(max(absmax, 1e-4) / 448)) kept in
    float32 (DeepSeek-V3.2-Exp inference/kernel.py, vLLM, SGLang). int8: absmax / 127.
    """
    values = x.float()
    absmax = values.abs().amax(-1)
    if dtype == "fp8":
        scale = torch.exp2(torch.ceil(torch.log2(absmax.clamp(min=INDEX_AMAX_FLOOR) / FP8_MAX)))
        scaled = (values / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
        return scaled.to(torch.float8_e4m3fn), scale
    scale = torch.where(absmax > 0, absmax / 127.0, torch.ones_like(absmax))
    return (values / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scale


def split_index_pages(pages: Tensor, page_size: int, dim: int = 128) -> tuple[Tensor, Tensor]:
    """Views uint8 pages [pages, page size x (dim + 4)] as (fp8 keys, float32 scales).

    GLM-5's index cache as vLLM and SGLang keep it: a page's keys first, then its scales; 132 bytes
    a token, 8448 a page of 64. Returns [pages, page size, dim] and [pages, page size].
    """
    codes = pages[:, : page_size * dim].unflatten(1, (page_size, dim)).view(torch.float8_e4m3fn)
    return codes, pages[:, page_size * dim :].contiguous().view(torch.float32)


def _causal(scores: Tensor, first: int) -> Tensor:
    """Sets to -inf the keys after each query; row r is the query at position first + r."""
    rows = torch.arange(first, first + scores.shape[0], device=scores.device).unsqueeze(1)
    columns = torch.arange(scores.shape[1], device=scores.device).unsqueeze(0)
    return scores.masked_fill(columns > rows, -torch.inf)
