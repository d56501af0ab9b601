"""Tensor names of a GLM-5 checkpoint: which there are, their shapes and roles. Only this knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm5q.config import ModelConfig
from glm5q.types import Role

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
GATE_UP = "mlp.experts.gate_up_proj"  # how a layer's routed experts are stacked in memory
DOWN = "mlp.experts.down_proj"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a checkpoint of this config holds, by its full name."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None  # None: outside the layers
    expert: int | None = None
    optional: bool = False

    @property
    def is_matrix(self) -> bool:
        """A linear layer's weight, which a scheme can claim."""
        return len(self.shape) == 2


@dataclass(frozen=True)
class Module:
    """A linear layer of one decoder layer, or its stack of routed experts.

    `path` is relative to the layer. `shape` is [out, in], or [experts, out, in] for a stack, whose
    gate_up rows are gate then up.
    """

    path: str
    role: Role
    shape: tuple[int, ...]

    @property
    def stacked(self) -> bool:
        return len(self.shape) == 3


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expert_name(layer: int, expert: int, projection: str) -> str:
    """`model.layers.3.mlp.experts.17.gate_proj`, without `.weight`."""
    return f"{layer_prefix(layer)}mlp.experts.{expert}.{projection}"


def top_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yields the tensors outside the layers."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    yield TensorSpec(EMBEDDING, (vocabulary, hidden), Role.EMBEDDING)
    yield TensorSpec(FINAL_NORM, (hidden,), Role.NORM)
    yield TensorSpec(
        LM_HEAD, (vocabulary, hidden), Role.LM_HEAD, optional=config.tie_word_embeddings
    )


def layer_modules(config: ModelConfig, layer: int) -> Iterator[Module]:
    """Yields the linear layers of one decoder or MTP layer, experts stacked."""
    c = config
    hidden, heads = c.hidden_size, c.num_attention_heads
    attention = "self_attn."
    yield Module(attention + "q_a_proj", Role.ATTENTION, (c.q_lora_rank, hidden))
    yield Module(attention + "q_b_proj", Role.ATTENTION, (heads * c.qk_head_dim, c.q_lora_rank))
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    yield Module(attention + "kv_a_proj_with_mqa", Role.ATTENTION, (latent, hidden))
    per_head = c.qk_nope_head_dim + c.v_head_dim
    yield Module(attention + "kv_b_proj", Role.KV_B, (heads * per_head, c.kv_lora_rank))
    yield Module(attention + "o_proj", Role.ATTENTION, (hidden, heads * c.v_head_dim))
    if c.full_indexer[layer]:
        indexer = attention + "indexer."
        queries = c.index_n_heads * c.index_head_dim
        yield Module(indexer + "wq_b", Role.INDEXER_QUERY, (queries, c.q_lora_rank))
        yield Module(indexer + "wk", Role.INDEXER_KEY, (c.index_head_dim, hidden))
        yield Module(indexer + "weights_proj", Role.INDEXER_WEIGHTS, (c.index_n_heads, hidden))
    if not c.moe[layer]:
        yield from _mlp("mlp.", Role.DENSE_MLP, hidden, c.intermediate_size)
    else:
        width, experts = c.moe_intermediate_size, c.n_routed_experts
        yield Module("mlp.gate", Role.ROUTER, (experts, hidden))
        yield Module(GATE_UP, Role.ROUTED_EXPERT, (experts, 2 * width, hidden))
        yield Module(DOWN, Role.ROUTED_EXPERT, (experts, hidden, width))
        if c.n_shared_experts:
            shared = width * c.n_shared_experts
            yield from _mlp("mlp.shared_experts.", Role.SHARED_EXPERT, hidden, shared)
    if c.is_mtp(layer):
        yield Module("eh_proj", Role.MTP_PROJECTION, (hidden, 2 * hidden))


def _mlp(prefix: str, role: Role, hidden: int, width: int) -> Iterator[Module]:
    yield Module(prefix + "gate_proj", role, (width, hidden))
    yield Module(prefix + "up_proj", role, (width, hidden))
    yield Module(prefix + "down_proj", role, (hidden, width))


def layer_vectors(config: ModelConfig, layer: int) -> Iterator[tuple[str, Role, int]]:
    """Yields (path relative to the layer, role, length) of every vector of a layer."""
    c = config
    yield "input_layernorm.weight", Role.NORM, c.hidden_size
    yield "post_attention_layernorm.weight", Role.NORM, c.hidden_size
    yield "self_attn.q_a_layernorm.weight", Role.NORM, c.q_lora_rank
    yield "self_attn.kv_a_layernorm.weight", Role.NORM, c.kv_lora_rank
    if c.full_indexer[layer]:
        yield "self_attn.indexer.k_norm.weight", Role.NORM, c.index_head_dim
        yield "self_attn.indexer.k_norm.bias", Role.NORM, c.index_head_dim
    if c.moe[layer]:
        yield "mlp.gate.e_score_correction_bias", Role.ROUTER, c.n_routed_experts
    if c.is_mtp(layer):
        for norm in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
            yield norm, Role.NORM, c.hidden_size


def layer_tensors(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    """Yields every tensor of a layer as checkpoints name it, routed experts one by one."""
    prefix = layer_prefix(layer)
    for path, role, length in layer_vectors(config, layer):
        yield TensorSpec(prefix + path, (length,), role, layer)
    for module in layer_modules(config, layer):
        if module.stacked:
            yield from _expert_tensors(config, layer, module)
        else:
            yield TensorSpec(f"{prefix}{module.path}.weight", module.shape, module.role, layer)
    if config.is_mtp(layer):  # shared with the main model; some re-exports store them again
        shape = (config.vocab_size, config.hidden_size)
        yield TensorSpec(prefix + "embed_tokens.weight", shape, Role.EMBEDDING, layer, None, True)
        yield TensorSpec(prefix + "shared_head.head.weight", shape, Role.LM_HEAD, layer, None, True)


def _expert_tensors(config: ModelConfig, layer: int, module: Module) -> Iterator[TensorSpec]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
    if module.path == DOWN:
        shapes = {"down_proj": (hidden, width)}
    for expert in range(config.n_routed_experts):
        for projection, shape in shapes.items():
            name = expert_name(layer, expert, projection) + ".weight"
            yield TensorSpec(name, shape, module.role, layer, expert)


def every_tensor(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yields every tensor of the checkpoint, optional ones marked."""
    yield from top_tensors(config)
    for layer in range(config.num_layers):
        yield from layer_tensors(config, layer)


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Returns every tensor of the checkpoint by full name."""
    return {spec.name: spec for spec in every_tensor(config)}


def stacked_parts(path: str) -> tuple[str, ...]:
    """Returns the per-expert projections inside a stack: gate then up, or down."""
    return ("gate_proj", "up_proj") if path == GATE_UP else ("down_proj",)
