"""Runs row_gradients under Triton's interpreter against float64 autograd, and prints differences.

A process of its own, as TRITON_INTERPRET counts when a kernel's module is first imported. Every
difference is relative to the largest value.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate import block, row_gradients, rows
from calibrate.guidance import backward
from calibrate.ranks import ALONE
from calibrate.states import States
from glm5q import names
from glm5q.checkpoint import open_checkpoint
from glm5q.layer import runnable
from tests import small

EPS, LENGTH = 1e-5, 24
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def difference(mine: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of several tensors' differences."""
    pairs = zip(mine, exact, strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


def compare(
    mine: Callable[..., Sequence[Tensor]], exact: Callable[..., Sequence[Tensor]], *x: Tensor
) -> float:
    """How far values and gradients at `x` of one function are from another's of float64."""
    answers = []
    slopes: list[Tensor] = []
    for function, dtype in ((mine, torch.float32), (exact, torch.float64)):
        leaves = [one.to(dtype).requires_grad_() for one in x]
        found = function(*leaves)
        slopes = slopes or [random(*one.shape) for one in found]
        wanted = torch.autograd.grad(found, leaves, [slope.to(dtype) for slope in slopes])
        answers.append([*found, *wanted])
    return difference(*answers)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def turned(x: Tensor, heads: int, first: int, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Adjacent pairs as complex numbers, multiplied by those of the angles."""
    kept, part = x.unflatten(1, (heads, -1)).tensor_split((first,), -1)
    factor = torch.complex(*(angle.to(x.dtype) for angle in angles)).unsqueeze(1)
    pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * factor
    return torch.cat((kept, torch.view_as_real(pairs).flatten(-2)), -1).flatten(1)


def norms() -> dict[str, float]:
    weight = random(100)

    def mine(x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        return row_gradients.add_and_norm(x, added, weight, EPS, torch.float32)

    return {
        "norm": compare(
            lambda x: (row_gradients.rms_norm(x, weight, EPS),),
            lambda x: (norm(x, weight),),
            random(7, 100),
        ),
        "norm of a part": compare(
            lambda x: (row_gradients.rms_norm(x[:, :100], weight, EPS),),
            lambda x: (norm(x[:, :100], weight),),
            random(7, 130),
        ),
        "norm of a sum": compare(
            mine, lambda x, y: (x + y, norm(x + y, weight)), random(7, 100), random(7, 100)
        ),
    }


def attention() -> dict[str, float]:
    """Rotations of four heads and, not for the kernel, three; keys of three heads."""
    found = {}
    for heads in (4, 3):
        angles = random(5, 4), random(5, 4)
        found[f"{heads} rotated heads"] = compare(
            lambda x, n=heads, a=angles: (row_gradients.rotate_heads(2 * x, n, 12, a),),
            lambda x, n=heads, a=angles: (turned(2 * x, n, 12, a),),
            random(5, heads * 20),
        )
    weight = F.pad(random(3, 12, 10), (0, 0, 0, 8))

    def exact(latent: Tensor, k_rope: Tensor) -> tuple[Tensor]:
        nope = torch.einsum("tc,hfc->thf", latent, weight[:, :12].to(latent.dtype))
        return (torch.cat((nope, k_rope.unsqueeze(1).expand(-1, 3, -1)), -1),)

    found["keys"] = compare(
        lambda latent, k_rope: (row_gradients.keys(latent, k_rope, weight),),
        exact,
        random(5, 10),
        random(5, 8),
    )
    return found


def gate() -> float:
    both, slope, gates = random(6, 2 * 96), random(6, 96), random(2, 3)
    order = torch.randperm(6, generator=GENERATOR)
    mine = row_gradients.gate_gradients(both, slope, gates, order)
    x, g = both.double().requires_grad_(), gates.double().requires_grad_()
    left, right = x.chunk(2, -1)
    product = F.silu(left) * right * g.flatten()[order].unsqueeze(1)
    exact = torch.autograd.grad(product, (x, g), slope.double())
    squares = torch.empty(6, dtype=torch.float64)
    squares[order] = exact[0].square().mean(-1)
    return difference(mine, (*exact, squares.view(2, 3)))


def layer(raw: dict[str, object]) -> float:
    """A layer's backward with the kernels against one of plain steps, which tests hold to autograd.

    All keys attended, as a GPU then goes a way of its own; an expert in eight has no token.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = open_checkpoint(small.write_checkpoint(Path(folder), raw | {"index_topk": LENGTH}))
        weights = runnable(source.layer(1))
    weights.vectors["mlp.gate.e_score_correction_bias"][3] = -9
    states, slope = States(random(2, LENGTH, 128)), random(2, LENGTH, 128)
    answers = []
    for kernels in (True, False):
        rows.fused = lambda _x, answer=kernels: answer
        block._Run._attends_all = lambda *_, answer=kernels: LENGTH * answer
        gradient, guidance = backward(source.config, 1, weights, states, slope.clone(), ALONE, [])
        assert guidance is not None
        answers.append([gradient, guidance.experts.float(), *guidance.weights.values()])
        assert list(guidance.weights) == [names.GATE_UP, names.DOWN]
    rows.fused = lambda _x: True
    return difference(*answers)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows.fused = lambda _x: True
    found = norms() | attention() | {"gate": gate()}
    found["layer"] = layer(small.GLM5)
    found["layer without a shared expert"] = layer(small.GLM5 | {"n_shared_experts": 0})
    json.dump(found, sys.stdout)
