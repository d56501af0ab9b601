"""GLM-5's tensors from config.json, stated a second time: nothing here comes from glm5q.names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Linear:
    """A linear layer: its name without `.weight`, [out, in], its kind, and the expert it is in."""

    name: str
    shape: tuple[int, int]
    kind: str
    expert: int | None = None


@dataclass(frozen=True)
class Model:
    """config.json's numbers. Raises KeyError for one that is missing."""

    raw: dict[str, Any]

    @property
    def decoder_layers(self) -> int:
        return int(self.raw["num_hidden_layers"])

    @property
    def mtp_layers(self) -> int:
        return int(self.raw.get("num_nextn_predict_layers") or 0)

    @property
    def layers(self) -> range:
        return range(self.decoder_layers + self.mtp_layers)

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.decoder_layers

    def is_moe(self, layer: int) -> bool:
        if self.is_mtp(layer):
            return True
        kinds = self.raw.get("mlp_layer_types")
        if kinds:
            return bool(kinds[layer] == "sparse")
        frequency = self.raw.get("moe_layer_freq") or 1
        return bool(layer >= self.raw["first_k_dense_replace"] and layer % frequency == 0)

    def has_indexer(self, layer: int) -> bool:
        """A layer whose indexer is `shared` takes an earlier layer's choice and has no weights."""
        if self.is_mtp(layer):
            return True
        kinds = self.raw.get("indexer_types")
        return bool(kinds[layer] == "full") if kinds else self.full_by_frequency(layer)

    def full_by_frequency(self, layer: int) -> bool:
        """Whether a layer's indexer is its own by index_topk_freq, all that vLLM 0.33 reads."""
        frequency = self.raw.get("index_topk_freq") or 1
        offset = self.raw.get("index_skip_topk_offset", 2)
        return bool(max(layer - offset + 1, 0) % frequency == 0)

    def linears(self, layer: int) -> Iterator[Linear]:
        """Yields the linear layers of one layer, routed experts one by one."""
        r, p = self.raw, f"model.layers.{layer}."
        hidden, heads, latent = r["hidden_size"], r["num_attention_heads"], r["kv_lora_rank"]
        nope, rope, value = r["qk_nope_head_dim"], r["qk_rope_head_dim"], r["v_head_dim"]
        a = p + "self_attn."
        yield Linear(a + "q_a_proj", (r["q_lora_rank"], hidden), "attention")
        yield Linear(a + "q_b_proj", (heads * (nope + rope), r["q_lora_rank"]), "attention")
        yield Linear(a + "kv_a_proj_with_mqa", (latent + rope, hidden), "attention")
        yield Linear(a + "kv_b_proj", (heads * (nope + value), latent), "kv_b")
        yield Linear(a + "o_proj", (hidden, heads * value), "attention")
        if self.has_indexer(layer):
            i = a + "indexer."
            count, dim = r["index_n_heads"], r["index_head_dim"]
            yield Linear(i + "wq_b", (count * dim, r["q_lora_rank"]), "wq_b")
            yield Linear(i + "wk", (dim, hidden), "wk")
            yield Linear(i + "weights_proj", (count, hidden), "weights_proj")
        if self.is_moe(layer):
            yield Linear(p + "mlp.gate", (r["n_routed_experts"], hidden), "gate")
            width = r["moe_intermediate_size"]
            for expert in range(r["n_routed_experts"]):
                yield from _mlp(f"{p}mlp.experts.{expert}.", hidden, width, "expert", expert)
            if r.get("n_shared_experts"):
                shared = width * r["n_shared_experts"]
                yield from _mlp(f"{p}mlp.shared_experts.", hidden, shared, "shared")
        else:
            yield from _mlp(p + "mlp.", hidden, r["intermediate_size"], "dense")
        if self.is_mtp(layer):
            yield Linear(p + "eh_proj", (hidden, 2 * hidden), "eh_proj")

    def vectors(self, layer: int) -> Iterator[tuple[str, int]]:
        """Yields (full name, length) of a layer's norms and the router's correction bias."""
        r, p = self.raw, f"model.layers.{layer}."
        yield p + "input_layernorm.weight", r["hidden_size"]
        yield p + "post_attention_layernorm.weight", r["hidden_size"]
        yield p + "self_attn.q_a_layernorm.weight", r["q_lora_rank"]
        yield p + "self_attn.kv_a_layernorm.weight", r["kv_lora_rank"]
        if self.has_indexer(layer):
            yield p + "self_attn.indexer.k_norm.weight", r["index_head_dim"]
            yield p + "self_attn.indexer.k_norm.bias", r["index_head_dim"]
        if self.is_moe(layer):
            yield p + "mlp.gate.e_score_correction_bias", r["n_routed_experts"]
        if self.is_mtp(layer):
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{p}{norm}.weight", r["hidden_size"]

    def top(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields (name, shape) of what lies outside the layers."""
        table = (self.raw["vocab_size"], self.raw["hidden_size"])
        yield "model.embed_tokens.weight", table
        yield "model.norm.weight", (self.raw["hidden_size"],)
        if not self.raw.get("tie_word_embeddings"):
            yield "lm_head.weight", table

    def copies(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields what an MTP layer may hold again: the model's embedding and head."""
        table = (self.raw["vocab_size"], self.raw["hidden_size"])
        for layer in self.layers[self.decoder_layers :]:
            yield f"model.layers.{layer}.embed_tokens.weight", table
            yield f"model.layers.{layer}.shared_head.head.weight", table


def _mlp(
    prefix: str, hidden: int, width: int, kind: str, expert: int | None = None
) -> Iterator[Linear]:
    yield Linear(prefix + "gate_proj", (width, hidden), kind, expert)
    yield Linear(prefix + "up_proj", (width, hidden), kind, expert)
    yield Linear(prefix + "down_proj", (hidden, width), kind, expert)
