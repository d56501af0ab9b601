"""Muon for the matrices inside the layers, AdamW for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glm5q.tiny.model import TinyGlm


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz: [n, rows, cols] -> nearly orthogonal, same shape (bfloat16 on a GPU)."""
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    out: Tensor = x.transpose(1, 2) if tall else x
    return out


class Muon:
    """Momentum, orthogonalised; update size matched to AdamW's (0.2 * sqrt(larger side))."""

    def __init__(self, params: list[nn.Parameter], decay: float = 0.1) -> None:
        self.decay = decay
        self.groups: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = {}
        for p in params:
            self.groups.setdefault(self.size(p), []).append((p, torch.zeros_like(p)))
        gpu = params[0].is_cuda
        self.orthogonal = torch.compile(orthogonal, dynamic=False) if gpu else orthogonal

    @staticmethod
    def size(p: nn.Parameter) -> tuple[int, int]:
        """Matrix size; a fused gate_up counts as two matrices an expert."""
        rows, cols = p.shape[-2:]
        return (rows // 2, cols) if p.dim() == 3 and rows == 2 * cols else (rows, cols)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every matrix."""
        for size, group in self.groups.items():
            moments = [m for _, m in group]
            grads = [p.grad for p, _ in group if p.grad is not None]
            torch._foreach_lerp_(moments, grads, 0.05)
            ahead = torch._foreach_lerp(grads, moments, 0.95)
            stacked = torch.cat([a.reshape(-1, *size) for a in ahead])
            update = self.orthogonal(stacked).float() * (0.2 * max(size) ** 0.5)
            params: list[Tensor] = [p for p, _ in group]
            parts = update.split([p.numel() // (size[0] * size[1]) for p in params])
            torch._foreach_mul_(params, 1 - lr * self.decay)
            shaped = [u.view_as(p) for u, p in zip(parts, params, strict=True)]
            torch._foreach_add_(params, shaped, alpha=-lr)


class Optimizers:
    """All three parts: matrices, other model parameters, indexers; clipped apart."""

    def __init__(self, model: TinyGlm) -> None:
        named = list(model.named_parameters())
        self.indexer = [p for n, p in named if ".indexer." in n]
        self.model = [p for n, p in named if ".indexer." not in n]
        matrices = [
            p
            for n, p in named
            if p.dim() >= 2
            and ".indexer." not in n
            and not n.startswith(("embed_tokens", "lm_head"))
            and ".gate.weight" not in n
        ]
        kept = {id(p) for p in matrices}
        rest = [p for p in self.model if id(p) not in kept]
        self.muon = Muon(matrices)
        fused = rest[0].is_cuda
        flat = [p for p in rest + self.indexer if p.dim() < 2]
        deep = [p for p in rest + self.indexer if p.dim() >= 2]
        self.adam = torch.optim.AdamW(
            [{"params": deep, "weight_decay": 0.01}, {"params": flat, "weight_decay": 0.0}],
            lr=0.0,
            betas=(0.9, 0.95),
            fused=fused,
        )

    def step(self, lr: float) -> None:
        """Clip, update, clear."""
        nn.utils.clip_grad_norm_(self.model, 1.0)
        nn.utils.clip_grad_norm_(self.indexer, 1.0)
        self.muon.step(2 * lr)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for p in self.model:
            p.grad = None
