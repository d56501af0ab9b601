"""Several processes at one calibration: who rounds which expert, and how parts come together.

Every rank runs the same forward; of a stack of experts each sums and rounds its own, a run of
neighbours. An expert's rounding needs nothing of the others but the layer's mean Gram, which all
sum in the same order, so the codes are those of one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

SUM_ROWS = 128  # rows of every Gram gathered at a time


@dataclass(frozen=True)
class Ranks:
    """This process among `size`, numbered from 0; the first writes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, stack: int) -> range:
        """Returns this rank's entries of a stack; a single matrix is everybody's."""
        return self.part(stack, self.rank) if stack > 1 else range(stack)

    def part(self, stack: int, rank: int) -> range:
        return range(stack * rank // self.size, stack * (rank + 1) // self.size)

    def complete(self, stack: Tensor) -> None:
        """Fills a stack [stack, ...] in place with every rank's own entries."""
        if self.size == 1 or len(stack) == 1:
            return
        for rank in range(self.size):
            part = self.part(len(stack), rank)
            if part:
                dist.broadcast(stack[part.start : part.stop], rank)

    def sum_of_stack(self, stack: Tensor) -> Tensor:
        """Returns the sum over a stack [stack, in, in] of which each rank holds its own entries.

        In the order of one process: rows are gathered from all, then summed.
        """
        if self.size == 1 or len(stack) == 1:
            return stack.sum(0, keepdim=True)
        total = torch.empty_like(stack[:1])
        for start in range(0, stack.shape[1], SUM_ROWS):
            rows = stack[:, start : start + SUM_ROWS].contiguous()
            self.complete(rows)
            total[0, start : start + SUM_ROWS] = rows.sum(0)
        return total

    def firsts(self, value: bool, device: torch.device | str) -> bool:
        """Returns the first rank's answer; the others' is not asked. All wait for it."""
        if self.size == 1:
            return value
        answer = torch.tensor([value], dtype=torch.uint8, device=device)
        dist.broadcast(answer, 0)
        return bool(answer)


ALONE = Ranks()
PATIENCE = timedelta(hours=4)  # the first rank reads the whole source while the others wait


@contextmanager
def joined(device: str) -> Iterator[tuple[str, Ranks]]:
    """Yields (this process's device, its rank) among those torchrun started, if it did.

    What torchrun says, it says in the environment; nothing else is read from there.
    """
    if not dist.is_torchelastic_launched():
        yield device, ALONE
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield device, Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
