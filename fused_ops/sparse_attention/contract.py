"""What Sparse Flash Attention takes, costs and may err, and who implements it.

| argument    | shape                                       | dtype                            |
|-------------|---------------------------------------------|----------------------------------|
| query       | [tokens, heads, dim], W_UK absorbed         | f32, bf16                        |
| latent      | [keys, dim], or [pages, page, dim]          | as query                         |
|             | or [keys, 656], [pages, page, 656]          | uint8 rows, `kv_format` says how |
| indices     | [tokens, selected], positions in a sequence | int32; < 0 or past the end: none |
| offsets     | [sequences + 1], bounds of the queries      | int                              |
| key_offsets | [sequences + 1], bounds of the keys         | int; default: offsets            |
| page_table  | [sequences, pages a sequence]               | int32; -1 where unused           |

One key head serves every query head; its first `value_dim` features are the value. Softmax and sums
in float32; out in the query's dtype with float32 log-sum-exp. Nothing selected: zeros and -inf. An
index may come twice and then counts twice; causality is the indexer's. The feature "lse" of a
request says that the log-sum-exp is read; without it an implementation may return None there. Of a
chosen row that holds a NaN, or logits that overflow float32, only the output is defined: NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fused_ops import npu_limits
from fused_ops.op import Cost, Implementation, Limit, Op, OpRequest

KvFormat = Literal["plain", "fp8_656", "int8_656"]

LATENT_DIM, ROPE_DIM, TILE = 512, 64, 128  # GLM-5: 512 latent features in 4 tiles, 64 rotated
ROW_BYTES = LATENT_DIM + 4 * (LATENT_DIM // TILE) + 2 * ROPE_DIM  # 656
KV_FORMATS: dict[str, KvFormat] = {
    "f32": "plain",
    "bf16": "plain",
    "fp8": "fp8_656",
    "int8": "int8_656",
}
FEATURES = frozenset({"ragged", "paged", "decode", "noncontiguous", "lse"})
LIMITS = {"heads": Limit(1, 128), "dim": Limit(1, 1024), "value_dim": Limit(1, 1024)}


def row_bytes(dim: int, dtype: str) -> int:
    """Returns the bytes of one token's cache row."""
    return {"f32": 4 * dim, "bf16": 2 * dim}.get(dtype, ROW_BYTES)


def cost(shape: Mapping[str, int], dtype: str) -> Cost:
    """`shape`: tokens, heads, dim, value_dim, selected, and keys in all (rows there are to read).

    bytes: query, output, log-sum-exp and indices once, and each cache row that can be needed once.
    """
    tokens, heads, selected = shape["tokens"], shape["heads"], shape["selected"]
    dim, value_dim = shape["dim"], shape["value_dim"]
    element = 4 if dtype == "f32" else 2
    per_query = heads * ((dim + value_dim) * element + 4) + 4 * selected
    rows = min(shape["keys"], tokens * selected)
    return Cost(
        flop=2 * tokens * heads * selected * (dim + value_dim),
        bytes=tokens * per_query + rows * row_bytes(dim, dtype),
    )


def unpadded(request: OpRequest) -> str | None:
    """Returns why rows of `request` would be padded, or None.

    On Ascend a gather reads the columns that its mask leaves out too, past the end of the cache.
    """
    value, rest = request.shape["value_dim"], request.shape["dim"] - request.shape["value_dim"]
    for name, size in (("value_dim", value), ("dim - value_dim", rest)):
        if size and (size < 16 or size & (size - 1)):
            return f"{name} {size} is no power of two from 16 on"
    return None


def _compiled(isa: str, dtypes: frozenset[str]) -> Implementation:
    return Implementation(
        name=f"cpp-{isa}",
        entry=f"fused_ops.sparse_attention.cpu:sparse_attention_{isa}",
        kinds=frozenset({"cpu"}),
        dtypes=dtypes,
        features=FEATURES,
        available=f"fused_ops.build:unavailable:{isa}",
    )


def _fused(name: str, dtype: str, op: str, features: frozenset[str]) -> Implementation:
    return Implementation(
        name=name,
        entry="fused_ops.sparse_attention.torch_npu:sparse_attention",
        kinds=frozenset({"ascend"}),
        dtypes=frozenset({dtype}),
        features=features,
        limits={
            "dim": npu_limits.QUERY_DIM,
            "value_dim": npu_limits.VALUE_DIM,
            "page": npu_limits.PAGE,
        },
        allows="fused_ops.npu_limits:sparse_attention",
        available=f"fused_ops.npu_support:unavailable:{op}",
    )


OP = Op(
    name="sparse_attention",
    summary="MLA over the tokens the indexer chose",
    reference="fused_ops.sparse_attention.reference:sparse_attention",
    cost="fused_ops.sparse_attention.contract:cost",
    cases="fused_ops.sparse_attention.cases",
    limits=LIMITS,
    features=FEATURES,
    # Against torch in the query's dtype (bfloat16 products and softmax weights, float32 sums).
    error_multiple={"f32": 4.0, "bf16": 1.5, "fp8": 1.5, "int8": 1.5},
    implementations=(
        _fused("torch_npu", "bf16", "npu_sparse_flash_attention", FEATURES),
        _fused("torch_npu-int8", "int8", "npu_kv_quant_sparse_flash_attention", FEATURES - {"lse"}),
        _compiled("avx512bf16", frozenset({"bf16", "fp8", "int8"})),  # rounds rows to bfloat16
        *(_compiled(isa, frozenset(KV_FORMATS)) for isa in ("avx512", "avx2", "portable")),
        Implementation(
            name="gluon",
            entry="fused_ops.sparse_attention.gluon_launch:sparse_attention",
            kinds=frozenset({"cuda"}),
            dtypes=frozenset({"bf16", "fp8"}),
            features=FEATURES,
            limits={"dim": Limit(576, 576), "value_dim": Limit(512, 512)},
            available="fused_ops.triton_support:no_gluon",
            targets=frozenset({"h200", "h20"}),  # sm_90
            tuned={"tiles": "sparse_attention-gluon", "portable_tiles": "sparse_attention"},
        ),
        Implementation(
            name="triton",
            entry="fused_ops.sparse_attention.triton_launch:sparse_attention",
            kinds=frozenset({"cuda"}),
            dtypes=frozenset(KV_FORMATS),
            features=FEATURES,
            available="fused_ops.triton_support:unavailable",
            tuned={"tiles": "sparse_attention"},
        ),
        Implementation(
            name="triton-ascend",
            entry="fused_ops.sparse_attention.triton_ascend:sparse_attention",
            kinds=frozenset({"ascend"}),
            dtypes=frozenset({"bf16"}),  # its frontend takes no pointer casts: no rows of bytes
            features=FEATURES,
            limits={"dim": Limit(1, 576), "value_dim": Limit(1, 512)},  # what UB was seen to hold
            allows="fused_ops.sparse_attention.contract:unpadded",
            available="fused_ops.triton_ascend:unavailable",
        ),
        Implementation(
            name="eager",
            entry="fused_ops.sparse_attention.reference:sparse_attention",
            kinds=frozenset({"cpu", "cuda", "ascend"}),
            dtypes=frozenset(KV_FORMATS),
            features=FEATURES,
        ),
    ),
)
