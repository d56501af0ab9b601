"""The least seconds a machine could take for a layer's calibration, from its shapes and ceilings.

Counted: each product once in bfloat16 with float32 sums, a Gram's half, one factorisation of n^3/3
in float32 a matrix, and for what is not a product its bytes once. Ceilings are measured. What FP8
cores multiply may take less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from calibrate.observe import INPUT_OF
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.types import Role
from recipes.schema import Gptq, Recipe

SIDE = 8192  # of the square products that measure a GPU; a CPU takes a sixteenth
COPY_BYTES = 1 << 32
REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """What a machine does in a second: products in two precisions, bytes read and written."""

    bfloat16_flop_s: float
    float32_flop_s: float
    bytes_s: float


@dataclass(frozen=True)
class Work:
    """One layer's calibration: `held_out` of `tokens`, in windows of `length`."""

    config: ModelConfig
    layer: int
    tokens: int
    held_out: int
    length: int
    recipe: Recipe


def measure(device: str) -> Ceilings:
    """Returns this machine's ceilings: medians of products and copies that fill it."""
    on_gpu = device.startswith("cuda")
    side = SIDE if on_gpu else SIDE // 16
    size = COPY_BYTES if on_gpu else COPY_BYTES // 64

    def product(dtype: torch.dtype) -> float:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return float(2 * side**3 / _median_s(lambda: left @ right, on_gpu))

    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / _median_s(lambda: target.copy_(source), on_gpu)
    half = product(torch.bfloat16) if on_gpu else product(torch.float32)
    return Ceilings(half, product(torch.float32), copied)


def _median_s(do: Callable[[], object], on_gpu: bool) -> float:
    times = []
    for _ in range(REPEATS + 1):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        do()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[REPEATS // 2]


def floors(work: Work, ceilings: Ceilings) -> dict[str, float]:
    """Returns the least seconds of each of the loop's stages."""
    bf16, fp32 = ceilings.bfloat16_flop_s, ceilings.float32_flop_s
    seen = work.tokens - work.held_out
    a_token = forward_flop(work.config, work.layer, work.length)
    weights = sum(rows * columns * count for rows, columns, count in _second_order(work))
    gram = sum(columns**2 * rows for columns, rows in _grams(work, seen))
    factor = sum(columns**3 / 3 * count for _, columns, count in _second_order(work))
    feedback = sum(rows * columns**2 * count for rows, columns, count in _second_order(work))
    rounds = work.recipe.steps.descent
    candidates = 2  # plain rounding and what is better
    c, expert, inner = work.config, _expert_flop(work.config), work.config.moe_intermediate_size
    outputs = expert / 3  # down_proj's product, which three of the stages do without
    return {
        "guidance": work.tokens * (3 * a_token - outputs) / bf16,  # forward, again, gradient
        "correction": work.tokens * (a_token + 3 * c.hidden_size**2) / bf16,  # and two sums
        "inner": (  # source and quantized gate and up; sums of seen, two down_proj of held out
            seen * (a_token + outputs + c.num_experts_per_tok * 3 * inner**2)
            + work.held_out * (a_token + 4 * outputs)
        )
        / bf16,
        "statistics": (seen * (a_token - outputs) + gram) / bf16,
        "round": factor / fp32
        + (feedback + 4 * rounds * feedback) / bf16
        + 2 * weights / ceilings.bytes_s,
        "held-out choice": work.held_out * (a_token + candidates * expert) / bf16,
        "write": weights * 1.5 / ceilings.bytes_s,
        "move on": work.tokens * a_token / bf16,
    }


def forward_flop(config: ModelConfig, layer: int, length: int) -> float:
    """Returns a token's forward through a layer, causal attention over its window's keys."""
    c = config
    plain = sum(2 * m.shape[0] * m.shape[1] for m in names.layer_modules(c, layer) if not m.stacked)
    keys = min(length / 2, c.index_topk)
    attention = 2 * c.num_attention_heads * keys * (c.qk_head_dim + c.v_head_dim)
    return plain + attention + (_expert_flop(c) if c.moe[layer] else 0)


def _expert_flop(c: ModelConfig) -> float:
    return 2 * c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size


def _second_order(work: Work) -> list[tuple[int, int, int]]:
    """Returns (rows, columns, how many) of the matrices that GPTQ rounds."""
    found = []
    for module in names.layer_modules(work.config, work.layer):
        if isinstance(work.recipe.plan(module.role, work.layer, work.config), Gptq):
            count = module.shape[0] if module.stacked else 1
            found.append((module.shape[-2], module.shape[-1], count))
    return found


def _grams(work: Work, seen: int) -> list[tuple[int, int]]:
    """Returns (columns, rows summed) of every Gram, a stack's over all its experts.

    Matrices that read one input share its Gram.
    """
    found = {}
    for module in names.layer_modules(work.config, work.layer):
        if isinstance(work.recipe.plan(module.role, work.layer, work.config), Gptq):
            share = work.config.num_experts_per_tok if module.role is Role.ROUTED_EXPERT else 1
            found[INPUT_OF.get(module.path, module.path)] = module.shape[-1], seen * share
    return list(found.values())
