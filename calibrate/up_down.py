"""Columns of down_proj made finer where its input is large, exactly, through SwiGLU.

A row of up_proj divided by 2^k and the same column of down_proj multiplied by it leave an expert's
output as it is (AWQ's scale, arXiv 2306.00978, for the one pair of matrices that nothing but a
product of elements lies between). Powers of two, so the fold is exact in every dtype: up_proj keeps
its codes, whose scales are halved so often, and down_proj's large inputs meet a finer grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate.candidates import Candidates, LayerPlan
from calibrate.folds import Problem
from calibrate.observe import Moments
from calibrate.ranks import ALONE, Ranks
from glm5q import names
from glm5q.layer import Codes, Fold, Layer, powers_of_two
from recipes.schema import Gptq

FLOOR = 1e-3  # of the mean input: what a column that is hardly ever excited counts as


def method(alpha: float) -> str:
    """What a record calls the candidate."""
    return f"up_down {alpha:g}"


def exponents(square: Tensor, alpha: float) -> Tensor:
    """Returns int8 k [stack, in]: 2^k is about (rms / geometric mean of all columns' rms)^alpha.

    `square` [stack, in] are the columns' mean squares. All zeros where nothing was seen.
    """
    mean = square.mean(-1, keepdim=True)
    floored = torch.where(mean > 0, square.clamp(min=FLOOR**2 * mean), torch.ones_like(square))
    size = floored.log2() / 2
    return (alpha * (size - size.mean(-1, keepdim=True))).round().to(torch.int8)


def with_folds(
    candidates: Candidates,
    layer: int,
    stack: Tensor,
    moments: Moments,
    wanted: Gptq,
    plan: LayerPlan,
    alphas: Sequence[float],
    ranks: Ranks = ALONE,
) -> Candidates:
    """Returns the candidates for down_proj with one more for each alpha, on folded columns.

    Held-out tokens choose, expert by expert, between those and no fold. Pooling and the ridge are
    of folded inputs: beside inputs thirty times the others', a part of their mean square would
    drown the rest. Costs one rounding of the stack for each alpha.
    """
    problem = Problem(layer, names.DOWN, stack, moments, wanted)
    for alpha in alphas:
        fold = exponents(moments.square, alpha)
        ranks.complete(fold)
        candidates = problem.with_fold(candidates, plan, method(alpha), fold, ranks)
    return candidates


def made_up_for(
    layer: Layer, candidates: Mapping[str, Candidates], methods: Mapping[str, list[str]]
) -> Layer:
    """Returns the layer with up_proj divided where the method taken for down_proj multiplied."""
    down = candidates.get(names.DOWN)
    if down is None or not down.folds:
        return layer
    columns = torch.zeros_like(next(iter(down.folds.values())))
    for expert, taken in enumerate(methods[names.DOWN]):
        if taken in down.folds:
            columns[expert] = down.folds[taken][expert]
    rows = F.pad(-columns, (columns.shape[1], 0))  # gate's stay
    both = layer.matrices[names.GATE_UP]
    if not isinstance(both, Codes):
        raise TypeError("down_proj has codes and gate and up have none")
    scale = both.scale * powers_of_two(rows).unsqueeze(-1)
    matrices: dict[str, Tensor | Codes] = {names.GATE_UP: replace(both, scale=scale)}
    before = layer.folds.get(names.GATE_UP, Fold())
    found = {names.GATE_UP: replace(before, rows=rows), names.DOWN: Fold(columns=columns)}
    return replace(layer.with_matrices(matrices), folds=layer.folds | found)
