"""Runs the factoring kernels under Triton's interpreter against torch, and prints what differs.

A process of its own, as TRITON_INTERPRET counts when a kernel's module is first imported.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from calibrate import batched, gptq, solves
from calibrate.observe import Moments


def positive(stack: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(stack, 2 * columns, columns, generator=generator)
    x[:, :, ::37] *= 8
    gram = x.transpose(1, 2) @ x / (2 * columns)
    gram.diagonal(dim1=1, dim2=2).add_(0.3)
    return gram


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def factors(columns: int) -> dict[str, float]:
    """The factor of two matrices, its diagonal blocks, and a system of 33 right sides."""
    gram = positive(2, columns)
    made = solves.factor(lambda start, stop: gram[:, start:stop, start:].contiguous(), gram)
    exact = torch.linalg.cholesky(gram.double(), upper=True)
    blocks = exact.unflatten(2, (-1, solves.BLOCK)).unflatten(1, (-1, solves.BLOCK))
    corner = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    right = torch.randn(2, columns, 33, generator=torch.Generator().manual_seed(1))
    found, failed = solves._solve_in_panels(gram, right)
    return {
        "upper": relative(sum(made.upper, torch.zeros(())).triu(), exact),
        "corner": relative(made.corner.triu(), corner),
        "solved": relative(found, torch.linalg.solve(gram.double(), right.double())),
        "failed": float(made.failed.sum() + failed.sum()),
    }


def failing() -> dict[str, list[bool]]:
    """Which of four matrices have no factor, each losing it somewhere else; nan is not missed."""
    gram = positive(4, 384)
    gram[1, 2, 2] = -1  # the first steps
    gram[2, 300, 300] = torch.nan  # a later panel
    gram[3, :, 383] = gram[3, 383] = 0  # the last pivot
    right = torch.ones(4, 384, 2)
    found, failed = solves._solve_in_panels(gram, right)
    return {"failed": failed.tolist(), "finite": found.isfinite().flatten(1).all(1).tolist()}


def mixtures() -> dict[str, float]:
    """A part's mean Grams against gptq's, whole and as a panel in another order."""
    gram = positive(3, 256) * torch.tensor([500.0, 7.0, 0.0]).view(-1, 1, 1)
    moments = Moments(gram.diagonal(dim1=1, dim2=2), torch.tensor([500, 7, 0]), gram)
    layer, share, part = gptq.layer_mean(moments), gptq.pooled_share(moments, 0.5), slice(1, 3)
    exact = gptq.with_ridge(gptq.blend(moments, part, layer, share), 0.3)
    mine = batched.mixture(moments, part, layer, share, 0.3)
    damping = 0.1 * gptq.diagonal_mean(exact)
    damped = exact + torch.diag_embed(damping.unsqueeze(1).expand(-1, 256))
    generator = torch.Generator().manual_seed(2)
    order = torch.stack([torch.randperm(256, generator=generator) for _ in range(2)])
    ordered = torch.stack([one[place][:, place] for one, place in zip(damped, order, strict=True)])
    panel = mine.panel(order.to(torch.int32), damping, 128, 256)
    return {
        "diagonal": relative(mine.diagonal, exact.diagonal(dim1=1, dim2=2)),
        "mean": relative(mine.mean, gptq.diagonal_mean(exact)),
        "damped": relative(mine.damped(damping), damped),
        "panel": relative(panel, ordered[:, 128:, 128:]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = {
        "one panel": factors(128),
        "panels": factors(640),
        "failing": failing(),
        "mixtures": mixtures(),
    }
    json.dump(answer, sys.stdout)
