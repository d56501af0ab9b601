"""GLM-5 for training: the official forward, with experts of a layer kept in one tensor.

Shapes: B sequences, T tokens, D hidden, H heads, E experts, N = B * T.
Parameters are float32; matrix products run in `compute` (bfloat16 in training).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from glm5q.tiny.sparse import index_scores, kl_scores, select_bias


@dataclass(frozen=True)
class Shape:
    """Sizes of the embedded checkpoint."""

    vocab: int = 4032
    hidden: int = 256
    dense_width: int = 256
    expert_width: int = 256
    layers: int = 5
    dense_layers: int = 1
    experts: int = 16
    top_k: int = 4
    scaling: float = 2.5
    heads: int = 4
    q_rank: int = 64
    kv_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    index_heads: int = 32
    index_dim: int = 16
    index_topk: int = 256
    theta: float = 8e6
    eps: float = 1e-5
    latent_eps: float = 1e-5
    positions: int = 4096


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm computed in float32: [..., D] -> float32 [..., D]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotary, float32: x [B, T, heads, R], cos and sin [T, R / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def tables(length: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rotary tables, float32: cos and sin [length, rope / 2]."""
    steps = torch.arange(0, shape.rope, 2, device=device, dtype=torch.float32) / shape.rope
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] / shape.theta**steps
    return angle.cos(), angle.sin()


class Weight(nn.Module):
    """A bare `weight` of a given shape, so that names come out as in the checkpoint."""

    def __init__(self, *size: int, std: float | None = None) -> None:
        super().__init__()
        data = torch.ones(size) if std is None else torch.randn(size) * std
        self.weight = nn.Parameter(data)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] in the compute type -> [..., out]."""
        return fn.linear(x, self.weight.to(x.dtype))


def linear(inner: int, outer: int, gain: float = 1.0) -> Weight:
    """A projection [outer, inner] with standard deviation gain / sqrt(inner)."""
    return Weight(outer, inner, std=gain / math.sqrt(inner))


class Indexer(nn.Module):
    """Lightning indexer; all of it sees detached inputs in training."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.wq_b = linear(s.q_rank, s.index_heads * s.index_dim)
        self.wk = linear(s.hidden, s.index_dim)
        self.k_norm = nn.LayerNorm(s.index_dim, eps=1e-6)
        self.weights_proj = linear(s.hidden, s.index_heads)

    def forward(self, h: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """h [B, T, D], latent [B, T, q_rank] -> q [B, T, heads, dim], k [B, T, dim], gate."""
        s = self.s
        q = self.wq_b(latent).unflatten(-1, (s.index_heads, s.index_dim)).float()
        k = self.k_norm(self.wk(h).float())[:, :, None]
        q = torch.cat([rotate(q[..., : s.rope], cos, sin), q[..., s.rope :]], -1)
        k = torch.cat([rotate(k[..., : s.rope], cos, sin), k[..., s.rope :]], -1)[:, :, 0]
        gate = self.weights_proj(h).float() * (s.index_heads * s.index_dim) ** -0.5
        return q, k, gate


class Attention(nn.Module):
    """MLA, unabsorbed. Modes: "dense", "sparse" (the indexer's top-k), "recent" (last top-k)."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_a_proj = linear(s.hidden, s.q_rank)
        self.q_a_layernorm = Weight(s.q_rank)
        self.q_b_proj = linear(s.q_rank, s.heads * (s.nope + s.rope))
        self.kv_a_proj_with_mqa = linear(s.hidden, s.kv_rank + s.rope)
        self.kv_a_layernorm = Weight(s.kv_rank)
        self.kv_b_proj = linear(s.kv_rank, s.heads * (s.nope + s.value))
        self.o_proj = linear(s.heads * s.value, s.hidden, 0.3)
        self.indexer = Indexer(s)

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, mode: str, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """h [B, T, D] -> [B, T, D] and the indexer's loss on query rows [B, M] (or 0)."""
        s = self.s
        batch, length, _ = h.shape
        latent = rms(self.q_a_proj(h), self.q_a_layernorm.weight, s.latent_eps).to(h.dtype)
        q = self.q_b_proj(latent).unflatten(-1, (s.heads, s.nope + s.rope))
        kv = self.kv_a_proj_with_mqa(h)
        compressed = rms(kv[..., : s.kv_rank], self.kv_a_layernorm.weight, s.latent_eps)
        expanded = self.kv_b_proj(compressed.to(h.dtype)).unflatten(-1, (s.heads, -1))
        k_rope = rotate(kv[:, :, None, s.kv_rank :], cos, sin).to(h.dtype)
        q = torch.cat([q[..., : s.nope], rotate(q[..., s.nope :], cos, sin).to(h.dtype)], -1)
        k = torch.cat([expanded[..., : s.nope], k_rope.expand(-1, -1, s.heads, -1)], -1)
        v = fn.pad(expanded[..., s.nope :], (0, s.nope + s.rope - s.value))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        loss = h.new_zeros((), dtype=torch.float32)
        if rows is not None or mode == "sparse":
            iq, ik, gate = self.indexer(h.detach(), latent.detach(), cos, sin)
            if rows is not None:
                loss = self.index_loss(q.detach(), k.detach(), iq, ik, gate, rows)
        if mode == "dense":
            out = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            if mode == "sparse":
                scores = index_scores(iq.detach(), ik.detach(), gate.detach())
                bias = select_bias(scores, s.index_topk, h.dtype == torch.bfloat16)
            else:
                at = torch.arange(length, device=h.device)
                back = at[:, None] - at
                kept = (back >= 0) & (back < s.index_topk)
                bias = torch.where(kept, 0.0, -torch.inf).to(h.dtype).expand(batch, -1, -1)
            out = fn.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None])
        out = out[..., : s.value].transpose(1, 2).flatten(2)
        return self.o_proj(out), loss

    def index_loss(
        self, q: Tensor, k: Tensor, iq: Tensor, ik: Tensor, gate: Tensor, rows: Tensor
    ) -> Tensor:
        """KL(head-mean attention || softmax of index scores) over query rows [B, M]."""
        pick = rows[:, :, None]
        some = q.gather(2, pick[:, None].expand(-1, q.shape[1], -1, q.shape[3]))
        logits = torch.matmul(some, k.transpose(2, 3)).float() * q.shape[3] ** -0.5
        hidden = torch.arange(k.shape[2], device=k.device) > pick
        target = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1).mean(1)
        score = kl_scores(
            iq.gather(1, pick[..., None].expand(-1, -1, iq.shape[2], iq.shape[3])),
            ik,
            gate.gather(1, pick.expand(-1, -1, gate.shape[2])),
        )
        log = score.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
        gap: Tensor = (target * ((target + 1e-9).log() - log)).sum(-1).mean()
        return gap


class _Gather(torch.autograd.Function):
    """Rows picked so that each source row is used `copies` times: gradients gather as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        out = grad[back]
        if ctx.copies > 1:
            out = out.unflatten(0, (-1, ctx.copies)).sum(1)
        return out, None, None, None


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        out: Tensor = self.down_proj(fn.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Gate(nn.Module):
    """Router weight and the float32 selection bias."""

    e_score_correction_bias: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(s.experts, s.hidden) / math.sqrt(s.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(s.experts))


class Moe(nn.Module):
    """Sigmoid router, top-k of 16 experts and one shared expert."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.gate = Gate(s)
        std = 1 / math.sqrt(s.hidden)
        size = (s.experts, s.expert_width, s.hidden)
        self.gate_up = nn.Parameter(torch.randn(size[0], 2 * size[1], size[2]) * std)
        self.down = nn.Parameter(torch.randn(size[0], size[2], size[1]) * 0.15 * std)
        self.shared_experts = Mlp(s.hidden, s.expert_width)
        self.grouped = True

    def forward(self, h32: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """h32 [B, T, D] float32 -> output, tokens per expert [E], balance loss."""
        s = self.s
        flat = h32.flatten(0, 1)
        score = fn.linear(flat, self.gate.weight).sigmoid()
        chosen = (score + self.gate.e_score_correction_bias).topk(s.top_k, -1).indices
        weight = score.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * s.scaling
        hits = fn.one_hot(chosen, s.experts).sum(1)
        load = hits.sum(0)
        share = score / score.sum(-1, keepdim=True)
        balance = (share.mean(0) * load / load.sum()).sum() * s.experts
        x = flat.to(compute)
        run = self.grouped_experts if self.grouped else self.every_expert
        out = run(x, chosen, weight.to(compute), load) + self.shared_experts(x)
        return out.view(h32.shape), load, balance

    def grouped_experts(self, x: Tensor, chosen: Tensor, weight: Tensor, load: Tensor) -> Tensor:
        """Tokens sorted by expert, grouped matrix products: x [N, D] -> [N, D]."""
        k = self.s.top_k
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        ends = load.cumsum(0).to(torch.int32)
        gather: Callable[..., Tensor] = _Gather.apply
        rows = gather(x, order // k, inverse, k)
        both = torch._grouped_mm(rows, self.gate_up.to(x.dtype).transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, -1)
        down = self.down.to(x.dtype).transpose(1, 2)
        done = torch._grouped_mm(fn.silu(gate) * up, down, offs=ends)
        done = gather(done, inverse, order, 1).unflatten(0, (-1, k))
        mixed: Tensor = (done * weight[..., None]).sum(1)
        return mixed

    def every_expert(self, x: Tensor, chosen: Tensor, weight: Tensor, load: Tensor) -> Tensor:
        """All experts on all tokens, unchosen ones weighted zero: x [N, D] -> [N, D]."""
        del load
        spread = torch.zeros(len(x), self.s.experts, dtype=x.dtype, device=x.device)
        spread = spread.scatter(1, chosen, weight)
        both = fn.linear(x, self.gate_up.flatten(0, 1).to(x.dtype))
        gate, up = both.unflatten(1, (self.s.experts, -1)).chunk(2, -1)
        mixed: Tensor = (fn.silu(gate) * up * spread[..., None]).flatten(1)
        return mixed @ self.down.to(x.dtype).transpose(1, 2).flatten(0, 1)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, s: Shape, dense: bool) -> None:
        super().__init__()
        self.s = s
        self.input_layernorm = Weight(s.hidden)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Weight(s.hidden)
        self.mlp: Mlp | Moe = Mlp(s.hidden, s.dense_width) if dense else Moe(s)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mode: str,
        rows: Tensor | None,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x [B, T, D] float32 -> x, indexer loss, expert load, balance loss."""
        h = rms(x, self.input_layernorm.weight, self.s.eps).to(compute)
        out, index_loss = self.self_attn(h, cos, sin, mode, rows)
        x = x + out
        h = rms(x, self.post_attention_layernorm.weight, self.s.eps)
        if isinstance(self.mlp, Moe):
            out, load, balance = self.mlp(h, compute)
            return x + out, index_loss, load, balance
        return x + self.mlp(h.to(compute)), index_loss, None, index_loss * 0


class Mtp(Layer):
    """The multi-token-prediction layer: predicts one token further than the model."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s, dense=False)
        self.enorm = Weight(s.hidden)
        self.hnorm = Weight(s.hidden)
        self.eh_proj = linear(2 * s.hidden, s.hidden)
        self.shared_head = nn.ModuleDict({"norm": Weight(s.hidden)})


class TinyGlm(nn.Module):
    """The whole model; `forward` gives final hidden states, the loss lives in train.py."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.compute = torch.bfloat16
        self.embed_tokens = Weight(s.vocab, s.hidden, std=0.3)
        self.layers = nn.ModuleList([Layer(s, i < s.dense_layers) for i in range(s.layers)])
        self.mtp = Mtp(s)
        self.norm = Weight(s.hidden)
        self.lm_head = linear(s.hidden, s.vocab, 0.5)

    def trunk(
        self, tokens: Tensor, mode: str, rows: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """tokens [B, T] -> hidden [B, T, D], indexer losses, loads, balance losses by layer."""
        cos, sin = tables(tokens.shape[1], self.s, tokens.device)
        x = fn.embedding(tokens, self.embed_tokens.weight)
        loads, index_losses, balances = [], [], []
        for layer in self.layers:
            x, index_loss, load, balance = layer(x, cos, sin, mode, rows, self.compute)
            index_losses.append(index_loss)
            balances.append(balance)
            if load is not None:
                loads.append(load)
        return rms(x, self.norm.weight, self.s.eps), index_losses, loads, balances

    def forward(
        self, tokens: Tensor, after: Tensor, mode: str = "dense", rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """tokens and the next tokens [B, T] -> hidden, MTP hidden, indexer loss, loads, balance.

        Hidden states are [B, T, D] after their final norms, loads [MoE layers + 1, E].
        """
        s = self.s
        cos, sin = tables(tokens.shape[1], s, tokens.device)
        hidden, index_losses, loads, balances = self.trunk(tokens, mode, rows)
        ahead = rms(fn.embedding(after, self.embed_tokens.weight), self.mtp.enorm.weight, s.eps)
        state = rms(hidden, self.mtp.hnorm.weight, s.eps)
        z = self.mtp.eh_proj(torch.cat([ahead, state], -1).to(self.compute)).float()
        z, index_loss, load, balance = self.mtp(z, cos, sin, mode, rows, self.compute)
        index_losses.append(index_loss)
        balances.append(balance)
        loads.append(load)
        norm = self.mtp.shared_head["norm"]
        assert isinstance(norm, Weight)
        drafted = rms(z, norm.weight, s.eps)
        return (
            hidden,
            drafted,
            torch.stack(index_losses).sum(),
            torch.stack(loads),
            torch.stack(balances).sum(),
        )
