"""down_proj fitted to what an expert's rounded gate and up leave of its input.

The input h of an expert's down_proj becomes g once gate and up are rounded. h is about g (I + M),
M = (g'g + ridge)^-1 g'(h - g), and down's W becomes W (I + M / 2)', rounded by g's Gram. Half of M:
all of it is more than other text bears out. An expert keeps what it had where held-out tokens do
not gain. It costs a run of the layer and a rounding of the stack more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from calibrate.block import Observer
from calibrate.candidates import LayerPlan, find_candidates
from calibrate.correction import TINY, add_cross
from calibrate.folds import as_folded
from calibrate.gptq import blend, layer_mean, pooled_share, with_ridge
from calibrate.job import Job, Place
from calibrate.observe import Moments, RowWeights, segment_squares, segment_sums
from calibrate.products import Stack
from calibrate.rows import mirror_grams, row_squares, sum_grams, swiglu
from calibrate.solves import solve
from calibrate.states import forward
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Codes, Layer, runnable
from glm5q.types import ExpertResult, LayerResult, Role
from recipes.schema import Gptq

SHARE = 0.5  # of M
AT_ONCE = 32  # experts solved at once: 0.47 ms each on an H200, of 16 0.56, by LU 6.3
METHOD, STAGE = "inner", "inner"
Retry = Callable[[Callable[[], None]], None]  # does something, again where memory was short


@dataclass
class _Inner(Observer):
    """An Observer of the source's experts that knows what the quantized gate and up give."""

    gate_up: Stack
    guidance: RowWeights | None
    left: Tensor | None = None

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, tokens: Tensor) -> None:
        if path == names.GATE_UP:
            self.left = swiglu(self.gate_up.product(x, offsets))
            return
        assert self.left is not None
        weight = None
        if self.guidance is not None:
            weight = self.guidance.rows(path, tokens + self.first_token, offsets)
        self.both(self.left, x, offsets, y, weight)
        self.left = None

    def both(
        self, left: Tensor, x: Tensor, offsets: Tensor, y: Tensor, weight: Tensor | None
    ) -> None:
        """Given g and h [rows, in], the source's output y, and the rows' weights."""
        raise NotImplementedError


@dataclass
class Sums(_Inner):
    """Sums g'g and g'(h - g) [experts, in, in] and counts rows; see observe.Moments of dtypes."""

    want_output = False
    gram: Tensor | None = None
    cross: Tensor | None = None
    tokens: Tensor | None = None

    def both(
        self, left: Tensor, x: Tensor, offsets: Tensor, _y: Tensor, weight: Tensor | None
    ) -> None:
        if self.gram is None or self.cross is None or self.tokens is None:
            shape = (len(offsets) - 1, x.shape[1], x.shape[1])
            dtype = torch.float32 if x.is_cuda else torch.float64
            self.gram = torch.zeros(shape, dtype=dtype, device=x.device)
            self.cross = torch.zeros_like(self.gram)
            self.tokens = torch.zeros(shape[0], dtype=torch.int64)
        self.tokens += offsets.diff().cpu()
        change = x - left
        if weight is not None:
            share = weight.sqrt().unsqueeze(1).to(x.dtype)
            left, change = left * share, change * share
        sum_grams(left, offsets, self.gram)  # on a GPU one half, until _rounded
        for index, (start, end) in enumerate(pairwise(offsets.tolist())):
            if end > start:
                add_cross(self.cross[index], left[start:end], change[start:end])


@dataclass
class Errors(_Inner):
    """Sums |Q g - y|^2 of each expert for several Q, float64 [experts], and |y|^2."""

    tried: tuple[Stack, ...] = ()
    squares: Tensor = field(default_factory=lambda: torch.zeros(0))

    def both(
        self, left: Tensor, _x: Tensor, offsets: Tensor, y: Tensor, weight: Tensor | None
    ) -> None:
        for index, stack in enumerate(self.tried):
            rows = row_squares(stack.product(left, offsets), y)
            self.squares[index] += segment_sums(rows, offsets, weight)
        self.squares[len(self.tried)] += segment_squares(y, offsets, weight)


def with_inner(
    config: ModelConfig,
    target: Layer,
    quantized: Layer,
    result: LayerResult,
    job: Job,
    place: Place,
    retry: Retry,
) -> tuple[Layer, LayerResult]:
    """Returns the quantized layer with down projections fitted where that helps, and its record."""
    plan = job.recipe.plan(Role.ROUTED_EXPERT, target.number, config)
    gate_up, down = (quantized.matrices.get(path) for path in (names.GATE_UP, names.DOWN))
    if not isinstance(plan, Gptq) or not isinstance(gate_up, Codes) or not isinstance(down, Codes):
        return quantized, result
    with job.stage(STAGE, place):
        weights = runnable(as_folded(target, quantized), place.dtype, place.device)
        split = job.states.share.split if job.states.share is not None else range(0)
        guidance = job.guidance_of(target.number)
        sums = Sums(Stack.of(gate_up), guidance)

        def run(observer: _Inner, windows: range) -> None:
            forward(config, weights, job.states, observer, windows)

        def add() -> None:
            sums.gram = sums.cross = sums.tokens = None
            run(sums, range(split.start))

        retry(add)
        plans = LayerPlan(job.recipe.steps.descent)
        stack = weights.matrices[names.DOWN]
        codes, scale = _rounded(target.number, stack, sums, plan, plans, place)
        made = replace(down, codes=codes, scale=scale)
        job.fallbacks += plans.own
        said = tuple(one for one in plans.fallbacks if one not in result.fallbacks)
        result = replace(result, fallbacks=(*result.fallbacks, *said))
        errors = Errors(sums.gate_up, guidance)
        sums.gram = sums.cross = None

        def measure() -> None:
            errors.tried = Stack.of(down), Stack.of(made)
            errors.squares = torch.zeros(3, len(stack), dtype=torch.float64, device=place.device)
            run(errors, split)

        retry(measure)
        squares = place.ranks.add(errors.squares).cpu()
        better = (squares[1] < squares[0]) & (squares[2] > 0)  # unseen, nothing speaks for it
        return _taken(quantized, result, down, made, better, squares)


def _rounded(
    number: int, stack: Tensor, sums: Sums, plan: Gptq, plans: LayerPlan, place: Place
) -> tuple[Tensor, Tensor]:
    """Returns codes and scale of W (I + SHARE M)' of each expert's W, of every rank's."""
    assert sums.gram is not None
    assert sums.cross is not None
    assert sums.tokens is not None
    ranks, gram, cross = place.ranks, sums.gram, sums.cross
    for total in (gram, cross):
        ranks.collect(total)
    mine = ranks.mine(len(stack))
    if gram.is_cuda:
        mirror_grams(gram[mine.start : mine.stop])
    tokens = ranks.add(sums.tokens.to(place.device)).cpu()
    gram, cross = gram.float(), cross.float()
    square = gram.diagonal(dim1=1, dim2=2).clone()
    moments, crossed = Moments(square, tokens, gram), Moments(square, tokens, cross)
    share = pooled_share(moments, plan.pooling)
    means = [layer_mean(sums_of, ranks) for sums_of in (moments, crossed)]
    made, ridge = stack.clone(), max(plan.ridge, plan.damping)
    for start in range(mine.start, mine.stop, AT_ONCE):
        part = slice(start, min(start + AT_ONCE, mine.stop))
        own = with_ridge(blend(moments, part, means[0], share), ridge)
        own.diagonal(dim1=1, dim2=2).add_(TINY)
        change = solve(own, blend(crossed, part, means[1], share))
        made[part] += stack[part] @ (SHARE * change).mT.to(stack.dtype)  # as correction's
    found = find_candidates(number, names.DOWN, made, moments, plan, plans, ranks)
    method = list(found.codes)[-1]
    return found.codes[method], found.scales[method]


def _taken(
    quantized: Layer,
    result: LayerResult,
    down: Codes,
    made: Codes,
    better: Tensor,
    squares: Tensor,
) -> tuple[Layer, LayerResult]:
    """Returns layer and record with the experts that are `better` [experts] taken from `made`."""
    mine = better.to(down.codes.device).view(-1, 1, 1)
    codes = torch.where(mine, made.codes, down.codes)
    scale = torch.where(mine, made.scale, down.scale)
    layer = quantized.with_matrices({names.DOWN: replace(down, codes=codes, scale=scale)})
    if not bool(better.any()):
        return layer, result
    chosen = torch.where(better, squares[1], squares[0])
    error = float((chosen.sum() / squares[2].sum().clamp(min=1e-30)).sqrt())
    matrices = tuple(
        replace(one, method=f"{one.method}+{METHOD}", error=error)
        if one.module == names.DOWN
        else one
        for one in result.matrices
    )
    return layer, replace(result, matrices=matrices, experts=_experts(result, better, squares))


def _experts(result: LayerResult, better: Tensor, squares: Tensor) -> ExpertResult | None:
    """Each expert's record: one that was fitted says so, with its error after both products."""
    if result.experts is None:
        return None
    relative = (squares[1] / squares[2]).sqrt().tolist()
    old = result.experts
    errors = tuple(
        new if fitted else before
        for new, before, fitted in zip(relative, old.error, better.tolist(), strict=True)
    )
    methods = tuple(
        f"{before}/{METHOD}" if fitted else before
        for before, fitted in zip(old.method, better.tolist(), strict=True)
    )
    return replace(old, error=errors, method=methods)
