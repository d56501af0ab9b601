"""Launches of gluon_kernel and bytes_kernel: W4A8 with codes as float8, W8A8 with int8, in bytes.

For passes over many rows, as calibration's forward is: the tensor cores read the codes as they lie,
twice a packed checkpoint's bytes. Serving keeps codes packed, and few rows an expert would wait for
those bytes; so this is not among contract.py's implementations.

Float8 on an H200, 256 experts of 2,048 rows: 960 to 1,230 TFLOP/s by shape and by how warm it is,
torch._grouped_mm in bfloat16 700 to 710. Without the scaling of each step's sums 1,110 to 1,440.
"""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fused_ops.expert_gemm.bytes_kernel import round_row, to_float8
from fused_ops.expert_gemm.gluon_kernel import multiply
from fused_ops.expert_gemm.triton_kernel import list_tiles
from fused_ops.triton_support import no_gluon, power_of_two, processors
from glm5q.quant import FP8, FP8_MAX

ROWS, FEATURES = 128, 256  # of a tile: the sums of two warpgroups fill the registers
STEP = 128  # columns of a step, and of a scale's group
REACH = {FP8: FP8_MAX, torch.int8: 127.0}  # of a row's codes
WIDENED = 8192  # codes a program turns to float8
TILES = {
    "STAGES": 4,  # steps in shared memory, with the output's staging all of it
    "GROUP": 16,  # row tiles of an expert that share weights in the L2
    "REGISTERS": 240,  # of a multiplying thread
}


def takes(x: Tensor, weight: Tensor, weight_scale: Tensor) -> bool:
    """Whether code_gemm runs here on tensors like these."""
    experts, features, columns = weight.shape
    return (
        no_gluon() is None
        and x.is_cuda
        and x.dtype == weight.dtype
        and x.dtype in REACH
        and weight_scale.dtype == torch.float32
        and all(one.is_contiguous() for one in (x, weight, weight_scale))
        and features >= FEATURES
        and features % 8 == 0
        and columns % STEP == 0
        and weight_scale.shape in _scales(experts, features, columns, x.dtype)
        and max(x.shape[0], experts * features) < 2**31 - FEATURES
    )


def _scales(experts: int, features: int, columns: int, dtype: torch.dtype) -> list[tuple[int, ...]]:
    """Shapes that scales may have: int8 sums reach over all columns, and have one scale."""
    groups = (1, columns // STEP) if dtype == FP8 else (1,)
    return [(experts, count, features) for count in groups]


def code_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor,
    weight_scale: Tensor,
    tiles: Mapping[str, int] | None = None,
) -> Tensor:
    """Returns bfloat16 [rows, out] as reference.expert_gemm does, of operands that `takes` takes.

    `x` e4m3 or int8 [rows, in] sorted by expert with float32 `x_scale` [rows], `weight` [experts,
    out, in] of code_bytes, float32 `weight_scale` [experts, groups, out] of groups of 128 columns
    or one group (int8: one); `offsets` [experts + 1] stays on the device. `tiles`: default TILES.
    """
    tiles = tiles or TILES
    experts, features, columns = weight.shape
    out = torch.empty((x.shape[0], features), dtype=torch.bfloat16, device=x.device)
    if x.shape[0] == 0:
        return out
    most = min(x.shape[0], x.shape[0] // ROWS + experts)
    table = torch.full((most + 1, 3), -1, dtype=torch.int32, device=x.device)
    list_tiles[(1,)](offsets, table, experts, E=power_of_two(experts, 1), ROWS=ROWS, num_warps=4)
    layout = gl.NVMMASharedLayout(128, 8, 2)
    programs = min(most * triton.cdiv(features, FEATURES), processors(x.device))
    multiply[(programs,)](
        TensorDescriptor.from_tensor(x, [ROWS, STEP], layout),
        TensorDescriptor.from_tensor(weight.flatten(0, 1), [FEATURES, STEP], layout),
        weight_scale, x_scale, table, offsets, out, most, features, columns // STEP,
        CHANNEL=weight_scale.shape[1] == 1, num_warps=4, **tiles,
    )  # fmt: skip
    return out


def code_bytes(codes: Tensor, dtype: torch.dtype = FP8) -> Tensor:
    """Returns int8 `codes`, any shape, in `dtype`: e4m3 is exact up to 16, so for four bits."""
    if dtype == torch.int8 or not codes.is_cuda:
        return codes.to(dtype)
    codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=FP8, device=codes.device)
    if codes.numel():  # torch's own conversion runs at a sixth of the memory's rate
        to_float8[(triton.cdiv(codes.numel(), WIDENED),)](codes, out, codes.numel(), N=WIDENED)
    return out


def round_rows(x: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """Returns (codes [rows, columns], float32 scales [rows]) as reference.quantize_rows does.

    `x` [rows, columns], `dtype` e4m3 or int8; one kernel that reads a row once.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        round_row[(x.shape[0],)](
            x, codes, scale, x.stride(0), x.shape[1], REACH=REACH[dtype],
            N=power_of_two(x.shape[1]), num_warps=8,
        )  # fmt: skip
    return codes, scale
