"""Where hidden states may lie: in the host's memory, or past a limit in files."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from glm5q.errors import OutputError
from glm5q.writer import write_error


@dataclass(frozen=True)
class Store:
    """How much of the host's memory a stream's states may take, and the folder for files past it.

    Two layers' states are there at a time. The files have no name, and end with the run; `filed`
    are their sizes in bytes.
    """

    memory_bytes: int | None = None
    folder: Path | None = None
    filed: list[int] = field(default_factory=list, compare=False)

    def takes(self, size: int) -> bool:
        """Whether two layers' states of `size` bytes lie in memory."""
        return self.memory_bytes is None or self.folder is None or 2 * size <= self.memory_bytes

    def part(self, streams: int) -> Store:
        """Returns what one of several streams may take of it."""
        memory = self.memory_bytes
        return replace(self, memory_bytes=None if memory is None else memory // streams)

    def beside(self, size: int) -> Store:
        """Returns what is left of it where `size` bytes are taken."""
        if self.memory_bytes is None:
            return self
        return replace(self, memory_bytes=max(0, self.memory_bytes - size))

    def file(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor in a new file. Raises OutputError where there is no space."""
        assert self.folder is not None
        size = dtype.itemsize * math.prod(shape)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # now, not as a signal later
                values = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype)
        except OSError as error:
            what = f"{size / 1e9:.3g} GB of hidden states, past --hidden-gb"
            raise OutputError(f"{what}: {write_error(self.folder, error)}") from error
        self.filed.append(size)
        return values.view(*shape)

    def check(self, size: int) -> None:
        """Raises OutputError where the folder's disk has no room for `size` bytes in files."""
        assert self.folder is not None
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise OutputError(
                f"{self.folder}: {free / 1e9:.3g} GB free, and {size / 1e9:.3g} GB of hidden "
                "states would lie there",
                "free some, or give more --hidden-gb",
            )


IN_MEMORY = Store()
