"""Launches of triton_kernel."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fused_ops.expert_gemm.reference import weight_codes
from fused_ops.expert_gemm.triton_kernel import multiply
from fused_ops.paging import spans

FEATURES = 64  # a program's output features
WIDTH = 128  # columns a step where one scale covers the whole row


@dataclass(frozen=True)
class Prepared:
    """`codes` int8 [experts, groups, width / 2 or width, out]; `scale` float32 [experts, n, out].

    n is groups, or 1 where one scale covers the row and `groups` are only steps.
    """

    codes: Tensor
    scale: Tensor
    columns: int
    width: int
    bits: int


def prepare(weight: Tensor, weight_scale: Tensor, columns: int) -> Prepared:
    """Reorders weights once; arguments as of cpu.prepare."""
    bits, groups = (4 if weight.dtype == torch.int32 else 8), weight_scale.shape[2]
    width = columns // groups if groups > 1 else WIDTH
    codes = weight_codes(weight, columns)
    codes = torch.nn.functional.pad(codes, (0, -columns % width)).unflatten(2, (-1, width))
    codes = codes.permute(0, 2, 3, 1)  # [experts, groups, width, out]
    if bits == 4:
        low, high = codes.chunk(2, 2)
        codes = (low & 15) | (high << 4)
    scale = weight_scale.float().transpose(1, 2).contiguous()
    return Prepared(codes.contiguous(), scale, columns, width, bits)


def expert_gemm(
    x: Tensor,
    weight: Tensor | Prepared,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As reference.expert_gemm for int8 x; `weight` may be Prepared."""
    if not isinstance(weight, Prepared):
        weight = prepare(weight, weight_scale, x.shape[1])
    x = x if x.stride(1) == 1 else x.contiguous()
    _, groups, _, features = weight.codes.shape
    out = torch.empty((x.shape[0], features), dtype=out_dtype or torch.bfloat16, device=x.device)
    mean = max(1, x.shape[0] // max(1, len(offsets) - 1))
    rows = min(64, max(16, triton.next_power_of_2(mean)))
    tiles = [
        (expert, low, end)
        for expert, (start, end) in enumerate(spans(offsets))
        for low in range(start, end, rows)
    ]
    if not tiles:
        return out
    table = torch.tensor(tiles, dtype=torch.int32, device=x.device)
    multiply[(len(tiles), triton.cdiv(features, FEATURES))](
        x, weight.codes, weight.scale, weight.scale if x_scale is None else x_scale.float(),
        table, out, x.stride(0), weight.columns, features,
        GROUPS=groups, WIDTH=weight.width, BITS=weight.bits, CHANNEL=weight.scale.shape[1] == 1,
        HAS_X_SCALE=x_scale is not None, ROWS=rows, N=FEATURES, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
