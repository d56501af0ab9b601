"""Stacks of experts that break rounding, and what either route makes of them.

As a program under TRITON_INTERPRET it writes the batched route's answers to a file.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from calibrate.candidates import Candidates, LayerPlan, find_candidates
from calibrate.observe import Moments, Statistics
from glm5q import names
from glm5q.types import IntScheme
from recipes.schema import Gptq

ROWS, COLUMNS, TOKENS = 8, 128, 400
DEAD = (5, 77)
EXPERTS = ("dead columns", "duplicated columns", "no token", "one token", "few tokens", "all zero")
METHODS = ("rtn", "gptq", "descent")
SCHEME = IntScheme(4, COLUMNS, "bfloat16", None)
PLAN = Gptq.model_validate(
    {
        "method": "gptq", "bits": 4, "group_size": COLUMNS, "scale_dtype": "bfloat16",
        "activation": None, "clip": {"steps": 3, "lowest": 0.6}, "damping": 0.05,
        "act_order": True, "pooling": 0.0,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """Weights [experts, out, in] and the sums that calibration made of their tokens."""

    weight: Tensor
    moments: Moments


def inputs(tokens: int, seed: int) -> Tensor:
    """Alike neighbours and two loud channels, [tokens, COLUMNS]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, COLUMNS, generator=generator)
    x = x + 0.7 * x.roll(1, -1)
    x[:, [3, 90]] *= 8
    return x


def tokens_of(expert: str, seed: int = 1) -> Tensor:
    """What an expert saw [tokens, COLUMNS]; another seed for what it will see."""
    count = {"no token": 0, "one token": 1, "few tokens": 5}.get(expert, TOKENS)
    x = inputs(count, seed)
    if expert == "dead columns":
        x[:, DEAD] = 0
    elif expert == "duplicated columns":
        x[:, 9], x[:, 10] = x[:, 8], -2 * x[:, 8]
    elif expert == "all zero":
        x.zero_()
    elif expert == "one token":  # unlike all others
        x[:] = 3 * (-1.0) ** torch.arange(COLUMNS)
    return x


def weights(count: int, size: float) -> Tensor:
    """Of alike rows, the last one zero and the one before too small for any scale."""
    generator = torch.Generator().manual_seed(0)
    weight = size * torch.randn(count, ROWS, COLUMNS, generator=generator)
    weight[:, -1], weight[:, -2] = 0, 1e-40
    return weight


def seen(parts: list[Tensor]) -> Moments:
    """What Statistics sums of each expert's tokens."""
    statistics = Statistics({names.DOWN})
    bounds = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    x = torch.cat(parts)
    statistics.experts(names.DOWN, x, bounds, x, torch.arange(len(x)))
    statistics.complete()
    return statistics.of(names.DOWN)


def stacks() -> dict[str, Stack]:
    """Each stack by name: experts short of tokens; a layer of zeros only; a Gram that holds nan."""
    damaged = seen([inputs(TOKENS, 1)])
    assert damaged.gram is not None
    damaged.gram[0, 3, 3] = torch.nan
    return {
        "experts": Stack(weights(len(EXPERTS), 0.02), seen([tokens_of(e) for e in EXPERTS])),
        "zeros": Stack(weights(1, 1e-13), seen([torch.zeros(TOKENS, COLUMNS)])),
        "nan": Stack(weights(1, 0.02), damaged),
    }


def solve(stack: Stack, plan: Gptq = PLAN) -> tuple[Candidates, LayerPlan]:
    """Returns all METHODS' candidates: a layer is rounded with descent or without."""
    without, layer_plan = LayerPlan(descent=0), LayerPlan(descent=1)
    first, found = (
        find_candidates(1, names.DOWN, stack.weight, stack.moments, plan, one)
        for one in (without, layer_plan)
    )
    codes, scales = first.codes | found.codes, first.scales | found.scales
    return replace(found, codes=codes, scales=scales), layer_plan


def main(file: Path) -> None:
    """Writes every stack's codes and scales by the batched kernels, on this CPU."""
    torch.set_num_threads(1)
    from calibrate import batched

    batched.fits = lambda *_: True  # type: ignore[assignment]
    answers: dict[str, Tensor] = {}
    for name, stack in stacks().items():
        found, plan = solve(stack)
        for method in METHODS:
            answers[f"{name}/{method}/codes"] = found.codes[method].contiguous()
            answers[f"{name}/{method}/scales"] = found.scales[method].contiguous()
        said = [f"{one.action}\n" for one in plan.fallbacks if one.expert is not None]
        answers[f"{name}/said"] = torch.tensor(list("".join(said).encode()), dtype=torch.uint8)
    save_file(answers, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
