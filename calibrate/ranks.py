"""Several processes at one calibration: who runs which windows, rounds which expert, and sums.

Every rank runs its own windows through the whole layer and keeps their hidden states. Sums over
tokens come together as sums, with one normalisation; an expert's go to the rank that rounds it, and
its codes back to all. What is summed over ranks is float64 on a CPU, so that the order of the sums
is lost in the rounding to float32 and the codes are those of one process. A GPU has room for one
float32 sum only: there a Gram differs by float32's rounding of as many addends as ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm5q.errors import UserError

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # by kind of device


@dataclass(frozen=True)
class Ranks:
    """This process among `size`, numbered from 0; the first writes.

    `local` share its machine, where it is the `local_rank`-th.
    """

    rank: int = 0
    size: int = 1
    local: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def first_of_machine(self) -> bool:
        return self.local_rank == 0

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

    def collect(self, stack: Tensor) -> None:
        """Sums a stack [stack, ...] over all ranks, in place, for each its own entries.

        The other entries hold nothing of use afterwards. A single matrix is summed for everybody.
        """
        if self.size == 1:
            return
        if len(stack) == 1:
            dist.all_reduce(stack)
            return
        for rank in range(self.size):
            part = self.part(len(stack), rank)
            if part:
                dist.reduce(stack[part.start : part.stop], rank)

    def add(self, value: Tensor) -> Tensor:
        """Returns the sum of all ranks' values."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def largest(self, value: Tensor) -> Tensor:
        """Returns the largest of all ranks' values, element by element."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value, how)
        return value

    def sum_of_stack(self, stack: Tensor) -> Tensor:
        """Returns the sum over a stack [stack, in, in] of which each rank holds its own entries.

        On a CPU in float64 until all are in, so that no rank's order shows.
        """
        if len(stack) == 1:
            return stack
        mine = self.mine(len(stack))
        if stack.is_cuda:
            return self.add(stack[mine.start : mine.stop].sum(0, keepdim=True))
        own = torch.zeros_like(stack[:1], dtype=torch.float64)
        for index in mine:  # sum(dtype=...) would copy the whole stack first
            own[0] += stack[index]
        return self.add(own).to(stack.dtype)

    def firsts(self, value: bool, device: torch.device | str) -> bool:
        """Returns the first rank's answer; the others' is not asked. All wait for it."""
        if self.size == 1:
            return value
        answer = torch.tensor([value], dtype=torch.uint8, device=device)
        dist.broadcast(answer, 0)
        return bool(answer)

    def firsts_text(self, text: str, device: torch.device | str) -> str:
        """Returns the first rank's text."""
        first = self.all_of([{"text": text}], device)[0]
        return str(first["text"])

    def all_of(self, value: list[dict[str, Any]], device: torch.device | str) -> list[Any]:
        """Returns every rank's list, one after the other, to everybody: as JSON, not as code."""
        if self.size == 1:
            return list(value)
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64, device=device)
        sizes[self.rank] = len(own)
        found: list[Any] = []
        for rank, size in enumerate(self.add(sizes).tolist()):
            text = own if rank == self.rank else torch.empty(size, dtype=torch.uint8)
            text = text.to(device)
            dist.broadcast(text, rank)
            found += json.loads(bytes(text.cpu().tolist()))
        return found


ALONE = Ranks()
PEER_GONE = ("Connection closed by peer", "Connection reset by peer")  # as gloo says it
PATIENCE = timedelta(hours=4)  # a machine's first rank reads the whole source while its others wait


@contextmanager
def joined(device: str) -> Iterator[tuple[str, Ranks]]:
    """Yields (this process's device, its rank) among those torchrun started, if it did.

    What torchrun says, it says in the environment; nothing else is read from there. No thread of
    the group's outlives it: one that lets go of a tensor as Python ends aborts the process.
    """
    if not dist.is_torchelastic_launched():
        yield device, ALONE
        return
    kind, local = device.partition(":")[0], int(os.environ["LOCAL_RANK"])
    if kind == "cuda" and local >= (gpus := torch.cuda.device_count()):
        raise UserError(
            f"process {local + 1} of this machine has no GPU of its own: there are {gpus}",
            "start as many processes as there are GPUs",
        )
    if kind == "npu":
        import_module("torch_npu")  # gives torch the device and its backend
    if kind != "cpu":
        device = f"{kind}:{local}"
        torch.get_device_module(kind).set_device(device)
    # Its functions take the group there is at the import as their default and keep it for good:
    # torch._dynamo imports it, at the first call that may be compiled.
    import_module("torch.distributed.nn.functional")
    dist.init_process_group(BACKENDS[kind], timeout=PATIENCE)
    try:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        yield device, Ranks(dist.get_rank(), dist.get_world_size(), here, local)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(w in str(error) for w in PEER_GONE):
            raise
        raise UserError(
            f"another process of this run has ended or cannot be reached ({str(error)[:200]})",
            "see its own message, and repeat the command",
        ) from error
    finally:
        dist.destroy_process_group()
