"""One decoder layer at a time, the next one read from disk meanwhile; never the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

from glm5q.config import ModelConfig
from glm5q.layer import Layer


class LayerSource(Protocol):
    """What can be streamed: a source checkpoint, or a quantized one read back."""

    @property
    def config(self) -> ModelConfig: ...

    def layer(self, number: int) -> Layer: ...

    def top_tensor(self, name: str) -> Tensor: ...


def _as_it_is(layer: Layer) -> Layer:
    return layer


def layers(
    read: Callable[[int], Layer],
    numbers: range,
    arrived: Callable[[Layer], Layer] = _as_it_is,
) -> Iterator[Layer]:
    """Yields read(n) for each n, one layer read ahead on a thread; at most two in memory.

    `arrived` may move a layer elsewhere, before the next is read: then one is in memory here.
    """
    if not numbers:
        return
    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = pool.submit(read, numbers[0])
        for following in numbers[1:]:
            current = arrived(ahead.result())
            del ahead  # it holds the layer as it was read
            ahead = pool.submit(read, following)
            yield current
            del current
        yield arrived(ahead.result())
