"""The definition of the routed experts' matrix product in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_ops.paging import spans
from glm5q.quant import FP8, FP8_MAX, unpack_int4


def expert_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns [rows, out]: rows of x times the transposed weight of the expert that owns them.

    `x` [rows, in] is sorted by expert, `weight` [experts, out, in], `offsets` [experts + 1] bounds
    each expert's rows; an expert may own none. With codes, `x_scale` [rows] and `weight_scale`
    [experts, out, groups] multiply each group's sum in float32 after it is taken (contract.py).
    """
    if weight_scale is None:
        return _plain(x, weight, offsets, out_dtype or x.dtype)
    output = torch.empty((x.shape[0], weight.shape[1]), dtype=torch.float32, device=x.device)
    for expert, (start, end) in enumerate(spans(offsets)):
        if end > start:
            codes = weight_codes(weight[expert], x.shape[1])
            output[start:end] = _scaled_product(x[start:end], codes, weight_scale[expert])
    if x_scale is not None:
        output *= x_scale.float().unsqueeze(1)
    return output.to(out_dtype or torch.bfloat16)


def expert_swiglu(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    x_scale: Tensor,
    weight_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns (codes [rows, inner] as x's dtype, float32 scales [rows]) of silu(gate) x up.

    `weight` [experts, 2 x inner, in]: gate rows, then up rows. All before the codes in float32.
    """
    both = expert_gemm(
        x, weight, offsets, x_scale=x_scale, weight_scale=weight_scale, out_dtype=torch.float32
    )
    gate, up = both.chunk(2, dim=-1)
    return quantize_rows(torch.nn.functional.silu(gate) * up, x.dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (codes [rows, features], float32 scales [rows]): quant.quantize_activation in halves.

    int8: absmax / 127, round to even. e4m3: absmax / 448. A row of zeros has scale 1.
    """
    values = x.float()
    reach = 127.0 if dtype == torch.int8 else FP8_MAX
    absmax = values.abs().amax(-1)
    scale = torch.where(absmax > 0, absmax / reach, torch.ones_like(absmax))
    scaled = values / scale.unsqueeze(-1)
    if dtype == torch.int8:
        return scaled.round().to(torch.int8), scale
    return scaled.clamp(-reach, reach).to(FP8), scale


def weight_codes(weight: Tensor, columns: int) -> Tensor:
    """Returns int8 codes [..., out, in]: unpacked from int32 words, or as given."""
    return unpack_int4(weight, columns) if weight.dtype == torch.int32 else weight


def _grouped(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether torch has one kernel for all experts' products: bfloat16 rows of 16 bytes on CUDA."""
    half = x.dtype == weight.dtype == out_dtype == torch.bfloat16
    aligned = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0
    return x.is_cuda and half and aligned and hasattr(torch, "_grouped_mm")


def _plain(x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    if _grouped(x, weight, out_dtype):
        ends = offsets[1:].to(device=x.device, dtype=torch.int32)
        return torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    output = torch.empty((x.shape[0], weight.shape[1]), dtype=out_dtype, device=x.device)
    for expert, (start, end) in enumerate(spans(offsets)):
        if end > start:
            output[start:end] = x[start:end] @ weight[expert].T
    return output


def _scaled_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [rows, out]; float64 holds every group's sum of integer products exactly."""
    groups = scale.shape[1]
    left = x.to(torch.float32).double().unflatten(1, (groups, -1)).transpose(0, 1)
    right = codes.double().unflatten(1, (groups, -1)).transpose(0, 1)
    sums = torch.bmm(left, right.transpose(1, 2)).float()  # [groups, rows, out]
    return (sums * scale.float().T.unsqueeze(1)).sum(0)
