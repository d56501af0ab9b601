"""Launches of triton_kernel."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fused_ops.sparse_attention.contract import KvFormat
from fused_ops.sparse_attention.triton_kernel import attend, join
from fused_ops.triton_support import capability, interpreted, power_of_two, processors

# A program's heads at most, rows gathered at a time, stages of the gather: what fits, by the
# compiler's own count of shared memory and registers (sm_90; sm_80 and sm_89). bfloat16, float32.
HOPPER = ((64, 64, 2), (16, 32, 1))
OTHERS = ((32, 16, 2), (16, 16, 1))
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
) -> tuple[Tensor, Tensor]:
    """As reference.sparse_attention."""
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
    sizes = HOPPER if capability(device) == 9 else OTHERS
    most_heads, rows, stages = sizes[query.dtype == torch.float32]
    block = min(most_heads, power_of_two(heads))
    head_blocks = triton.cdiv(heads, block)
    part, parts = split(triton.cdiv(selected, rows), tokens * head_blocks, device)
    partial, logs = out, lse
    if parts > 1:
        partial = torch.empty((parts, *out.shape), dtype=torch.float32, device=device)
        logs = torch.empty((parts, *lse.shape), dtype=torch.float32, device=device)
    pages = indices if page_table is None else page_table.contiguous()
    attend[(tokens, head_blocks, parts)](
        query, latent, indices, offsets, key_offsets, pages, partial, logs,
        query.stride(0), query.stride(1),
        0 if page_table is None else latent.stride(0), latent.stride(-2), indices.stride(0),
        pages.shape[1], tokens, heads, offsets.shape[0] - 1, scale * LOG2_E,
        SELECTED=selected, PART=part * rows, VALUE=value_dim, REST=dim - value_dim,
        H=block, V=power_of_two(value_dim), R=power_of_two(dim - value_dim), N=rows,
        PAGE=0 if page_table is None else latent.shape[1],
        STEPS=(offsets.shape[0] - 2).bit_length(), KV=KV[kv_format], WIDEN=interpreted(),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=8, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        join[(tokens * heads,)](
            partial, logs, out, lse, tokens * heads,
            PARTS=parts, P=power_of_two(parts, 1), VALUE=value_dim, V=power_of_two(value_dim),
            num_warps=4,
        )  # fmt: skip
    return out, lse


def split(blocks: int, programs: int, device: torch.device) -> tuple[int, int]:
    """Returns (blocks a part, parts): as many parts of a token's rows as processors are idle.

    A part has two blocks at least: of a loop of one, Triton 3.6 makes code that on an H200 read
    outside its memory, or wrong values.
    """
    wanted = max(1, min(processors(device) // programs, blocks // LEAST_BLOCKS))
    part = max(2, triton.cdiv(blocks, wanted))
    return part, max(1, triton.cdiv(blocks, part))
