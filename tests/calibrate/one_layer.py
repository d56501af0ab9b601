"""One layer of a checkpoint quantized in memory, its hidden states from random tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from calibrate.methods import choose, gram_paths, plan_layer
from calibrate.observe import HeldOutErrors, Statistics
from calibrate.states import advance, embed, forward
from glm5q.checkpoint import open_checkpoint
from glm5q.layer import Layer, runnable
from recipes.schema import Recipe


def quantize_one(
    root: Path, asked: Recipe, number: int, windows: int, seen: int, length: int
) -> tuple[Layer, dict[str, list[str]], HeldOutErrors]:
    """Returns (layer `number` quantized, methods, errors on the windows after the `seen` first)."""
    source = open_checkpoint(root)
    config = source.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (windows, length), generator=generator)
    states = embed(source, tokens)
    for before in range(number):
        states = advance(config, before, runnable(source.layer(before)), states)
    layer = source.layer(number)
    weights = runnable(layer)
    statistics = Statistics(gram_paths(asked, number, config))
    forward(config, weights, states, statistics, range(seen))
    statistics.complete()
    plan = plan_layer(layer, weights, statistics, asked, config)
    errors = HeldOutErrors(
        {path: c.to_measure(torch.float32) for path, c in plan.candidates.items()},
        {path: c.activation() for path, c in plan.candidates.items()},
    )
    forward(config, weights, states, errors, range(seen, windows))
    found, methods = choose(layer, plan, errors)
    return found, methods, errors
