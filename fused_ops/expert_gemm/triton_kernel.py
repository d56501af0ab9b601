"""Routed experts' product in portable Triton: a program is some rows of one expert, some features.

Four-bit codes stand two in a signed byte, a group's first half of columns low and its second half
high, so that unpacking is two arithmetic shifts and two dots, with nothing interleaved.
"""
# mypy: ignore-errors
# ruff: noqa: N803, N806
# Kernels are Triton's language, constants in capitals, and triton is not always installed.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fused_ops.expert_gemm.reference import weight_codes
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


@triton.jit
def multiply(
    x, codes, scale, x_scale, tiles, out, x_row, columns, features,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr,
    HAS_X_SCALE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """ROWS x N outputs of one expert; a group's sum is int32, scaled in float32 after it."""
    tile = tiles + tl.program_id(0) * 3
    expert, end = tl.load(tile).to(tl.int64), tl.load(tile + 2)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    feature = tl.program_id(1) * N + tl.arange(0, N)
    row_in, feature_in = row < end, feature < features
    STEP: tl.constexpr = WIDTH // 2 if BITS == 4 else WIDTH
    column = tl.arange(0, STEP)
    at = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
    weights = codes + expert * GROUPS * STEP * features
    weights += column[:, None] * features + feature[None, :]
    whole = tl.zeros((ROWS, N), tl.int32)
    total = tl.zeros((ROWS, N), tl.float32)
    for group in range(0, GROUPS):
        base = group * WIDTH
        near = row_in[:, None] & (base + column < columns)[None, :]
        first = tl.load(at + base, mask=near, other=0)
        packed = tl.load(weights, mask=feature_in[None, :], other=0)
        if BITS == 4:
            far = row_in[:, None] & (base + STEP + column < columns)[None, :]
            second = tl.load(at + base + STEP, mask=far, other=0)
            sums = tl.dot(first, (packed << 4) >> 4, out_dtype=tl.int32)
            sums += tl.dot(second, packed >> 4, out_dtype=tl.int32)
        else:
            sums = tl.dot(first, packed, out_dtype=tl.int32)
        if CHANNEL:
            whole += sums
        else:
            factor = tl.load(
                scale + (expert * GROUPS + group) * features + feature, mask=feature_in, other=0.0
            )
            total += sums.to(tl.float32) * factor[None, :]
        weights += STEP * features
    if CHANNEL:
        factor = tl.load(scale + expert * features + feature, mask=feature_in, other=0.0)
        total = whole.to(tl.float32) * factor[None, :]
    if HAS_X_SCALE:
        total = total * tl.load(x_scale + row, mask=row_in, other=0.0)[:, None]
    place = out + row.to(tl.int64)[:, None] * features + feature[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=row_in[:, None] & feature_in[None, :])


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
