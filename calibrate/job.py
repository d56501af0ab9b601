"""One recipe being applied to a checkpoint, and where that is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from calibrate.observe import RowWeights
from calibrate.ranks import ALONE, Ranks
from calibrate.states import States
from glm5q.layer import Layer
from glm5q.types import Fallback, LayerResult
from glm5q.writer import Shard, Writer
from recipes.schema import Recipe


@dataclass(frozen=True)
class Place:
    """Where a run computes, and which of several processes it is."""

    device: str = "cpu"
    ranks: Ranks = ALONE

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> torch.dtype:
        """What a layer's matrices are; the residual stream is float32 everywhere."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def arrived(self, layer: Layer) -> Layer:
        """Returns a layer just read, on the GPU if there is one: host memory is for the next."""
        return layer.to(self.device) if self.on_gpu else layer


@dataclass
class Job:
    """One recipe being applied: its writer, hidden states, and what is done so far.

    `text` int64 [windows, sequence_length] are all windows, of which the states are this rank's.
    `source_states` are the source's own for them, where a step needs both.
    Shards are written and committed on a thread, one layer's behind the computation at most.
    `stage_s` are seconds spent, by stage; `fallbacks` wait for the layer's result.
    """

    recipe: Recipe
    writer: Writer
    states: States
    text: Tensor
    guidance: Sequence[RowWeights | None] = ()
    source_states: States | None = None
    shards: list[Shard] = field(default_factory=list)
    results: list[LayerResult] = field(default_factory=list)
    resumed: int = 0
    fallbacks: list[Fallback] = field(default_factory=list)
    stage_s: dict[str, float] = field(default_factory=dict)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False)
    _landing: list[tuple[Future[Shard], LayerResult]] = field(default_factory=list, repr=False)

    def guidance_of(self, number: int) -> RowWeights | None:
        return self.guidance[number] if number < len(self.guidance) else None

    @contextmanager
    def stage(self, name: str, place: Place, wait: bool = True) -> Iterator[None]:
        """Counts the seconds of what is done within.

        The device's work included, unless it goes on beside the next stage's.
        """
        started = time.perf_counter()
        yield
        if place.on_gpu and wait:
            torch.cuda.synchronize()
        self.stage_s[name] = self.stage_s.get(name, 0.0) + time.perf_counter() - started

    def write(self, number: int, tensors: Callable[[], dict[str, Tensor]]) -> Future[Shard]:
        self.settle()  # one layer's tensors wait at a time
        return self._thread.submit(lambda: self.writer.write(number, tensors()))

    def land(self, number: int, shard: Future[Shard], result: LayerResult) -> None:
        """Commits a shard once it is written."""

        def commit() -> Shard:
            written = shard.result()
            size = sum(written.tensors.values())
            found = asdict(replace(result, quantized_bytes=size))
            return self.writer.commit(number, written, found)

        self._landing.append((self._thread.submit(commit), result))

    def close(self) -> None:
        """Lets what is being written finish, ends the thread, and lets go of the device."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
            self.states = replace(self.states, near=None)
            if self.source_states is not None:
                self.source_states = replace(self.source_states, near=None)

    def settle(self) -> None:
        """Waits for what is being written; raises what went wrong there."""
        while self._landing:
            landing, result = self._landing.pop(0)
            shard = landing.result()
            size = sum(shard.tensors.values())
            self.shards.append(shard)
            self.results.append(replace(result, quantized_bytes=size))
