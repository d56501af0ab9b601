"""What the Lightning Indexer takes, costs and may err, and who implements it.

| argument     | shape                                   | dtype                        |
|--------------|-----------------------------------------|------------------------------|
| query        | [tokens, heads, dim]                    | f32, bf16, fp8 (e4m3), int8  |
| key          | [keys, dim], or [pages, page, dim]      | as query                     |
| head_weights | [tokens, heads]                         | f32, bf16                    |
| offsets      | [sequences + 1], bounds of the queries  | int                          |
| query_scale  | [tokens, heads], one a head vector      | f32; fp8 and int8 only       |
| key_scale    | [keys] or [pages, page], one a key      | f32; fp8 and int8 only       |
| key_offsets  | [sequences + 1], bounds of the keys     | int; default: offsets        |
| page_table   | [sequences, pages a sequence]           | int32; -1 where unused       |

score(q, k) = key_scale x sum over heads of (weight x query_scale) x ReLU(query . key), summed in
float32. A sequence's queries are its last positions (right-aligned causal), so one query a sequence
is decode, several are multi-token prediction or a prefill chunk. The result, int32 [tokens, topk],
holds positions within the sequence, ascending, -1 after the last; equal scores go to the lowest, a
score of -inf is never chosen, and what becomes of NaN scores is not defined.
"""

from __future__ import annotations

from collections.abc import Mapping

from fused_ops.npu_limits import INDEX_DIM, INDEX_HEADS, PAGE, QUANT_INDEX_COUNT
from fused_ops.op import Cost, Implementation, Limit, Op, OpRequest

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = {"f32": 0, "bf16": 0, "fp8": 4, "int8": 4}
DTYPES = frozenset(ELEMENT_BYTES)
FEATURES = frozenset({"ragged", "paged", "decode", "noncontiguous"})
LIMITS = {"heads": Limit(1, 64), "dim": Limit(1, 256), "topk": Limit(1, 4096)}


def pairs(tokens: int, keys: int) -> int:
    """Returns the query-key pairs of one sequence whose `tokens` queries end at its last key."""
    return tokens * (keys - tokens) + tokens * (tokens + 1) // 2


def cost(shape: Mapping[str, int], dtype: str) -> Cost:
    """`shape`: sequences of `tokens` queries and `keys` keys each, heads, dim, topk.

    bytes: queries, weights, keys and their scales once, indices out; never the scores.
    """
    sequences, tokens, keys = shape.get("sequences", 1), shape["tokens"], shape["keys"]
    heads, dim, size = shape["heads"], shape["dim"], ELEMENT_BYTES[dtype]
    per_query = heads * (dim * size + SCALE_BYTES[dtype] + 4) + 4 * shape["topk"]
    per_key = dim * size + SCALE_BYTES[dtype]
    return Cost(
        flop=sequences * pairs(tokens, keys) * heads * 2 * dim,
        bytes=sequences * (tokens * per_query + keys * per_key),
    )


def topk_cost(shape: Mapping[str, int], dtype: str) -> Cost:
    """`shape`: rows, keys, topk. Scores read once, indices written once; comparisons uncounted."""
    return Cost(
        flop=0, bytes=shape["rows"] * (shape["keys"] * ELEMENT_BYTES[dtype] + 4 * shape["topk"])
    )


def unpadded(request: OpRequest) -> str | None:
    """Returns why vectors of `request` would be padded, or None.

    On Ascend a gather reads the columns that its mask leaves out too, past the end of the cache.
    """
    dim = request.shape["dim"]
    return f"dim {dim} is no power of two from 16 on" if dim < 16 or dim & (dim - 1) else None


def _compiled(isa: str) -> Implementation:
    return Implementation(
        name=f"cpp-{isa}",
        entry=f"fused_ops.lightning_indexer.cpu:lightning_indexer_{isa}",
        kinds=frozenset({"cpu"}),
        dtypes=DTYPES,
        features=FEATURES,
        available=f"fused_ops.build:unavailable:{isa}",
    )


def _compiled_topk(isa: str) -> Implementation:
    return Implementation(
        name=f"cpp-{isa}",
        entry=f"fused_ops.lightning_indexer.cpu:select_topk_{isa}",
        kinds=frozenset({"cpu"}),
        dtypes=frozenset({"f32"}),
        features=frozenset({"noncontiguous"}),
        available=f"fused_ops.build:unavailable:{isa}",
    )


def _fused(name: str, dtype: str, op: str, topk: Limit) -> Implementation:
    return Implementation(
        name=name,
        entry="fused_ops.lightning_indexer.torch_npu:lightning_indexer",
        kinds=frozenset({"ascend"}),
        dtypes=frozenset({dtype}),
        features=FEATURES,
        limits={
            "heads": INDEX_HEADS,
            "dim": INDEX_DIM,
            "topk": topk,
            "page": PAGE,
        },
        allows="fused_ops.npu_limits:lightning_indexer",
        available=f"fused_ops.npu_support:unavailable:{op}",
    )


OP = Op(
    name="lightning_indexer",
    summary="the top-k past tokens a query attends",
    reference="fused_ops.lightning_indexer.reference:lightning_indexer",
    cost="fused_ops.lightning_indexer.contract:cost",
    cases="fused_ops.lightning_indexer.cases",
    limits=LIMITS,
    features=FEATURES,
    # Against torch's bfloat16 product, whose rounded logits are the error; ours sum in float32.
    error_multiple={"f32": 4.0, "bf16": 1.0, "fp8": 1.0, "int8": 1.0},
    implementations=(
        _fused("torch_npu", "bf16", "npu_lightning_indexer", Limit(1)),
        _fused("torch_npu-int8", "int8", "npu_quant_lightning_indexer", QUANT_INDEX_COUNT),
        *(_compiled(isa) for isa in ("avx512", "avx2", "portable")),
        Implementation(
            name="triton",
            entry="fused_ops.lightning_indexer.triton_launch:lightning_indexer",
            kinds=frozenset({"cuda"}),
            dtypes=DTYPES,
            features=FEATURES,
            available="fused_ops.triton_support:unavailable",
            tuned={"tiles": "lightning_indexer", "topk_tiles": "select_topk"},
        ),
        Implementation(
            name="triton-ascend",
            entry="fused_ops.lightning_indexer.triton_ascend:lightning_indexer",
            kinds=frozenset({"ascend"}),
            dtypes=frozenset({"bf16", "int8"}),
            features=FEATURES,
            limits={"dim": Limit(1, 128)},  # what UB was seen to hold
            allows="fused_ops.lightning_indexer.contract:unpadded",
            available="fused_ops.triton_ascend:unavailable",
        ),
        Implementation(
            name="eager",
            entry="fused_ops.lightning_indexer.reference:lightning_indexer",
            kinds=frozenset({"cpu", "cuda", "ascend"}),
            dtypes=DTYPES,
            features=FEATURES,
        ),
    ),
)

TOPK = Op(
    name="select_topk",
    summary="the indexer's selection alone, on given scores",
    reference="fused_ops.lightning_indexer.reference:select_topk",
    cost="fused_ops.lightning_indexer.contract:topk_cost",
    cases="fused_ops.lightning_indexer.topk_cases",
    limits={"topk": Limit(1, 4096)},
    features=frozenset({"noncontiguous"}),
    error_multiple={"f32": 0.0},
    implementations=(
        *(_compiled_topk(isa) for isa in ("avx512", "avx2", "portable")),
        Implementation(
            name="triton",
            entry="fused_ops.lightning_indexer.triton_launch:select_topk",
            kinds=frozenset({"cuda"}),
            dtypes=frozenset({"f32"}),
            features=frozenset({"noncontiguous"}),
            available="fused_ops.triton_support:unavailable",
            tuned={"tiles": "select_topk"},
        ),
        Implementation(
            name="triton-ascend",
            entry="fused_ops.lightning_indexer.triton_ascend:select_topk",
            kinds=frozenset({"ascend"}),
            dtypes=frozenset({"f32"}),
            features=frozenset({"noncontiguous"}),
            available="fused_ops.triton_ascend:unavailable",
        ),
        Implementation(
            name="eager",
            entry="fused_ops.lightning_indexer.reference:select_topk",
            kinds=frozenset({"cpu", "cuda", "ascend"}),
            dtypes=frozenset({"f32"}),
            features=frozenset({"noncontiguous"}),
        ),
    ),
)
