"""Launches of triton_kernel. Memory beside the result does not grow with the keys."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from fused_ops.lightning_indexer.triton_kernel import index, select
from fused_ops.triton_support import interpreted, native_fp8, power_of_two, processors

# Of the sizes tried on an H200 (4,096 queries, 65,536 keys) 128 keys and 8 warps take 7.2 ms, these
# 6.2; longer segments take registers that the scores need.
TILES = {
    "ROWS": 128,  # queries x heads of a score tile
    "K": 64,  # keys of a score tile
    "WARPS": 4,
    "SEGMENT": 1024,  # keys scored before the list is looked at
    "OCCUPANCY": 3,  # programs a processor holds
    "REGISTERS": 168,  # of a thread, so that it holds them
}
TOPK_TILES = {
    "SEGMENT": 1024,  # scores looked at together
    "SELECTIONS": 8,  # programs a processor holds
}
LEAST_SEGMENTS = 2  # of a part: fewer do not repay the merge


def select_topk(scores: Tensor, topk: int, *, tiles: Mapping[str, int] | None = None) -> Tensor:
    """As reference.select_topk. `tiles`: default TOPK_TILES."""
    scores = scores if scores.stride(1) == 1 or scores.shape[1] == 1 else scores.contiguous()
    return _select(scores, None, topk, tiles or TOPK_TILES)


def _select(scores: Tensor, places: Tensor | None, topk: int, tiles: Mapping[str, int]) -> Tensor:
    rows, keys = scores.shape
    out = torch.empty((rows, topk), dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    workers = min(rows, processors(scores.device) * tiles["SELECTIONS"])
    segment, entries = tiles["SEGMENT"], room(topk, tiles["SEGMENT"])
    held = _lists(workers, 1, entries, scores.device)
    select[(workers,)](
        scores, out if places is None else places, out, held, rows, keys,
        scores.stride(0), topk,
        CODED=places is not None, SEGMENT=segment, ROOM=entries, CUDA=not interpreted(),
        num_warps=4,
    )  # fmt: skip
    return out


def room(topk: int, segment: int) -> int:
    """Returns the entries of a list: after a cut to `topk` two segments fit."""
    return power_of_two(topk + 2 * segment)


def _lists(workers: int, rows: int, entries: int, device: torch.device) -> Tensor:
    return torch.empty((workers, rows, entries), dtype=torch.int64, device=device)


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
    tiles: Mapping[str, int] | None = None,
    topk_tiles: Mapping[str, int] | None = None,
) -> Tensor:
    """As reference.lightning_indexer. Where a chip has no product of these codes, bfloat16 does it.

    bfloat16 holds fp8 and int8 codes exactly. `tiles` and, of the merge, `topk_tiles`: default
    TILES and TOPK_TILES.
    """
    tiles, topk_tiles = tiles or TILES, topk_tiles or TOPK_TILES
    segment, entries = tiles["SEGMENT"], room(topk, tiles["SEGMENT"])
    (tokens, heads, dim), device = query.shape, query.device
    if tokens == 0:
        return torch.empty((0, topk), dtype=torch.int32, device=device)
    if query.dtype != torch.float32 and not (
        query.dtype == torch.float8_e4m3fn and native_fp8(device)
    ):
        query, key = query.to(torch.bfloat16), key.to(torch.bfloat16)
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    weights = head_weights.float()
    weights = (weights if query_scale is None else weights * query_scale).contiguous()
    scale = weights if key_scale is None else key_scale.float()
    offsets = offsets.to(device)
    key_offsets = offsets if key_offsets is None else key_offsets.to(device)
    sequences = offsets.shape[0] - 1
    padded = power_of_two(heads, 1)
    together = min(max(1, tiles["ROWS"] // padded), power_of_two(triton.cdiv(tokens, sequences), 1))
    padded = max(padded, 16 // together)  # a dot's least columns
    blocks = torch.zeros_like(offsets)
    torch.cumsum((offsets.diff() + together - 1) // together, 0, out=blocks[1:])
    # Ragged sequences may each leave a block unfilled, but not blocks of one query.
    most = tokens // together + sequences * (together > 1 and sequences > 1)
    most = max(most, triton.cdiv(tokens, together))
    workers = processors(device) * tiles["OCCUPANCY"]
    longest = key.shape[0] if page_table is None else page_table.shape[1] * key.shape[1]
    segments = triton.cdiv(longest, segment)
    parts = max(1, min(workers // most, segments // LEAST_SEGMENTS))
    workers = min(workers, most * parts)
    out = torch.full((tokens, parts, topk), -1, dtype=torch.int32, device=device)
    codes = torch.empty_like(out) if parts > 1 else out
    held = _lists(workers, together, entries, device)
    scores = torch.empty((workers, together, segment), device=device)
    pages = out if page_table is None else page_table.contiguous()
    index[(workers,)](
        query, key, weights, scale, offsets, key_offsets, blocks, pages,
        out, codes, scores, held,
        query.stride(0), query.stride(1), 0 if page_table is None else key.stride(0),
        key.stride(-2), scale.stride(0), scale.stride(-1), pages.shape[1],
        sequences, most * parts, heads, topk,
        PARTS=parts, Q=together, H=padded, DIM=dim, D=power_of_two(dim), K=tiles["K"],
        SEGMENT=segment, ROOM=entries, PAGE=0 if page_table is None else key.shape[1],
        STEPS=(sequences - 1).bit_length(), HAS_SCALE=key_scale is not None, WIDEN=interpreted(),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", CUDA=not interpreted(),
        num_warps=tiles["WARPS"], num_stages=3, maxnreg=tiles["REGISTERS"],
    )  # fmt: skip
    if parts == 1:
        return out.view(tokens, topk)
    return _select(codes.view(tokens, -1), out.view(tokens, -1), topk, topk_tiles)
