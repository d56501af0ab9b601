"""What the routed experts' products take, cost and may err, and who implements them.

expert_gemm: y[r] = x_scale[r] x sum over groups g of weight_scale[o, g] x (sum over g of x w).

| argument     | shape                                  | dtype                                    |
|--------------|----------------------------------------|------------------------------------------|
| x            | [rows, in], sorted by expert           | f32, bf16; codes int8 or fp8 (e4m3)      |
| weight       | [experts, out, in]                     | as x; codes int8                         |
|              | [experts, out, ceil(in / 8)]           | int32, four-bit codes of quant.pack_int4 |
| offsets      | [experts + 1], bounds of the rows      | int; an expert may own none              |
| x_scale      | [rows]                                 | f32, with codes                          |
| weight_scale | [experts, out, groups]                 | f32, with codes; one group is per channel|

The sum of a group is exact (int32) for int8 x, and scales are applied in float32 after it; nothing
is rounded between. Output in `out_dtype`, bfloat16 for codes by default.

expert_swiglu: the same product with out = 2 x inner, rows 0 .. inner - 1 of `weight` the gate and
the rest up (transformers' gate_up_proj); returns silu(gate) x up as int8 or fp8 codes of x's dtype
with one float32 scale a row.

The feature "float32_out" of a request says that a product of codes is wanted in float32.

dtype names: "int4+int8" is four-bit weights and int8 activations; "bf16" is no quantization.
`group` in a shape is the columns a scale covers, 0 for the whole row (per channel).
"""

from __future__ import annotations

from collections.abc import Mapping

from fused_ops import npu_limits
from fused_ops.op import Cost, Implementation, Limit, Op

WEIGHT_BITS = {"f32": 32, "bf16": 16, "int4+int8": 4, "int4+fp8": 4, "int8+int8": 8, "int8+fp8": 8}
QUANTIZED = frozenset({"int4+int8", "int4+fp8", "int8+int8", "int8+fp8"})
COMPILED = frozenset({"int4+int8", "int8+int8"})
ROUTED = frozenset({"ragged", "empty", "noncontiguous"})
FEATURES = ROUTED | {"float32_out"}
LIMITS = {"in": Limit(1, 65536), "out": Limit(1), "experts": Limit(1)}


def _weight_bytes(shape: Mapping[str, int], dtype: str) -> int:
    """Bytes of the experts that own rows; scales counted as float32."""
    groups = shape["in"] // shape["group"] if shape.get("group") else 1
    scales = shape["out"] * groups * 4 if dtype in QUANTIZED else 0
    one = shape["out"] * shape["in"] * WEIGHT_BITS[dtype] // 8 + scales
    return min(shape.get("active", shape["experts"]), shape["rows"]) * one


def _x_bytes(shape: Mapping[str, int], dtype: str) -> int:
    codes = dtype in QUANTIZED
    return shape["rows"] * (shape["in"] + 4 if codes else shape["in"] * WEIGHT_BITS[dtype] // 8)


def cost(shape: Mapping[str, int], dtype: str) -> Cost:
    """`shape`: experts (`active` of them own rows), rows, in, out, group. Output two bytes each."""
    return Cost(
        flop=2 * shape["rows"] * shape["in"] * shape["out"],
        bytes=_weight_bytes(shape, dtype)
        + _x_bytes(shape, dtype)
        + 2 * shape["rows"] * shape["out"],
    )


def swiglu_cost(shape: Mapping[str, int], dtype: str) -> Cost:
    """As cost; the result is out / 2 codes and a scale a row."""
    return Cost(
        flop=2 * shape["rows"] * shape["in"] * shape["out"],
        bytes=_weight_bytes(shape, dtype)
        + _x_bytes(shape, dtype)
        + shape["rows"] * (shape["out"] // 2 + 4),
    )


def _compiled(function: str, isa: str) -> Implementation:
    return Implementation(
        name=f"cpp-{isa}",
        entry=f"fused_ops.expert_gemm.cpu:{function}_{isa}",
        prepare=f"fused_ops.expert_gemm.cpu:prepare_{isa}",
        kinds=frozenset({"cpu"}),
        dtypes=COMPILED,
        features=FEATURES,
        limits={"group": Limit(0, multiple=8)},
        available=f"fused_ops.build:unavailable:{isa}",
    )


def _fused(name: str, dtype: str, limits: dict[str, Limit]) -> Implementation:
    return Implementation(
        name=name,
        entry="fused_ops.expert_gemm.torch_npu:expert_gemm",
        kinds=frozenset({"ascend"}),
        dtypes=frozenset({dtype}),
        features=ROUTED,
        limits={"experts": npu_limits.EXPERTS} | limits,
        prepare="fused_ops.expert_gemm.torch_npu:prepare",
        allows="fused_ops.npu_limits:int4_group",
        available="fused_ops.npu_support:unavailable:npu_grouped_matmul",
    )


def _triton(function: str) -> Implementation:
    return Implementation(
        name="triton",
        entry=f"fused_ops.expert_gemm.triton_launch:{function}",
        kinds=frozenset({"cuda"}),
        dtypes=QUANTIZED,
        features=FEATURES,
        limits={"group": Limit(0, multiple=64)},  # a half is a dot's 32 columns at least
        prepare="fused_ops.expert_gemm.triton_launch:prepare",
        available="fused_ops.triton_support:unavailable",
        tuned={"tiles": "expert_gemm"},
    )


def _eager(function: str, dtypes: frozenset[str]) -> Implementation:
    return Implementation(
        name="eager",
        entry=f"fused_ops.expert_gemm.reference:{function}",
        kinds=frozenset({"cpu", "cuda", "ascend"}),
        dtypes=dtypes,
        features=FEATURES,
    )


ISAS = ("avx512", "avx2", "portable")

OP = Op(
    name="expert_gemm",
    summary="matrix product of the routed experts, W4A8 and W8A8",
    reference="fused_ops.expert_gemm.reference:expert_gemm",
    cost="fused_ops.expert_gemm.contract:cost",
    cases="fused_ops.expert_gemm.cases",
    limits=LIMITS,
    features=FEATURES,
    # Against torch in float32 on dequantized codes, rounded to the output dtype.
    error_multiple={
        "f32": 4.0, "bf16": 1.5, **dict.fromkeys(sorted(QUANTIZED), 1.5)
    },
    implementations=(
        _fused(
            "torch_npu",
            "int4+int8",
            {"in": npu_limits.INT4_COLUMNS, "out": npu_limits.INT4_OUT},
        ),
        _fused(
            "torch_npu-int8",
            "int8+int8",
            {"in": npu_limits.INNER, "out": npu_limits.INNER, "group": Limit(0, 0)},
        ),
        *(_compiled("expert_gemm", isa) for isa in ISAS),
        _triton("expert_gemm"),
        Implementation(
            name="triton-ascend",
            entry="fused_ops.expert_gemm.triton_ascend:expert_gemm",
            kinds=frozenset({"ascend"}),
            dtypes=COMPILED,
            features=FEATURES,
            limits={"group": Limit(0, multiple=32)},
            prepare="fused_ops.expert_gemm.triton_ascend:prepare",
            available="fused_ops.triton_ascend:unavailable",
        ),
        _eager("expert_gemm", frozenset(WEIGHT_BITS)),
    ),
)  # fmt: skip

SWIGLU = Op(
    name="expert_swiglu",
    summary="gate and up product, SwiGLU and requantization in one",
    reference="fused_ops.expert_gemm.reference:expert_swiglu",
    cost="fused_ops.expert_gemm.contract:swiglu_cost",
    cases="fused_ops.expert_gemm.swiglu_cases",
    limits=LIMITS | {"out": Limit(2, multiple=2)},
    features=ROUTED,
    error_multiple=dict.fromkeys(sorted(QUANTIZED), 1.5),
    implementations=(
        *(_compiled("expert_swiglu", isa) for isa in ISAS),
        _triton("expert_swiglu"),
        _eager("expert_swiglu", QUANTIZED),
    ),
)
