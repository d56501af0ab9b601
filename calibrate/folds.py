"""A weight and its input's moments as if folded, and rounded so; a layer as one is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from calibrate.candidates import Candidates, LayerPlan, find_candidates
from calibrate.observe import Moments
from calibrate.ranks import Ranks
from glm5q.layer import Layer, powers_of_two
from recipes.schema import Gptq, Rtn


@dataclass(frozen=True)
class Problem:
    """A matrix that gets codes: its weight [stack, out, in], its input's moments, and plan."""

    layer: int
    path: str
    weight: Tensor
    moments: Moments
    wanted: Rtn | Gptq

    def with_fold(
        self, candidates: Candidates, plan: LayerPlan, name: str, fold: Tensor, ranks: Ranks
    ) -> Candidates:
        """Returns the candidates with one of columns x 2^fold [stack, in], the last method's."""
        apart = LayerPlan(plan.descent)  # what happens to the Grams was said already
        with folded(self.weight, self.moments, fold) as divided:
            found = find_candidates(
                self.layer, self.path, self.weight, divided, self.wanted, apart, ranks
            )
        plan.own += apart.own
        last = next(reversed(found.codes))
        return replace(
            candidates,
            codes=candidates.codes | {name: found.codes[last]},
            scales=candidates.scales | {name: found.scales[last]},
            folds=candidates.folds | {name: fold},
        )


@contextmanager
def folded(stack: Tensor, moments: Moments, fold: Tensor) -> Iterator[Moments]:
    """Yields the moments of inputs over 2^fold, while the columns of `stack` are times it.

    `stack` [stack, out, in], `fold` int8 [stack, in]. In place, since the Grams of a layer's
    experts fill half a GPU; powers of two, so that afterwards every bit is as it was.
    """
    _scale(stack, moments.gram, fold)
    try:
        yield replace(moments, square=moments.square * powers_of_two(-fold).square())
    finally:
        _scale(stack, moments.gram, -fold)


def _scale(stack: Tensor, gram: Tensor | None, fold: Tensor) -> None:
    power = powers_of_two(fold).unsqueeze(1)
    stack.mul_(power.to(stack.dtype))
    if gram is not None:
        over = powers_of_two(-fold)
        gram.mul_(over.unsqueeze(1)).mul_(over.unsqueeze(2))


def as_folded(source: Layer, quantized: Layer) -> Layer:
    """Returns the source's layer folded as the quantized one is: the same function, bit for bit."""
    if not quantized.folds:
        return source
    folded = {path: fold.of(source.floats(path)) for path, fold in quantized.folds.items()}
    return replace(source.with_matrices(dict(folded)), vectors=quantized.vectors)
