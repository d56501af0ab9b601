"""A whole pass of the model as the ops it is made of, each with how often it is called.

Projections are ours on no target: they are timed as torch's bfloat16 linears of that size. Norms,
rotary embedding, activation quantization, sampling and communication are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fused_ops.op import OpRequest
from glm5q.config import ModelConfig

EXPERTS = ("int4+int8", 128)  # a routed expert's dtype and group (0: per channel) by default
HEAD_SLICES = 8  # the output head is timed as slices: whole it takes 1.9 GB
EXPERTS_AT_ONCE = {"cpu": 1, "cuda": 16}
LEFT_OUT = "norms, rotary embedding, activation quantization, sampling and communication"
# A CPU's prefill chunk is timed on a piece of it: tokens of a linear or the indexer, of attention.
CPU_PIECE, CPU_ATTENTION_PIECE = 256, 64


@dataclass(frozen=True)
class Linear:
    """A bfloat16 product of [rows, columns] with [features, columns]."""

    rows: int
    columns: int
    features: int


Work = OpRequest | Linear


@dataclass(frozen=True)
class Part:
    """One kind of work of a pass: what is timed, and how often the pass has it."""

    name: str
    works: tuple[tuple[Work, int], ...]


def decode(
    config: ModelConfig, kind: str, batch: int, context: int, experts: tuple[str, int] = EXPERTS
) -> tuple[Part, ...]:
    """Returns a decode step: `batch` requests of `context` tokens, one new token each."""
    layers, alone = _indexers(config), kind == "cpu"  # a CPU does one sequence after another
    index = _index(config, 1, context)
    indexer = OpRequest(
        "lightning_indexer",
        "bf16",
        index if alone else {**index, "sequences": batch},
        frozenset({"decode"}),
    )
    keys = min(batch * context, 1 << 20)
    return (
        Part("lightning_indexer", ((indexer, layers * (batch if alone else 1)),)),
        Part(
            "sparse_attention",
            ((_attention(config, batch, keys, context), config.num_hidden_layers),),
        ),
        _experts(config, kind, batch, experts),
        *_linears(config, batch, 1, batch),
    )


def prefill(
    config: ModelConfig, kind: str, chunk: int, context: int, experts: tuple[str, int] = EXPERTS
) -> tuple[Part, ...]:
    """Returns a prefill chunk: the last `chunk` of `context` tokens of one request."""
    piece = min(chunk, CPU_PIECE) if kind == "cpu" else chunk
    rows = min(chunk, CPU_ATTENTION_PIECE) if kind == "cpu" else chunk
    decode_like = frozenset({"decode"} if piece < context else ())
    indexer = OpRequest("lightning_indexer", "bf16", _index(config, piece, context), decode_like)
    return (
        Part("lightning_indexer", ((indexer, _indexers(config) * math.ceil(chunk / piece)),)),
        Part(
            "sparse_attention",
            (
                (
                    _attention(config, rows, context, context),
                    config.num_hidden_layers * math.ceil(chunk / rows),
                ),
            ),
        ),
        _experts(config, kind, chunk, experts),
        *_linears(config, piece, math.ceil(chunk / piece), 1),
    )


def _indexers(config: ModelConfig) -> int:
    return sum(config.full_indexer[: config.num_hidden_layers])


def _index(config: ModelConfig, tokens: int, keys: int) -> dict[str, int]:
    return {
        "heads": config.index_n_heads, "dim": config.index_head_dim, "topk": config.index_topk,
        "tokens": tokens, "keys": keys,
    }  # fmt: skip


def _attention(config: ModelConfig, tokens: int, keys: int, context: int) -> OpRequest:
    shape = {
        "heads": config.num_attention_heads,
        "dim": config.kv_lora_rank + config.qk_rope_head_dim,
        "value_dim": config.kv_lora_rank,
        "selected": min(config.index_topk, context),
        "tokens": tokens,
        "keys": keys,
    }
    return OpRequest("sparse_attention", "bf16", shape, frozenset({"decode"}))


def _experts(config: ModelConfig, kind: str, tokens: int, scheme: tuple[str, int]) -> Part:
    """Both products of the experts that `tokens` reach, an even router assumed."""
    dtype, group = scheme
    experts, routed = config.n_routed_experts, tokens * config.num_experts_per_tok
    missed = (1 - config.num_experts_per_tok / experts) ** tokens
    active = max(1, round(experts * (1 - missed)))
    rows, at_once = math.ceil(routed / active), min(EXPERTS_AT_ONCE[kind], active)
    calls = math.ceil(active / at_once) * sum(config.moe[: config.num_hidden_layers])
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    works = tuple(
        (
            OpRequest(
                "expert_gemm",
                dtype,
                {
                    "in": columns,
                    "out": features,
                    "experts": at_once,
                    "rows": rows * at_once,
                    "group": 0 if group and columns % group else group,
                },
            ),
            calls,
        )
        for columns, features in ((hidden, 2 * inner), (inner, hidden))
    )
    return Part("expert_gemm", works)


def _linears(config: ModelConfig, rows: int, pieces: int, answers: int) -> tuple[Part, ...]:
    """The rest, `rows` tokens at a time; the output head sees `answers` tokens, once."""
    layers, moe = config.num_hidden_layers, sum(config.moe[: config.num_hidden_layers])
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    key_and_weights = config.index_head_dim + config.index_n_heads
    shared = config.n_shared_experts * config.moe_intermediate_size

    def times(calls: int, *shapes: tuple[int, int]) -> tuple[tuple[Work, int], ...]:
        return tuple((Linear(rows, *shape), calls * pieces) for shape in shapes if calls)

    attention = times(
        layers,
        (hidden, config.q_lora_rank),
        (config.q_lora_rank, heads * config.qk_head_dim),
        (hidden, latent + config.qk_rope_head_dim),
        (heads * config.qk_nope_head_dim, latent),  # W_UK and W_UV, absorbed: a product a head
        (heads * config.v_head_dim, latent),
        (heads * config.v_head_dim, hidden),
    )
    index = times(
        _indexers(config),
        (config.q_lora_rank, config.index_n_heads * config.index_head_dim),
        (hidden, key_and_weights),
    )
    head = Linear(answers, hidden, math.ceil(config.vocab_size / HEAD_SLICES))
    return (
        Part("linears: attention", attention + index),
        Part(
            "linears: shared expert, router",
            times(moe, (hidden, 2 * shared), (shared, hidden), (hidden, config.n_routed_experts)),
        ),
        Part(
            "linears: dense layers",
            times(
                layers - moe,
                (hidden, 2 * config.intermediate_size),
                (config.intermediate_size, hidden),
            ),
        ),
        Part("linears: output head", ((head, HEAD_SLICES),)),
    )
