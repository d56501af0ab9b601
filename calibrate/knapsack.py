"""Choosing one option an item under a budget of bytes, least loss: a table over bytes, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS = 1 << 17  # of bytes that the table tells apart at most; above, options are rounded up to one


@dataclass(frozen=True)
class Option:
    """One way to hold an item."""

    nbytes: int
    loss: float


class Table:
    """The best choices under every budget at once, for losses that add up.

    Exact where the options' bytes are multiples of a common step and the range holds at most STEPS
    of them; else bytes are rounded up to a step, and a budget is never passed.
    """

    def __init__(self, items: Sequence[Sequence[Option]]) -> None:
        self._items = items
        self.least = sum(min(option.nbytes for option in item) for item in items)
        self.most = sum(max(option.nbytes for option in item) for item in items)
        extra = [[o.nbytes - min(p.nbytes for p in item) for o in item] for item in items]
        common = math.gcd(*(size for sizes in extra for size in sizes))
        self._step = max(common, -(-(self.most - self.least) // STEPS), 1)
        width = (self.most - self.least) // self._step + len(items) + 1
        best, self._taken = np.zeros(width), []
        for item, sizes in zip(items, extra, strict=True):
            losses = np.full((len(item), width), np.inf)
            for index, (option, size) in enumerate(zip(item, sizes, strict=True)):
                steps = -(-size // self._step)
                losses[index, steps:] = best[: width - steps] + option.loss
            self._taken.append(losses.argmin(0).astype(np.int8))
            best = losses.min(0)

    def pick(self, budget: int) -> list[int] | None:
        """Returns the option of each item, None where even the smallest ones are over `budget`."""
        if budget < self.least:
            return None
        low, high = (budget - self.least) // self._step, len(self._taken[0])
        picks = self._at(min(low, high - 1))
        # Options were rounded up: columns beyond the budget's may fit it in true bytes.
        while high - low > 1:
            middle = (low + high) // 2
            wider = self._at(middle)
            if self.nbytes(wider) <= budget:
                picks, low = wider, middle
            else:
                high = middle
        return picks

    def nbytes(self, picks: Sequence[int]) -> int:
        """Returns the bytes of one option an item."""
        return sum(item[at].nbytes for item, at in zip(self._items, picks, strict=True))

    def _at(self, column: int) -> list[int]:
        """Returns the best options in a column of the table."""
        picks = []
        for item, taken in zip(reversed(self._items), reversed(self._taken), strict=True):
            index = int(taken[column])
            least = min(option.nbytes for option in item)
            column -= -(-(item[index].nbytes - least) // self._step)
            picks.append(index)
        return picks[::-1]
