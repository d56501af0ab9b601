"""Which windows of a run are one process's, and where their hidden states may lie."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from glm5q.writer import write_error


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


@dataclass(frozen=True)
class Store:
    """How much of the host's memory hidden states may take, and the folder for files if it is less.

    Two layers' states are there at a time. The files have no name, and end with the run.
    """

    memory_bytes: int | None = None
    folder: Path | None = None

    def takes(self, size: int) -> bool:
        """Whether two layers' states of `size` bytes lie in memory."""
        return self.memory_bytes is None or self.folder is None or 2 * size <= self.memory_bytes

    def file(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor in a new file. Raises OutputError where there is no space."""
        assert self.folder is not None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                size = dtype.itemsize * math.prod(shape)
                os.posix_fallocate(file.fileno(), 0, size)  # now, not as a signal later
                values = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype)
        except OSError as error:
            raise write_error(self.folder, error) from error
        return values.view(*shape)


IN_MEMORY = Store()
