"""One GLM-5 decoder layer's forward, in plain torch over the fused ops' definitions.

Semantics as glm_moe_dsa of transformers >= 5.13 (earlier ones rotate wrongly), held to it by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from calibrate import row_gradients, rows
from calibrate.row_gradients import exact_linear
from calibrate.row_gradients import rms_norm as rms_norm
from fused_ops.expert_gemm.reference import expert_gemm
from fused_ops.lightning_indexer.reference import lightning_indexer
from fused_ops.sparse_attention.reference import sparse_attention
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Weights

INDEX_NORM_EPS = 1e-6  # the indexer's LayerNorm has its own, not in config.json
ROUTER_NORM_EPS = 1e-20


class Observer:
    """Sees what a forward computes; override what is wanted.

    Whoever runs the forward sets `first_token`, the stream's number of the first token it runs on.
    What `indexer` and `attention` are handed is what is used next; calibrate.caches rounds it.
    One that does not `want_output` gets `experts` of the last stack with no rows of y: a third of
    the experts' work is not done, and what the layer returns as hidden states means nothing.
    """

    first_token = 0
    want_output = True

    def linear(self, path: str, x: Tensor, y: Tensor) -> None:
        """One matrix: x [tokens, in] before its activation grid, y [tokens, out]."""

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, tokens: Tensor) -> None:
        """A stack: x [rows, in] sorted by expert, `offsets` [experts + 1] bounds their rows.

        `tokens` int64 [rows] says which of the forward's tokens each row is.
        """

    def indexer(self, query: Tensor, key: Tensor, gates: Tensor, offsets: Tensor) -> None:
        """What it scores: query [tokens, heads, dim], key [tokens, dim], gates [tokens, heads]."""

    def attention(self, query: Tensor, latent: Tensor, offsets: Tensor, scale: float) -> None:
        """What the attention reads: query [tokens, heads, dim] absorbed, latent [tokens, dim]."""


@dataclass(frozen=True)
class LayerOutput:
    """A layer's output hidden states [tokens, hidden] and the choices it made.

    `indices` int32 [tokens, topk] are the attended positions, which layers without an indexer of
    their own reuse. `experts` int64 [tokens, experts a token] are the router's, None if dense.
    """

    hidden: Tensor
    indices: Tensor
    experts: Tensor | None


def rotary_angles(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Returns float32 (cos, sin) [tokens, dim / 2] for positions [tokens]."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    angles = positions.float().unsqueeze(-1) * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], interleaved: bool = True) -> Tensor:
    """Rotates x [tokens, ..., dim]: adjacent pairs if interleaved (GLM), else halves."""
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = (angle.view(shape) for angle in angles)
    values = x.float()
    if interleaved:
        first, second = values[..., 0::2], values[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        return rotated.flatten(-2).to(x.dtype)
    first, second = values.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def decoder_layer(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    offsets: Tensor,
    indices: Tensor | None,
    observer: Observer | None = None,
    length: int = 0,
) -> LayerOutput:
    """Runs one layer over packed sequences.

    `hidden` [tokens, hidden]; `offsets` [sequences + 1] bounds the sequences; `indices` are the
    previous layers', used where this layer has no indexer. Memory grows with the longest sequence,
    not with its square. `length` is every sequence's, where the caller knows them to be equal: a
    GPU asked for its offsets answers after the states on their way to the host, 28 ms a chunk.
    """
    run = _Run(config, weights, observer, length)
    hidden, normed, indices = run.attended(hidden, offsets, indices)
    if "mlp.gate" in weights.matrices:
        return LayerOutput(*run.mixture(normed, hidden, indices))
    return LayerOutput(hidden + run.mlp("mlp.", normed), indices, None)


def after_attention(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    offsets: Tensor,
    indices: Tensor | None,
    length: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns (hidden states after the attention, what the MLP or experts read of them).

    Both [tokens, hidden]; see decoder_layer.
    """
    return _Run(config, weights, None, length).attended(hidden, offsets, indices)[:2]


def mtp_input(config: ModelConfig, weights: Weights, embedded: Tensor, hidden: Tensor) -> Tensor:
    """Returns the MTP layer's input [tokens, hidden] = eh_proj(enorm(embedding), hnorm(hidden)).

    `embedded` is the next token's embedding, `hidden` the main model's after its final norm.
    """
    run = _Run(config, weights, None)
    eps = config.rms_norm_eps
    both = (
        rms_norm(embedded, run.vector("enorm.weight"), eps),
        rms_norm(hidden, run.vector("hnorm.weight"), eps),
    )
    compute = weights.matrices["eh_proj"].dtype
    return run.linear("eh_proj", torch.cat(both, -1).to(compute)).to(hidden.dtype)


class _Run:
    """One forward: the weights, and who watches."""

    def __init__(
        self, config: ModelConfig, weights: Weights, observer: Observer | None, length: int = 0
    ) -> None:
        self.config, self.weights, self.observer, self.length = config, weights, observer, length

    def vector(self, path: str) -> Tensor:
        return self.weights.vectors[path]

    def linear(self, path: str, x: Tensor) -> Tensor:
        if path in self.weights.coded:
            y = self.weights.coded[path].product(x, rows.all_rows(x))
        else:
            rounded = rows.round_activation(x, self.weights.activation[path])
            y = F.linear(rounded, self.weights.matrices[path])
        if self.observer is not None:
            self.observer.linear(path, x, y)
        return y

    def attended(
        self, hidden: Tensor, offsets: Tensor, indices: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (hidden states after the attention, the same normed for the MLP, indices)."""
        eps = self.config.rms_norm_eps
        compute = self.weights.matrices["self_attn.kv_b_proj"].dtype  # the stream may be wider
        normed = rms_norm(hidden, self.vector("input_layernorm.weight"), eps, compute)
        attention, indices = self.attention(normed, offsets, indices)
        weight = self.vector("post_attention_layernorm.weight")
        return *row_gradients.add_and_norm(hidden, attention, weight, eps, compute), indices

    def attention(
        self, x: Tensor, offsets: Tensor, indices: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        length = self._attends_all(x, offsets)
        place = self._positions(x, offsets)
        angles = rotary_angles(place, c.qk_rope_head_dim, c.rope_theta)
        q_latent = rms_norm(
            self.linear("self_attn.q_a_proj", x),
            self.vector("self_attn.q_a_layernorm.weight"),
            c.latent_norm_eps,
        )
        if "self_attn.indexer.wk" in self.weights.matrices:
            with torch.no_grad():  # a choice has no gradient
                indices = self.select(x, q_latent, angles, offsets, length)
        elif indices is None:
            raise ValueError("a layer without an indexer needs an earlier layer's indices")
        query = self.linear("self_attn.q_b_proj", q_latent)
        latent, k_rope = self.linear("self_attn.kv_a_proj_with_mqa", x).split(
            (c.kv_lora_rank, c.qk_rope_head_dim), -1
        )
        norm = self.vector("self_attn.kv_a_layernorm.weight")
        latent = rms_norm(latent, norm, c.latent_norm_eps)
        kv_b = self.weights.matrices["self_attn.kv_b_proj"]
        heads = c.num_attention_heads
        kv_b = kv_b.view(heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        w_key, w_value = kv_b.split((c.qk_nope_head_dim, c.v_head_dim), 1)
        k_rope = rotate(k_rope, angles)
        if length:
            query = row_gradients.rotate_heads(query, heads, c.qk_nope_head_dim, angles)
            query = query.unflatten(-1, (heads, -1))
            values = attend_all(query, latent, k_rope, w_key, w_value, length)
            return self.linear("self_attn.o_proj", values), indices
        query = query.unflatten(-1, (heads, -1))
        q_nope, q_rope = query.split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        q_rope = rotate(q_rope, angles)
        absorbed = torch.einsum("thd,hdc->thc", q_nope, w_key)
        query = torch.cat((absorbed, q_rope), -1)
        latent = torch.cat((latent, k_rope), -1)
        scale = c.qk_head_dim**-0.5
        if self.observer is not None:
            self.observer.attention(query, latent, offsets, scale)
        attend = _on_device("sparse_attention", x) or sparse_attention
        output, _ = attend(query, latent, indices, offsets, scale, c.kv_lora_rank)
        values = torch.einsum("thc,hvc->thv", output, w_value).flatten(1)
        return self.linear("self_attn.o_proj", values), indices

    def select(
        self,
        x: Tensor,
        q_latent: Tensor,
        angles: tuple[Tensor, Tensor],
        offsets: Tensor,
        length: int = 0,
    ) -> Tensor:
        """The indexer: query and key rotate their first qk_rope_head_dim features.

        Where all of `length` keys are attended it is run only to be watched.
        """
        c = self.config
        prefix = "self_attn.indexer."
        if length and not self._watched("indexer"):
            for path, value in (("wq_b", q_latent), ("wk", x), ("weights_proj", x)):
                if self.observer is not None:
                    self.linear(prefix + path, value)
            return _all_before(length, x.shape[0], c.index_topk, x.device)
        query = self.linear(prefix + "wq_b", q_latent)
        query = query.unflatten(-1, (c.index_n_heads, c.index_head_dim))
        key = F.layer_norm(
            self.linear(prefix + "wk", x).float(),
            (c.index_head_dim,),
            self.vector(prefix + "k_norm.weight"),
            self.vector(prefix + "k_norm.bias"),
            INDEX_NORM_EPS,
        ).to(x.dtype)
        gates = self.linear(prefix + "weights_proj", x).float()
        gates = gates * (c.index_n_heads**-0.5 * c.index_head_dim**-0.5)
        query, key = self._rotate_first(query, angles), self._rotate_first(key, angles)
        if self.observer is not None:
            self.observer.indexer(query, key, gates, offsets)
        if length:
            return _all_before(length, x.shape[0], c.index_topk, x.device)
        select = _on_device("lightning_indexer", x) or lightning_indexer
        return select(query, key, gates, offsets, c.index_topk)

    def _attends_all(self, x: Tensor, offsets: Tensor) -> int:
        """Returns the sequences' length where a GPU may attend densely, else 0.

        It may where no query has more keys than the indexer chooses, all sequences are as long,
        and nobody asked to see what the attention reads.
        """
        if self._watched("attention") or not x.is_cuda or x.dtype != torch.bfloat16:
            return 0
        longest = self.length or int(offsets.diff().max())
        equal = longest * (len(offsets) - 1) == x.shape[0]
        return longest if equal and longest <= self.config.index_topk else 0

    def _positions(self, x: Tensor, offsets: Tensor) -> Tensor:
        if self.length:
            return torch.arange(x.shape[0], device=offsets.device) % self.length
        return positions(offsets)

    def _watched(self, what: str) -> bool:
        """Whether the observer looks at that itself."""
        if self.observer is None:
            return False
        return getattr(type(self.observer), what) is not getattr(Observer, what)

    def _rotate_first(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        rope = self.config.qk_rope_head_dim
        rotated = rotate(x[..., :rope], angles, self.config.indexer_rope_interleave)
        return torch.cat((rotated, x[..., rope:]), -1)

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        gate = self.linear(prefix + "gate_proj", x)
        up = self.linear(prefix + "up_proj", x)
        return self.linear(prefix + "down_proj", F.silu(gate) * up)

    def mixture(self, x: Tensor, hidden: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (hidden plus routed experts plus the shared one, indices, experts).

        The shared one is neither gated nor scaled.
        """
        c = self.config
        gates, experts = self.route(x)
        order, offsets = by_expert(experts, c.n_routed_experts)
        tokens = order // experts.shape[1]
        both = self.expert_gemm(names.GATE_UP, x, offsets, tokens, gather=True)
        inner = rows.swiglu(both)
        del both  # 4 GB at full size
        shared = None
        if c.n_shared_experts:
            shared = self.mlp("mlp.shared_experts.", x)
        if self.observer is not None and not self.observer.want_output:
            self.observer.experts(names.DOWN, inner, offsets, hidden[:0], tokens)
            return hidden, indices, experts
        down = self.expert_gemm(names.DOWN, inner, offsets, tokens)
        del inner
        return rows.add_choices(down, gates, order, shared, hidden), indices, experts

    def expert_gemm(
        self, path: str, x: Tensor, offsets: Tensor, tokens: Tensor, gather: bool = False
    ) -> Tensor:
        """One product of a stack; with `gather`, rows of x are still the tokens' own, unsorted."""
        if path in self.weights.coded:
            y = self.weights.coded[path].product(x, offsets, tokens if gather else None)
            if self.observer is not None:
                x = x.index_select(0, tokens) if gather else x
                self.observer.experts(path, x, offsets, y, tokens)
            return y
        grid = self.weights.activation[path]
        weight = self.weights.matrices[path]
        rounded = rows.round_activation(x, grid)
        if gather:  # a token's grid is its own, so rounding comes before the eightfold copy
            rounded = _rows_of(rounded, tokens)
            x = rounded if grid is None or self.observer is None else x.index_select(0, tokens)
        y = expert_gemm(rounded, weight, offsets)
        if self.observer is not None:
            self.observer.experts(path, x, offsets, y, tokens)
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns choose()'s (gates, experts) for x [tokens, hidden]."""
        logits = exact_linear(x, self.weights.matrices["mlp.gate"])
        if self.observer is not None:
            self.observer.linear("mlp.gate", x, logits)
        return choose(self.config, logits, self.vector("mlp.gate.e_score_correction_bias"))


def choose(config: ModelConfig, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (float32 gates, experts), both [tokens, experts a token], of a router's logits.

    The correction bias chooses but does not weigh, and never leaves float32: in bfloat16 its
    values collapse onto a handful and most tokens are rerouted.
    """
    scores = logits.sigmoid()
    experts = (scores + bias).topk(config.num_experts_per_tok, -1).indices
    gates = scores.gather(1, experts)
    if config.norm_topk_prob:
        gates = gates / (gates.sum(-1, keepdim=True) + ROUTER_NORM_EPS)
    return gates * config.routed_scaling_factor, experts


def by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the order that sorts the choices [tokens, choices] by expert, and their offsets.

    `order` int64 [tokens x choices] numbers them token by token; `offsets` [count + 1].
    """
    chosen, order = experts.flatten().to(torch.int16).sort(stable=True)
    ends = torch.arange(count + 1, dtype=torch.int16, device=experts.device)
    return order, torch.searchsorted(chosen, ends)


def _rows_of(x: Tensor, tokens: Tensor) -> Tensor:
    """Returns x[tokens], every token as often; a GPU sums its gradient in a fixed order, too."""
    if not x.is_cuda or not x.requires_grad:
        return x.index_select(0, tokens)
    place = torch.empty_like(tokens)
    place[tokens.argsort(stable=True)] = torch.arange(len(tokens), device=x.device)
    copies = x.unsqueeze(1).expand(-1, len(tokens) // len(x), -1).flatten(0, 1)
    return copies.index_select(0, place)


def attend_all(
    query: Tensor, latent: Tensor, k_rope: Tensor, w_key: Tensor, w_value: Tensor, length: int
) -> Tensor:
    """Causal attention over all keys [tokens, heads x value], keys and values taken apart.

    What the sparse one gives where everything is chosen, at a fifth of its work: a head has 256
    features instead of the latent's 576. `query` [tokens, heads, features] is rotated.
    """
    heads, nope, _ = w_key.shape
    rope = query.shape[-1] - nope
    padded = F.pad(w_key, (0, 0, 0, rope))  # the product leaves room for the rotated features
    key = row_gradients.keys(latent, k_rope, padded)
    value = F.linear(latent, w_value.flatten(0, 1)).unflatten(-1, (heads, -1))
    query, key, value = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return output.transpose(1, 2).flatten(2).flatten(0, 1)


def _all_before(length: int, tokens: int, topk: int, device: torch.device) -> Tensor:
    """Returns int32 [tokens, topk]: every position up to the query's own, then -1."""
    position = torch.arange(topk, dtype=torch.int32, device=device)
    row = torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(1) % length
    return torch.where(position <= row, position, -1)


def _on_device(op: str, x: Tensor) -> Callable[..., Any] | None:
    """Returns the Triton implementation of an op for bfloat16 on a GPU, None elsewhere."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.is_grad_enabled():
        return None
    if find_spec("triton") is None:
        return None
    found: Callable[..., Any] = getattr(import_module(f"fused_ops.{op}.triton_launch"), op)
    return found


def positions(offsets: Tensor) -> Tensor:
    """Returns each token's position within its own sequence, int64 [tokens]."""
    lengths = offsets.diff()
    total = int(offsets[-1])
    starts = torch.repeat_interleave(offsets[:-1], lengths, output_size=total)
    return torch.arange(total, device=offsets.device) - starts
