"""The matrices of expert_gemm and expert_swiglu: dtype x group x rows x empty experts x primes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops.expert_gemm.contract import OP, QUANTIZED
from fused_ops.expert_gemm.reference import quantize_rows, weight_codes
from fused_ops.op import OpRequest
from fused_ops.testkit import Case, Inputs, Verdict, bounds, compare, generator, strided
from glm5q.quant import FP8, pack_int4

FLOOR = 3e-7  # float32 sums of the groups, where the output is float32


@dataclass(frozen=True)
class Spec:
    """`rows` an expert, `group` 0 for per channel, `extreme` codes at the ends of their range."""

    dtype: str
    rows: tuple[int, ...]
    columns: int
    out: int
    group: int = 128
    float32_out: bool = False
    noncontiguous: bool = False
    extreme: bool = False

    @property
    def name(self) -> str:
        parts = [self.dtype, "r" + "_".join(map(str, self.rows)), f"{self.out}x{self.columns}"]
        parts += [f"g{self.group}"] if self.dtype in QUANTIZED and self.group else []
        flags = ("float32_out", "noncontiguous", "extreme")
        return "-".join(parts + [flag for flag in flags if getattr(self, flag)])

    @property
    def features(self) -> frozenset[str]:
        found = {"ragged"} if len(set(self.rows)) > 1 else set()
        found |= {"empty"} if 0 in self.rows else set()
        found |= {"noncontiguous"} if self.noncontiguous else set()
        found |= {"float32_out"} if self.float32_out else set()
        return frozenset(found)

    def request(self, op: str) -> OpRequest:
        shape = {
            "experts": len(self.rows),
            "active": sum(rows > 0 for rows in self.rows),
            "rows": sum(self.rows),
            "in": self.columns,
            "out": self.out,
            "group": self.group if self.dtype in QUANTIZED else 0,
        }
        return OpRequest(op, self.dtype, shape, self.features)


def specs() -> list[Spec]:
    found = []
    for dtype in sorted(QUANTIZED):
        found += [
            Spec(dtype, (1,), 384, 96),
            Spec(dtype, (5, 0, 17, 1, 0), 256, 54),
            Spec(dtype, (5, 0, 17, 1, 0), 384, 54, float32_out=True),
            Spec(dtype, (3, 7), 67, 53, group=0, float32_out=True),  # primes, per channel
            Spec(dtype, (2, 0, 131), 1024, 38, group=0, noncontiguous=True),
            Spec(dtype, (4, 3), 512, 34, group=32, extreme=True, float32_out=True),
            Spec(dtype, (9,), 6144, 32, group=0, extreme=True, float32_out=True),
            Spec(dtype, (0, 0), 256, 32),
            Spec(dtype, (5, 0, 17, 1, 0), 512, 56, group=256),
            Spec(dtype, (3, 9), 768, 40, group=0, noncontiguous=True),
            Spec(dtype, (9, 2), 6144, 32, group=0, extreme=True),
        ]
    for dtype in ("f32", "bf16"):
        found += [
            Spec(dtype, (5, 0, 17, 1), 67, 53),
            Spec(dtype, (9, 9), 256, 64, noncontiguous=True),
        ]
    return found


def cases() -> list[Case]:
    return [
        Case(spec.name, spec.request("expert_gemm"), partial(build, spec), partial(_judge, spec))
        for spec in specs()
    ]


def build(spec: Spec) -> Inputs:
    source = generator(spec.name)
    x = torch.randn((sum(spec.rows), spec.columns), generator=source)
    experts = len(spec.rows)
    offsets = bounds(spec.rows)
    if spec.dtype not in QUANTIZED:
        dtype = torch.float32 if spec.dtype == "f32" else torch.bfloat16
        weight = torch.randn((experts, spec.out, spec.columns), generator=source).to(dtype)
        x = x.to(dtype)
        return Inputs((strided(x) if spec.noncontiguous else x, weight, offsets))
    low, high = (-8, 7) if spec.dtype.startswith("int4") else (-127, 127)
    codes = torch.randint(low, high + 1, (experts, spec.out, spec.columns), generator=source)
    x_codes, x_scale = quantize_rows(x, torch.int8 if spec.dtype.endswith("int8") else FP8)
    if spec.extreme:
        codes = torch.where(codes < 0, low, high)
        codes[:, ::3] = low
        x_codes = torch.where(x < 0, -1.0, 1.0).to(x_codes.dtype)
        x_codes = (x_codes.float() * (127 if spec.dtype.endswith("int8") else 448)).to(
            x_codes.dtype
        )
        x_codes[::2] = x_codes[::2].float().abs().to(x_codes.dtype)
    groups = spec.columns // spec.group if spec.group else 1
    scale = torch.rand((experts, spec.out, groups), generator=source) * 0.02 + 1e-3
    weight = codes.to(torch.int8)
    if low == -8:
        weight = pack_int4(weight)
    kwargs: dict[str, Any] = {"x_scale": x_scale, "weight_scale": scale}
    if spec.float32_out:
        kwargs["out_dtype"] = torch.float32
    return Inputs((strided(x_codes) if spec.noncontiguous else x_codes, weight, offsets), kwargs)


def product(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """[rows, out] in `dtype` from dequantized codes, one expert at a time."""
    x, weight, offsets = inputs.args
    scale = inputs.kwargs.get("weight_scale")
    x_scale = inputs.kwargs.get("x_scale")
    values = x.to(dtype) if x_scale is None else x.to(dtype) * x_scale.to(dtype).unsqueeze(1)
    result = torch.zeros((x.shape[0], weight.shape[1]), dtype=dtype)
    for expert in range(weight.shape[0]):
        rows = slice(int(offsets[expert]), int(offsets[expert + 1]))
        matrix = weight[expert].to(dtype)
        if scale is not None:
            codes = weight_codes(weight[expert], x.shape[1]).to(dtype)
            grouped = codes.unflatten(1, (scale.shape[2], -1))
            matrix = (grouped * scale[expert].to(dtype).unsqueeze(-1)).flatten(1)
        result[rows] = values[rows] @ matrix.T
    return result


def _judge(spec: Spec, inputs: Inputs, result: Tensor) -> Verdict:
    out_dtype = torch.float32 if spec.float32_out or spec.dtype == "f32" else torch.bfloat16
    middle = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    truth, plain = product(inputs, torch.float64), product(inputs, middle).to(out_dtype)
    return compare(result, truth, plain, out_dtype, OP.error_multiple[spec.dtype], FLOOR)


def timed_case(request: OpRequest) -> Case:
    """Rows spread evenly over the experts, any size, for timing; judged on a few of an expert's."""
    shape = request.shape
    share = shape["rows"] // shape["experts"]
    rest = shape["rows"] - share * shape["experts"]
    rows = tuple(share + (expert < rest) for expert in range(shape["experts"]))
    spec = Spec(request.dtype, rows, shape["in"], shape["out"], shape["group"])
    return Case(spec.name, request, partial(build, spec), partial(_judge_sample, spec))


def _judge_sample(spec: Spec, inputs: Inputs, result: Tensor) -> Verdict:
    """The first expert's first, middle and last row."""
    x, weight, _ = inputs.args
    rows = sorted({0, spec.rows[0] // 2, spec.rows[0] - 1})
    kwargs = dict(inputs.kwargs)
    if "x_scale" in kwargs:
        kwargs |= {"x_scale": kwargs["x_scale"][rows], "weight_scale": kwargs["weight_scale"][:1]}
    few = Inputs((x[rows], weight[:1], bounds((len(rows),))), kwargs)
    return _judge(replace(spec, rows=(len(rows),)), few, result[rows])
