"""GLM-5's shapes: one layer's ops, at sizes a kind of target is timed on by default."""

from __future__ import annotations

from fused_ops.op import OpRequest

_INDEX = {"heads": 32, "dim": 128, "topk": 2048}
_MLA = {"heads": 64, "dim": 576, "value_dim": 512, "selected": 2048}
_GATE = {"in": 6144, "out": 2048, "experts": 1}
_DECODE = frozenset({"decode"})

# One layer, one chunk. Attention is timed on the last 128 of 4096 tokens.
GLM5_CPU: tuple[OpRequest, ...] = (
    OpRequest("lightning_indexer", "bf16", {**_INDEX, "tokens": 4096, "keys": 4096}),
    OpRequest("lightning_indexer", "bf16", {**_INDEX, "tokens": 1, "keys": 65536}, _DECODE),
    OpRequest("select_topk", "f32", {"rows": 4096, "keys": 4096, "topk": 2048}),
    OpRequest("sparse_attention", "bf16", {**_MLA, "tokens": 128, "keys": 4096}, _DECODE),
    *(
        OpRequest("expert_gemm", dtype, {**_GATE, "rows": rows, "group": group})
        for dtype, group in (("int4+int8", 128), ("int8+int8", 0))
        for rows in (1, 16, 256)
    ),
)

# Chunks of 4096 tokens on 64K keys as measured for other kernels; 16 of the 256 experts.
GLM5_CUDA: tuple[OpRequest, ...] = (
    OpRequest("lightning_indexer", "bf16", {**_INDEX, "tokens": 4096, "keys": 65536}, _DECODE),
    OpRequest("lightning_indexer", "fp8", {**_INDEX, "tokens": 4096, "keys": 65536}, _DECODE),
    OpRequest("select_topk", "f32", {"rows": 1024, "keys": 65536, "topk": 2048}),
    OpRequest("sparse_attention", "bf16", {**_MLA, "tokens": 4096, "keys": 65536}, _DECODE),
    OpRequest("sparse_attention", "bf16", {**_MLA, "tokens": 64, "keys": 65536}, _DECODE),
    *(
        OpRequest(
            "expert_gemm",
            "int4+int8",
            {"experts": 16, "in": 6144, "out": 4096, "rows": rows, "group": 128},
        )
        for rows in (32, 512, 4096)
    ),
)

DEFAULTS = {"cpu": GLM5_CPU, "cuda": GLM5_CUDA}  # by a target's kind
