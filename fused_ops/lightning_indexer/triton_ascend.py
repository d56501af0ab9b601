"""Lightning Indexer on Ascend: launches of Triton kernels with tiles that fit its cores.

Codes stay int8: the cube multiplies them exactly, at twice the rate of bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fused_ops.paging import spans
from fused_ops.triton_ascend import Launch, Runner, on_npu
from fused_ops.triton_support import power_of_two

KERNELS = "fused_ops.lightning_indexer.triton_ascend_kernel"
WORKSPACE_BYTES = 256 << 20  # scores held at once
TILES = {"ROWS": 64, "K": 128}  # queries x heads and keys of a score tile
TOPK_TILES = {"N": 2048}  # scores a selection step looks at


def select_topk(
    scores: Tensor, topk: int, *, tiles: Mapping[str, int] = TOPK_TILES, run: Runner = on_npu
) -> Tensor:
    """As reference.select_topk."""
    rows, keys = scores.shape
    scores = scores if scores.stride(1) == 1 or keys == 1 else scores.contiguous()
    out = torch.empty((rows, topk), dtype=torch.int32, device=scores.device)
    counts = torch.full((rows,), keys, dtype=torch.int32, device=scores.device)
    _select(scores, counts, out, tiles, run)
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
    tiles: Mapping[str, int] = TILES,
    topk_tiles: Mapping[str, int] = TOPK_TILES,
    run: Runner = on_npu,
) -> Tensor:
    """As reference.lightning_indexer, for bfloat16 and int8."""
    tokens, heads, dim = query.shape
    out = torch.empty((tokens, topk), dtype=torch.int32, device=query.device)
    if tokens == 0:
        return out
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    weights = head_weights.float()
    weights = (weights if query_scale is None else weights * query_scale).contiguous()
    scale = weights if key_scale is None else key_scale.float()
    paged = page_table is not None
    pages = page_table.contiguous() if page_table is not None else out
    padded, keys_at_once = power_of_two(heads, 1), tiles["K"]
    at_once = max(1, tiles["ROWS"] // padded)
    table = _blocks(offsets, key_offsets, at_once)
    blocks = table.to(query.device)
    starts = [*table[:, 3].tolist(), tokens]
    counts = torch.cat(
        [sees + torch.arange(end - start) for start, end, sees in
         zip(starts[:-1], starts[1:], table[:, 4].tolist(), strict=True)]
    ).to(query.device, torch.int32)  # fmt: skip
    width = -(-int(table[:, 2].max()) // keys_at_once) * keys_at_once
    chunk = max(1, WORKSPACE_BYTES // (4 * width * at_once))  # blocks
    scores = torch.empty((min(chunk * at_once, tokens), width), device=query.device)
    for low in range(0, len(starts) - 1, chunk):
        high = min(low + chunk, len(starts) - 1)
        first, last = starts[low], starts[high]
        run(
            Launch(
                module=KERNELS,
                kernel="score",
                grid=(high - low, width // keys_at_once),
                args={
                    "query": query, "key": key, "weights": weights, "key_scale": scale,
                    "blocks": blocks, "pages": pages, "scores": scores,
                    "query_token": query.stride(0), "query_head": query.stride(1),
                    "page_stride": key.stride(0) if paged else 0, "row_stride": key.stride(-2),
                    "scale_page": scale.stride(0), "scale_row": scale.stride(-1),
                    "page_count": pages.shape[1], "first_block": low, "first_token": first,
                    "width": width, "heads": heads,
                },
                constants={
                    "Q": at_once, "H": padded, "D": dim,
                    "K": keys_at_once, "PAGE": key.shape[1] if paged else 0,
                    "HAS_SCALE": key_scale is not None,
                },
            )
        )  # fmt: skip
        _select(scores[: last - first], counts[first:last], out[first:last], topk_tiles, run)
    return out


def _select(
    scores: Tensor, counts: Tensor, out: Tensor, tiles: Mapping[str, int], run: Runner
) -> None:
    run(
        Launch(
            module=KERNELS,
            kernel="select",
            grid=(scores.shape[0],),
            args={
                "scores": scores, "counts": counts, "out": out, "row_stride": scores.stride(0),
                "topk": out.shape[1],
            },
            constants={"N": tiles["N"]},
        )
    )  # fmt: skip


def _blocks(offsets: Tensor, key_offsets: Tensor | None, tokens: int) -> Tensor:
    """Returns int32 [blocks, 6], blocks of at most `tokens` queries of one sequence.

    Columns: sequence, row of its first key, its keys, the block's first token, the keys that token
    sees, the token after the block's last.
    """
    queries = spans(offsets)
    keys = queries if key_offsets is None else spans(key_offsets)
    rows = []
    for sequence, ((start, end), (first, last)) in enumerate(zip(queries, keys, strict=True)):
        past = last - first - (end - start)
        for token in range(start, end, tokens):
            sees, after = past + token - start + 1, min(token + tokens, end)
            rows.append((sequence, first, last - first, token, sees, after))
    return torch.tensor(rows, dtype=torch.int32).reshape(-1, 6)
