"""Launches of triton_kernel. Memory beside the result does not grow with the keys."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fused_ops.lightning_indexer.triton_kernel import index, select
from fused_ops.triton_support import interpreted, native_fp8, power_of_two, processors

# Of the sizes tried on an H200 (4,096 queries, 65,536 keys) 128 keys and 8 warps take 7.2 ms, these
# 6.2; longer segments take registers that the scores need.
ROWS = 128  # queries x heads of a score tile
KEYS = 64  # keys of a score tile
WARPS = 4
SEGMENT = 1024  # keys scored before the list is looked at
OCCUPANCY = 3  # programs a processor holds
REGISTERS = 168  # of a thread, so that it holds them
SELECTIONS = 8  # programs of select a processor holds
LEAST_SEGMENTS = 2  # of a part: fewer do not repay the merge


def select_topk(scores: Tensor, topk: int) -> Tensor:
    """As reference.select_topk."""
    scores = scores if scores.stride(1) == 1 or scores.shape[1] == 1 else scores.contiguous()
    return _select(scores, None, topk)


def _select(scores: Tensor, places: Tensor | None, topk: int) -> Tensor:
    rows, keys = scores.shape
    out = torch.empty((rows, topk), dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    workers = min(rows, processors(scores.device) * SELECTIONS)
    codes, listed = _lists(workers, 1, topk, scores.device)
    select[(workers,)](
        scores, codes if places is None else places, out, codes, listed, rows, keys,
        scores.stride(0), topk,
        CODED=places is not None, SEGMENT=SEGMENT, ROOM=room(topk), CUDA=not interpreted(),
        num_warps=4,
    )  # fmt: skip
    return out


def room(topk: int) -> int:
    """Returns the entries of a list: after a cut to `topk` two segments fit."""
    return power_of_two(topk + 2 * SEGMENT)


def _lists(workers: int, rows: int, topk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return tuple(
        torch.empty((workers, rows, room(topk)), dtype=torch.int32, device=device) for _ in range(2)
    )


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
    """As reference.lightning_indexer. Where a chip has no product of these codes, bfloat16 does it.

    bfloat16 holds fp8 and int8 codes exactly.
    """
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
    together = min(max(1, ROWS // padded), power_of_two(triton.cdiv(tokens, sequences), 1))
    padded = max(padded, 16 // together)  # a dot's least columns
    blocks = torch.zeros_like(offsets)
    torch.cumsum((offsets.diff() + together - 1) // together, 0, out=blocks[1:])
    most = tokens // together + sequences if sequences > 1 else triton.cdiv(tokens, together)
    workers = processors(device) * OCCUPANCY
    longest = key.shape[0] if page_table is None else page_table.shape[1] * key.shape[1]
    segments = triton.cdiv(longest, SEGMENT)
    parts = max(1, min(workers // most, segments // LEAST_SEGMENTS))
    workers = min(workers, most * parts)
    out = torch.full((tokens, parts, topk), -1, dtype=torch.int32, device=device)
    codes = torch.empty_like(out) if parts > 1 else out
    held_codes, held_places = _lists(workers, together, topk, device)
    scores = torch.empty((workers, together, SEGMENT), device=device)
    pages = out if page_table is None else page_table.contiguous()
    index[(workers,)](
        query, key, weights, scale, offsets, key_offsets, blocks, pages,
        out, codes, scores, held_codes, held_places,
        query.stride(0), query.stride(1), 0 if page_table is None else key.stride(0),
        key.stride(-2), scale.stride(0), scale.stride(-1), pages.shape[1],
        sequences, most * parts, heads, topk,
        PARTS=parts, Q=together, H=padded, DIM=dim, D=power_of_two(dim), K=KEYS,
        SEGMENT=SEGMENT, ROOM=room(topk), PAGE=0 if page_table is None else key.shape[1],
        STEPS=(sequences - 1).bit_length(), HAS_SCALE=key_scale is not None, WIDEN=interpreted(),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", CUDA=not interpreted(),
        num_warps=WARPS, num_stages=3, maxnreg=REGISTERS,
    )  # fmt: skip
    if parts == 1:
        return out.view(tokens, topk)
    return _select(codes.view(tokens, -1), out.view(tokens, -1), topk)
