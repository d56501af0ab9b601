"""One GLM-5 decoder layer in ONNX's standard operators, W8A8 and W4A8 as integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.formats.onnx_graph import FLOAT, Graph
from glm5q.formats.onnx_product import Product, rms_norm, silu_times, split
from glm5q.layer import Codes, Layer

INDEX_NORM_EPS = 1e-6
ROUTER_NORM_EPS = 1e-20


@dataclass(frozen=True)
class Rotary:
    """Names of cos and sin, float [sequence, rope / 2]."""

    cos: str
    sin: str


class LayerGraph:
    """Adds one layer's nodes to a graph."""

    def __init__(self, graph: Graph, config: ModelConfig, layer: Layer, rotary: Rotary) -> None:
        self.g, self.config, self.layer, self.rotary = graph, config, layer, rotary
        self.prefix = names.layer_prefix(layer.number)

    def forward(self, hidden: str, causal: str, selected: str | None) -> tuple[str, str]:
        """Returns (output hidden, selection) for hidden [sequence, hidden].

        `causal` bool [sequence, sequence]; `selected` the last indexer's choice, likewise a mask.
        """
        eps = self.config.rms_norm_eps
        normed = self.rms(hidden, "input_layernorm.weight", eps)
        attention, selected = self.attention(normed, causal, selected)
        hidden = self.g.op("Add", hidden, attention)
        normed = self.rms(hidden, "post_attention_layernorm.weight", eps)
        update = (
            self.mixture(normed) if "mlp.gate" in self.layer.matrices else self.mlp("mlp.", normed)
        )
        return self.g.op("Add", hidden, update), selected

    def vector(self, path: str) -> str:
        return self.g.floats(self.prefix + path, self.layer.vectors[path])

    def rms(self, x: str, path: str, eps: float) -> str:
        return rms_norm(self.g, x, self.vector(path), eps)

    def linear(self, path: str, x: str) -> str:
        """Returns x [rows, in] times a matrix of the layer, at its activation grid."""
        matrix = self.layer.matrices[path]
        if isinstance(matrix, Tensor):
            weight = self.g.floats(self.prefix + path + ".weight", matrix)
            return self.g.op("MatMul", x, self.g.op("Transpose", weight, perm=[1, 0]))
        product = Product(self.g, self.prefix + path, matrix)
        return product(product.prepare(x))

    def heads(self, x: str, count: int, dim: int) -> str:
        return self.g.op("Reshape", x, self.g.constant([-1, count, dim], torch.int64))

    def attention(self, x: str, causal: str, selected: str | None) -> tuple[str, str]:
        c, g = self.config, self.g
        a = "self_attn."
        q_latent = self.rms(
            self.linear(a + "q_a_proj", x), a + "q_a_layernorm.weight", c.latent_norm_eps
        )
        if a + "indexer.wk" in self.layer.matrices:
            selected = self.select(x, q_latent, causal)
        elif selected is None:
            raise ValueError("a layer without an indexer needs an earlier layer's selection")
        query = self.heads(
            self.linear(a + "q_b_proj", q_latent), c.num_attention_heads, c.qk_head_dim
        )
        q_nope, q_rope = split(g, query, 2, c.qk_nope_head_dim, c.qk_rope_head_dim)
        both = self.linear(a + "kv_a_proj_with_mqa", x)
        latent, k_rope = split(g, both, 1, c.kv_lora_rank, c.qk_rope_head_dim)
        latent = self.rms(latent, a + "kv_a_layernorm.weight", c.latent_norm_eps)
        q_rope = self.rotate(q_rope, c.qk_rope_head_dim)
        k_rope = self.rotate(self.heads(k_rope, 1, c.qk_rope_head_dim), c.qk_rope_head_dim)
        w_key, w_value = self.kv_b()
        by_head = [g.op("Transpose", part, perm=[1, 0, 2]) for part in (q_nope, q_rope)]
        absorbed = g.op("MatMul", by_head[0], w_key)  # [heads, queries, latent]
        keys = g.op("Transpose", latent, perm=[1, 0])
        rope_keys = g.op("Transpose", k_rope, perm=[1, 2, 0])
        logits = g.op("Add", g.op("MatMul", absorbed, keys), g.op("MatMul", by_head[1], rope_keys))
        logits = g.op("Mul", logits, g.constant(c.qk_head_dim**-0.5))
        logits = g.op("Where", selected, logits, g.constant(-torch.inf))
        weights = g.op("Softmax", logits, axis=-1)
        values = g.op("MatMul", g.op("MatMul", weights, latent), w_value)
        flat = self.heads(
            g.op("Transpose", values, perm=[1, 0, 2]), 1, c.num_attention_heads * c.v_head_dim
        )
        flat = g.op("Squeeze", flat, g.constant([1], torch.int64))
        return self.linear(a + "o_proj", flat), selected

    def kv_b(self) -> tuple[str, str]:
        """Returns W_UK [heads, nope, latent] and W_UV' [heads, latent, value]."""
        c, path = self.config, "self_attn.kv_b_proj"
        matrix = self.layer.matrices[path]
        if not isinstance(matrix, Tensor):
            raise TypeError("kv_b_proj is absorbed and must be kept")
        per_head = matrix.view(c.num_attention_heads, -1, c.kv_lora_rank)
        w_key, w_value = per_head.split((c.qk_nope_head_dim, c.v_head_dim), 1)
        name = self.prefix + path
        return (
            self.g.floats(name + ".key", w_key),
            self.g.floats(name + ".value", w_value.transpose(1, 2)),
        )

    def rotate(self, x: str, dim: int, interleaved: bool = True) -> str:
        """Rotates x [sequence, heads, dim]: adjacent pairs if interleaved, else halves."""
        g = self.g
        if interleaved:
            pairs = g.op("Reshape", x, g.constant([0, 0, dim // 2, 2], torch.int64))
            first, second = (
                g.op("Gather", pairs, g.constant(i, torch.int64), axis=3) for i in (0, 1)
            )
        else:
            first, second = split(g, x, 2, dim // 2, dim // 2)
        cos, sin = self.rotary.cos, self.rotary.sin
        left = g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin))
        right = g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin))
        if not interleaved:
            return g.op("Concat", left, right, axis=2)
        last = g.constant([3], torch.int64)
        joined = g.op(
            "Concat", g.op("Unsqueeze", left, last), g.op("Unsqueeze", right, last), axis=3
        )
        return g.op("Reshape", joined, g.constant([0, 0, dim], torch.int64))

    def select(self, x: str, q_latent: str, causal: str) -> str:
        """Returns bool [queries, keys]: the indexer's choice among keys that are not later.

        ONNX's TopK puts the lower of two equal values' indices first, as the reference has it.
        """
        c, g, i = self.config, self.g, "self_attn.indexer."
        query = self.heads(self.linear(i + "wq_b", q_latent), c.index_n_heads, c.index_head_dim)
        key = g.op(
            "LayerNormalization",
            self.linear(i + "wk", x),
            self.vector(i + "k_norm.weight"),
            self.vector(i + "k_norm.bias"),
            axis=-1,
            epsilon=INDEX_NORM_EPS,
        )
        key = self.rotate_first(self.heads(key, 1, c.index_head_dim))
        gates = self.linear(i + "weights_proj", x)
        gates = g.op("Mul", gates, g.constant(c.index_n_heads**-0.5 * c.index_head_dim**-0.5))
        keys = g.op("Transpose", g.op("Squeeze", key, g.constant([1], torch.int64)), perm=[1, 0])
        dots = g.op("Relu", g.op("MatMul", self.rotate_first(query), keys))
        row = g.constant([1], torch.int64)
        scores = g.op("Squeeze", g.op("MatMul", g.op("Unsqueeze", gates, row), dots), row)
        scores = g.op("Where", causal, scores, g.constant(-torch.inf))
        length = g.op("Shape", scores, start=1)
        width = g.op("Min", length, g.constant([c.index_topk], torch.int64))
        indices = g.ops("TopK", scores, width, outputs=2, axis=-1)[1]
        none = g.op("ConstantOfShape", g.op("Shape", scores))
        ones = g.op(
            "Add", g.op("Mul", g.op("Cast", indices, to=FLOAT), g.constant(0.0)), g.constant(1.0)
        )
        chosen = g.op("ScatterElements", none, indices, ones, axis=1)
        return g.op("And", g.op("Greater", chosen, g.constant(0.0)), causal)

    def rotate_first(self, x: str) -> str:
        c = self.config
        rope, rest = split(self.g, x, 2, c.qk_rope_head_dim, c.index_head_dim - c.qk_rope_head_dim)
        rope = self.rotate(rope, c.qk_rope_head_dim, c.indexer_rope_interleave)
        return self.g.op("Concat", rope, rest, axis=2)

    def mlp(self, prefix: str, x: str) -> str:
        both = silu_times(
            self.g, self.linear(prefix + "gate_proj", x), self.linear(prefix + "up_proj", x)
        )
        return self.linear(prefix + "down_proj", both)

    def mixture(self, x: str) -> str:
        """Routed experts, each on its own tokens, plus the shared one."""
        g, c = self.g, self.config
        gates = self.route(x)
        up = self.layer.matrices[names.GATE_UP]
        down = self.layer.matrices[names.DOWN]
        total = g.op("Mul", x, g.constant(0.0))
        prepared = Product(g, "", up).prepare(x) if isinstance(up, Codes) else [x]
        column = g.constant([1], torch.int64)
        for expert in range(c.n_routed_experts):
            gate = g.op("Gather", gates, g.constant(expert, torch.int64), axis=1)
            rows = g.op("NonZero", g.op("Greater", gate, g.constant(0.0)))
            rows = g.op("Squeeze", rows, g.constant([0], torch.int64))
            mine = [g.op("Gather", part, rows, axis=0) for part in prepared]
            both = self.expert(names.GATE_UP, up, expert, mine)
            width = c.moe_intermediate_size
            inner = silu_times(g, *split(g, both, 1, width, width))
            ready = Product(g, "", down).prepare(inner) if isinstance(down, Codes) else [inner]
            output = self.expert(names.DOWN, down, expert, ready)
            weight = g.op("Unsqueeze", g.op("Gather", gate, rows, axis=0), column)
            total = g.op(
                "ScatterND",
                total,
                g.op("Unsqueeze", rows, column),
                g.op("Mul", output, weight),
                reduction="add",
            )
        if not c.n_shared_experts:
            return total
        return g.op("Add", total, self.mlp("mlp.shared_experts.", x))

    def expert(self, path: str, stack: Tensor | Codes, expert: int, prepared: list[str]) -> str:
        name = f"{self.prefix}{path}.{expert}"
        if isinstance(stack, Tensor):
            weight = self.g.floats(name, stack[expert])
            return self.g.op("MatMul", prepared[0], self.g.op("Transpose", weight, perm=[1, 0]))
        one = Codes(stack.codes[expert], stack.scale[expert], stack.scheme, stack.input_scale)
        return Product(self.g, name, one)(prepared)

    def route(self, x: str) -> str:
        """Returns gates [tokens, experts], zero where an expert is not chosen."""
        g, c = self.g, self.config
        scores = g.op("Sigmoid", self.linear("mlp.gate", x))
        biased = g.op("Add", scores, self.vector("mlp.gate.e_score_correction_bias"))
        count = g.constant([c.num_experts_per_tok], torch.int64)
        chosen = g.ops("TopK", biased, count, outputs=2, axis=-1)[1]
        gates = g.op("GatherElements", scores, chosen, axis=1)
        if c.norm_topk_prob:
            total = g.op("ReduceSum", gates, g.constant([1], torch.int64), keepdims=1)
            gates = g.op("Div", gates, g.op("Add", total, g.constant(ROUTER_NORM_EPS)))
        gates = g.op("Mul", gates, g.constant(c.routed_scaling_factor))
        none = g.op("ConstantOfShape", g.op("Shape", scores))
        return g.op("ScatterElements", none, chosen, gates, axis=1)
