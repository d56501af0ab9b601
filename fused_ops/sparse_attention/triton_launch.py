"""Launches of triton_kernel."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from fused_ops.sparse_attention.contract import KvFormat
from fused_ops.sparse_attention.triton_kernel import attend, join
from fused_ops.triton_support import capability, interpreted, power_of_two, processors

# A program's heads at most, rows gathered at a time, stages of the gather: what fits, by the
# compiler's own count of shared memory and registers (sm_90; sm_80 and sm_89).
HOPPER = {"H": 64, "N": 64, "STAGES": 2}
OTHERS = {"H": 32, "N": 16, "STAGES": 2}
# Of float32, which no recipe has.
HOPPER_F32 = {"H": 16, "N": 32, "STAGES": 1}
OTHERS_F32 = {"H": 16, "N": 16, "STAGES": 1}
LEAST_BLOCKS = 4  # of a part: fewer do not repay the join
KV = {"plain": 0, "fp8_656": 1, "int8_656": 2}
LOG2_E = 1.4426950408889634


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
    tiles: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.sparse_attention. `tiles` are bfloat16's; default: the GPU's of the above."""
    tiles = fitting(query.dtype, capability(query.device), tiles)
    block = min(tiles["H"], power_of_two(query.shape[1]))
    return in_parts(
        attend, query, latent, indices, offsets, scale, value_dim, kv_format, key_offsets,
        page_table, block, tiles["N"],
        H=block, V=power_of_two(value_dim), R=power_of_two(query.shape[2] - value_dim),
        WIDEN=interpreted(), PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_stages=tiles["STAGES"],
    )  # fmt: skip


def in_parts(
    kernel: Any,
    query: Tensor,
    latent: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale: float,
    value_dim: int,
    kv_format: KvFormat,
    key_offsets: Tensor | None,
    page_table: Tensor | None,
    block: int,
    rows: int,
    **constants: Any,
) -> tuple[Tensor, Tensor]:
    """Returns what `kernel` makes of every token, `block` heads and part of its rows, joined.

    It takes `rows` at a time; `constants` are its own beside those of every kernel here.
    """
    tokens, heads, dim = query.shape
    device, selected = query.device, indices.shape[1]
    out = torch.empty((tokens, heads, value_dim), dtype=query.dtype, device=device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    if tokens == 0:
        return out, lse
    query, latent, indices = (
        x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
        for x in (query, latent, indices)
    )
    offsets = offsets.to(device)
    key_offsets = offsets if key_offsets is None else key_offsets.to(device)
    head_blocks = triton.cdiv(heads, block)
    part, parts = split(triton.cdiv(selected, rows), tokens * head_blocks, device)
    partial, logs = out, lse
    if parts > 1:
        partial = torch.empty((parts, *out.shape), dtype=torch.float32, device=device)
        logs = torch.empty((parts, *lse.shape), dtype=torch.float32, device=device)
    pages = indices if page_table is None else page_table.contiguous()
    kernel[(tokens, head_blocks, parts)](
        query, latent, indices, offsets, key_offsets, pages, partial, logs,
        query.stride(0), query.stride(1),
        0 if page_table is None else latent.stride(0), latent.stride(-2), indices.stride(0),
        pages.shape[1], tokens, heads, offsets.shape[0] - 1, scale * LOG2_E,
        SELECTED=selected, PART=part * rows, VALUE=value_dim, REST=dim - value_dim, N=rows,
        PAGE=0 if page_table is None else latent.shape[1],
        STEPS=(offsets.shape[0] - 2).bit_length(), KV=KV[kv_format], num_warps=8, **constants,
    )  # fmt: skip
    if parts > 1:
        join[(tokens * heads,)](
            partial, logs, out, lse, tokens * heads,
            PARTS=parts, P=power_of_two(parts, 1), VALUE=value_dim, V=power_of_two(value_dim),
            num_warps=4,
        )  # fmt: skip
    return out, lse


def fitting(dtype: torch.dtype, major: int, tiles: Mapping[str, int] | None) -> Mapping[str, int]:
    """Returns `tiles`, or the table of a GPU of this major compute capability; float32 has own."""
    if dtype == torch.float32:
        return HOPPER_F32 if major == 9 else OTHERS_F32
    return tiles or (HOPPER if major == 9 else OTHERS)


def split(blocks: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Returns (blocks a part, parts): as many parts of a token's rows as processors are idle.

    A part has two blocks at least: of a loop of one, Triton 3.6 makes code that on an H200 read
    outside its memory, or wrong values.
    """
    wanted = max(1, min(processors(device) // programs, blocks // LEAST_BLOCKS))
    part = max(2, triton.cdiv(blocks, wanted))
    return part, max(1, triton.cdiv(blocks, part))
