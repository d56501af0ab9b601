"""Launches of triton_kernel."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_ops.expert_gemm.halved import Halved, halve
from fused_ops.expert_gemm.triton_kernel import list_tiles, multiply, requantize
from fused_ops.triton_support import capability, interpreted, power_of_two
from glm5q.quant import FP8, FP8_MAX

# Rows of a program at most, its output features, columns a step where one scale covers the whole
# row, stages of the loads (sm_90; sm_80 and sm_89).
HOPPER = {"ROWS": 128, "N": 128, "WIDTH": 128, "STAGES": 4}
OTHERS = {"ROWS": 128, "N": 128, "WIDTH": 128, "STAGES": 2}
CHUNK = 1024  # features a requantization looks at


def fitting(major: int, tiles: Mapping[str, int] | None) -> Mapping[str, int]:
    """Returns `tiles`, or the table of a GPU of this major compute capability."""
    return tiles or (HOPPER if major == 9 else OTHERS)


def prepare(
    weight: Tensor, weight_scale: Tensor, columns: int, *, tiles: Mapping[str, int] | None = None
) -> Halved:
    """Reorders weights once; arguments as of cpu.prepare, `tiles` as of expert_gemm."""
    width = fitting(capability(weight.device), tiles)["WIDTH"]
    return halve(weight, weight_scale, columns, width)


def expert_gemm(
    x: Tensor,
    weight: Tensor | Halved,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiles: Mapping[str, int] | None = None,
) -> Tensor:
    """As reference.expert_gemm for codes; `weight` may be prepared. fp8 goes through bfloat16.

    `tiles`: default the GPU's of the above.
    """
    tiles = fitting(capability(x.device), tiles)
    if not isinstance(weight, Halved):
        weight = prepare(weight, weight_scale, x.shape[1], tiles=tiles)
    x = x if x.dtype == torch.int8 else x.to(torch.bfloat16)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, groups, features, _ = weight.codes.shape
    out = torch.empty((x.shape[0], features), dtype=out_dtype or torch.bfloat16, device=x.device)
    if x.shape[0] == 0:
        return out
    rows = power_of_two(triton.cdiv(2 * x.shape[0], experts))  # twice an even share
    rows = min(tiles["ROWS"], rows)
    most = min(x.shape[0], x.shape[0] // rows + experts)
    table = torch.full((most, 3), -1, dtype=torch.int32, device=x.device)
    list_tiles[(1,)](
        offsets.to(x.device), table, experts, E=power_of_two(experts, 1), ROWS=rows, num_warps=4
    )
    multiply[(most, triton.cdiv(features, tiles["N"]))](
        x, weight.codes, weight.scale, weight.scale if x_scale is None else x_scale.float(),
        table, out, x.stride(0), weight.columns, features,
        GROUPS=groups, WIDTH=weight.width, BITS=weight.bits, CHANNEL=weight.scale.shape[1] == 1,
        EVEN=weight.columns == groups * weight.width, HAS_X_SCALE=x_scale is not None,
        ROWS=rows, N=tiles["N"], SUM=tl.int32 if x.dtype == torch.int8 else tl.float32,
        WIDEN=interpreted(), CUDA=not interpreted(),
        num_warps=8 if rows >= 128 else 4, num_stages=tiles["STAGES"],
    )  # fmt: skip
    return out


def expert_swiglu(
    x: Tensor,
    weight: Tensor | Halved,
    offsets: Tensor,
    *,
    x_scale: Tensor,
    weight_scale: Tensor | None = None,
    tiles: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.expert_swiglu: both products in float32, then one pass a row for the rest.

    A row's scale needs all its features, which no one program of the product has.
    """
    both = expert_gemm(
        x, weight, offsets, x_scale=x_scale, weight_scale=weight_scale, out_dtype=torch.float32,
        tiles=tiles,
    )  # fmt: skip
    rows, inner = both.shape[0], both.shape[1] // 2
    whole = x.dtype == torch.int8
    codes = torch.empty(
        (rows, inner), dtype=torch.int8 if whole else torch.float32, device=x.device
    )
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        requantize[(rows,)](
            both, codes, scale, inner, REACH=127.0 if whole else FP8_MAX, ROUND=whole, N=CHUNK,
            num_warps=4,
        )  # fmt: skip
    return codes if whole else codes.to(FP8), scale
