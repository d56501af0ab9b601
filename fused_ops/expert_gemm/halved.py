"""Experts' codes as Triton kernels read them: group by group, four-bit ones two in a byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fused_ops.expert_gemm.reference import weight_codes


@dataclass(frozen=True)
class Halved:
    """`codes` int8 [experts, groups, out, width / 2 or width]; `scale` float32 [experts, n, out].

    Of four-bit codes a group's first half of columns stands low in the bytes, its second half high.
    n is groups, or 1 where one scale covers the row and `groups` are only steps.
    """

    codes: Tensor
    scale: Tensor
    columns: int
    width: int
    bits: int


def halve(weight: Tensor, weight_scale: Tensor, columns: int, step: int) -> Halved:
    """Reorders weights once; arguments as of cpu.prepare, `step` columns where no group says."""
    bits, groups = (4 if weight.dtype == torch.int32 else 8), weight_scale.shape[2]
    width = columns // groups if groups > 1 else step
    codes = torch.stack([_one(expert, columns, width, bits) for expert in weight])
    scale = weight_scale.float().transpose(1, 2).contiguous()
    return Halved(codes, scale, columns, width, bits)


def _one(weight: Tensor, columns: int, width: int, bits: int) -> Tensor:
    """One expert at a time: all of them a code a byte would be twice what they are packed."""
    codes = weight_codes(weight, columns)
    codes = torch.nn.functional.pad(codes, (0, -columns % width)).unflatten(1, (-1, width))
    groups: Tensor = codes.transpose(0, 1)
    if bits == 4:
        low, high = groups.chunk(2, 2)
        groups = (low & 15) | (high << 4)
    return groups.contiguous()
