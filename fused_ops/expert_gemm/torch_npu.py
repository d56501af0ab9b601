"""The routed experts' product through torch_npu's npu_grouped_matmul on Atlas A2 and A3.

int4 weights: y = ((x - 8) . w x scale + bias) x x_scale (CANN's grouped_matmul), so the bias is 8 x
the sum of w x scale. int8 weights: scales that bfloat16 holds are used by the op, others are
applied here to its int32 sums, in float32. Never run on an NPU: checked against the schemas and
meta kernels of torch_npu 2.13.0 and run with CPU functions under its schemas.

There is no fused expert_swiglu: torch_npu's rounds to bfloat16 before the codes, this op does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.expert_gemm.reference import weight_codes
from fused_ops.npu_support import call, fractal
from fused_ops.op import UnsupportedOp

ONE_RESULT, ROW_GROUPS, COUNTS = 2, 0, 1  # split_item, group_type, group_list_type


@dataclass(frozen=True)
class Prepared:
    """Weights as the op reads them, FRACTAL_NZ.

    int4: `weight` int32 [experts, in, out / 8], two codes a byte, even output in the low nibble;
    `scale` int64 [experts, groups, out], float32 bits in the low half; `bias` float32
    [experts, out]. int8: `weight` int8 [experts, in, out]; `scale` [experts, out], bfloat16 where
    that holds it exactly and float32 otherwise; no bias.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def prepare(weight: Tensor, weight_scale: Tensor, columns: int) -> Prepared:
    """Reorders weights once; arguments as of cpu.prepare."""
    scale = weight_scale.float().transpose(1, 2).contiguous()  # [experts, groups, out]
    if weight.dtype != torch.int32:
        if scale.shape[1] != 1:
            raise UnsupportedOp("npu_grouped_matmul takes one scale a row of int8 weights")
        rounded = scale.squeeze(1).to(torch.bfloat16)
        exact = torch.equal(rounded.float(), scale.squeeze(1))
        codes = weight.transpose(1, 2).contiguous()
        return Prepared(fractal(codes), rounded if exact else scale.squeeze(1), None)
    if weight.shape[1] % 8:
        raise UnsupportedOp(f"npu_grouped_matmul: {weight.shape[1]} outputs are no multiple of 8")
    packed, biases = [], []
    for expert, factor in zip(weight, scale, strict=True):  # unpacked codes are the large thing
        codes = weight_codes(expert, columns)
        packed.append(pack_outputs(codes.T))
        sums = codes.T.double().unflatten(0, (factor.shape[0], -1)).sum(1)  # [groups, out]
        biases.append(8 * (sums * factor.double()).sum(0))
    bits = scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return Prepared(
        weight=fractal(torch.stack(packed)).view(torch.int32),
        scale=bits,
        bias=torch.stack(biases).float(),
    )


def pack_outputs(codes: Tensor) -> Tensor:
    """Packs codes [in, out] in -8 .. 7 two a byte along out, the even one in the low nibble."""
    return ((codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)).contiguous()


def expert_gemm(
    x: Tensor,
    weight: Tensor | Prepared,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As reference.expert_gemm for int8 x; `weight` may be Prepared. Out is bfloat16.

    Raises UnsupportedOp for other outputs and for what npu_grouped_matmul does not take.
    """
    if out_dtype not in (None, torch.bfloat16):
        raise UnsupportedOp(f"npu_grouped_matmul gives no {out_dtype} from codes")
    if not isinstance(weight, Prepared):
        if weight_scale is None:
            raise UnsupportedOp("npu_grouped_matmul is used with quantized weights only")
        weight = prepare(weight, weight_scale, x.shape[1])
    if x.shape[0] == 0:
        return x.new_empty((0, weight.scale.shape[-1]), dtype=torch.bfloat16)
    if x_scale is None:
        x_scale = x.new_ones((x.shape[0],), dtype=torch.float32)
    x_scale = x_scale.float().contiguous()
    by_op = weight.scale.dtype != torch.float32
    sums = _multiply(x.contiguous(), weight, offsets, x_scale if by_op else None)
    if by_op:
        return sums
    return (sums * _row_scales(weight.scale, offsets, x.shape[0]) * x_scale.unsqueeze(1)).to(
        torch.bfloat16
    )


def _multiply(x: Tensor, weight: Prepared, offsets: Tensor, x_scale: Tensor | None) -> Tensor:
    """bfloat16 [rows, out] with `x_scale`; without, the int32 sums."""
    scales: dict[str, Any] = {"output_dtype": torch.int32}
    if x_scale is not None:
        scales = {
            "scale": [weight.scale],
            "per_token_scale": [x_scale],
            "output_dtype": torch.bfloat16,
        }
    if weight.bias is not None:
        scales["bias"] = [weight.bias]
    results: list[Tensor] = call(
        "npu_grouped_matmul",
        x=[x],
        weight=[weight.weight],
        group_list=offsets.diff().to(x.device, torch.int64),
        split_item=ONE_RESULT,
        group_type=ROW_GROUPS,
        group_list_type=COUNTS,
        act_type=0,
        **scales,
    )
    return results[0]


def _row_scales(scale: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """float32 [rows, out]: each row's expert's scales."""
    row = torch.arange(rows, device=scale.device)
    return scale[torch.searchsorted(offsets[1:].to(scale.device), row, right=True)]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.quantize_rows to int8, by npu_dynamic_quant, for bfloat16 and float16 x."""
    codes, scale = call("npu_dynamic_quant", input=x)
    zero = scale == 0  # a row of zeros: scale 1 here, 0 there
    return codes.masked_fill(zero.unsqueeze(-1), 0), scale.masked_fill(zero, 1.0)
