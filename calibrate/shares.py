"""Which windows of a run are one process's, and in which chunks it runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The windows one process runs: some for statistics, then some held out, by number.

    `bounds` are its chunks' ends, numbered from its own first window; no chunk has both kinds.
    """

    statistics: range
    held_out: range
    bounds: tuple[int, ...]

    @property
    def split(self) -> range:
        """Which of its own windows are held out, numbered from its first."""
        return range(len(self.statistics), len(self.statistics) + len(self.held_out))

    def of(self, windows: Tensor) -> Tensor:
        """Returns this process's own of all windows [windows, ...]."""
        kinds = (self.statistics, self.held_out)
        return torch.cat([windows[kind.start : kind.stop] for kind in kinds])

    def number(self, own: int) -> int:
        """Returns the number among all windows of one of its own."""
        before = len(self.statistics)
        return self.statistics[own] if own < before else self.held_out[own - before]


def ends(windows: int, at_once: int, fewest: int) -> list[int]:
    """Returns where chunks of at most `at_once` windows end, 0 first: an even number if it can."""
    count = max(-(-windows // at_once), min(windows, fewest))
    count = min(windows, count + count % 2)
    return [windows * index // count for index in range(count + 1)] if count else [0]


def cut(bounds: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the ends of chunks cut into even ones of at most `most` windows."""
    found = [bounds[0]]
    for start, end in pairwise(bounds):
        parts = -(-(end - start) // most)
        found += [start + (end - start) * part // parts for part in range(1, parts + 1)]
    return tuple(found)
