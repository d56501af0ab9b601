"""Every layer's input, put by as a sweep goes forward and handed back as one goes backward."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from calibrate.states import DEVICE_STATE_BYTES, States, room
from calibrate.store import Store

SWEEP = 3  # what else a sweep holds of a layer's states: its own, the next one's, a gradient


@dataclass
class Shelf:
    """The inputs of `layers` layers, the last put first taken.

    On a CPU, and on a GPU that holds them all, they are the states themselves; a GPU's others go to
    the host's memory, or to files where `store` says so. States in pinned memory have two buffers,
    and pinning takes seconds: a thread copies from one, as bfloat16, beside what the GPU computes,
    and back into one before it is asked for.
    """

    layers: int
    store: Store
    _put: list[States] = field(default_factory=list)
    _buffers: tuple[Tensor, ...] = ()
    _ahead: Future[Tensor] | None = None  # the buffer that holds the last put, once it does
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False)

    def put(self, states: States) -> None:
        """Keeps a layer's input. Call it before the states are advanced: they use the buffers."""
        if states.spare is None:
            self._put.append(self._aside(states))
            return
        if self._ahead is not None:
            self._ahead.result()  # the next layer's input goes where this is copied from
        each = self._each(states, states.hidden.nbytes // 2)
        kept = room(states.hidden.shape, "cpu", each, torch.bfloat16)
        self._buffers = states.hidden, states.spare
        self._put.append(replace(states, hidden=kept, spare=None, near=None))
        self._ahead = self._thread.submit(_copied, states.hidden, kept, states.hidden)

    def take(self) -> States:
        """Returns the last input put and not yet taken; what was taken before is gone then."""
        states = self._put.pop()
        if self._ahead is None:
            return states
        current, self._ahead = self._ahead.result(), None
        if self._put:
            other = next(buffer for buffer in self._buffers if buffer is not current)
            self._ahead = self._thread.submit(_copied, self._put[-1].hidden, other, other)
        return replace(states, hidden=current)

    def _aside(self, states: States) -> States:
        size = states.hidden.nbytes
        if states.hidden.is_cuda and self.layers * size <= DEVICE_STATE_BYTES:
            return states
        each = self._each(states, size)
        in_files = not self.store.takes(size)  # each layer's in one of its own
        if states.hidden.device.type == "cpu" and (in_files or each.takes(size)):
            return states
        hidden = room(states.hidden.shape, "cpu", each).copy_(states.hidden)
        return replace(states, hidden=hidden, near=None)

    def _each(self, states: States, size: int) -> Store:
        """Returns where one layer's `size` bytes go, of as many as there are layers.

        Raises OutputError where all of them are too much for a disk.
        """
        left = self.store.beside(SWEEP * states.hidden.nbytes).memory_bytes
        each = replace(self.store, memory_bytes=None if left is None else 2 * left // self.layers)
        if not self._put and not each.takes(size):
            self.store.check(self.layers * size)
        return each


def _copied(source: Tensor, target: Tensor, holder: Tensor) -> Tensor:
    """Returns `holder` when `source` has been copied to `target`."""
    target.copy_(source)
    return holder
