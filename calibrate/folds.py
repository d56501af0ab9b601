"""A weight and its input's moments as if folded while that is asked for; a layer as one is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from calibrate.observe import Moments
from glm5q.layer import Layer, powers_of_two


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
