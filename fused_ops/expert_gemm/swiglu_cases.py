"""The matrix of expert_swiglu, on expert_gemm's inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from fused_ops.expert_gemm import cases as gemm
from fused_ops.expert_gemm.contract import QUANTIZED, SWIGLU
from fused_ops.expert_gemm.reference import quantize_rows
from fused_ops.testkit import Case, Inputs, Verdict, compare, worst, wrong_form

SCALE_FLOOR = 1e-5
CODES_APART = 0.01  # share of codes that may fall on the other side of a rounding


def cases() -> list[Case]:
    return [
        Case(
            spec.name,
            replace(spec, float32_out=False).request("expert_swiglu"),
            partial(build, spec),
            partial(_judge, spec),
        )
        for spec in gemm.specs()
        if spec.dtype in QUANTIZED and spec.out % 2 == 0
    ]


def build(spec: gemm.Spec) -> Inputs:
    inputs = gemm.build(replace(spec, float32_out=False))
    x, weight, offsets = inputs.args
    x_scale = inputs.kwargs["x_scale"] / 8
    if x_scale.numel() > 3:
        x_scale[3] = 0  # a row of zeros: scale 1, codes 0
    return Inputs((x, weight, offsets), {**inputs.kwargs, "x_scale": x_scale})


def _judge(spec: gemm.Spec, inputs: Inputs, result: tuple[Tensor, Tensor]) -> Verdict:
    if not isinstance(result, tuple) or len(result) != 2:
        return Verdict(float("inf"), 0.0, "did not return (codes, scale)")
    gate, up = gemm.product(inputs, torch.float64).chunk(2, dim=-1)
    truth = silu(gate) * up
    codes, scale = quantize_rows(truth, inputs.args[0].dtype)
    for part, like in ((result[0], codes), (result[1], scale)):
        if problem := wrong_form(part, like.shape, like.dtype):
            return Verdict(float("inf"), 0.0, problem)
    apart = (result[0].float() != codes.float()).float()
    if apart.numel() and float(apart.mean()) > CODES_APART:
        return Verdict(float("inf"), 0.0, f"{float(apart.mean()):.1%} of codes differ")
    ours = result[0].double() * result[1].double().unsqueeze(1)
    plain = codes.double() * scale.double().unsqueeze(1)
    multiple = SWIGLU.error_multiple[spec.dtype]
    return worst(
        [
            compare(ours, truth, plain, torch.float64, multiple, SCALE_FLOOR),
            compare(result[1].unsqueeze(1), scale.double().unsqueeze(1), scale.unsqueeze(1),
                    torch.float32, multiple, SCALE_FLOOR),
        ]
    )  # fmt: skip
