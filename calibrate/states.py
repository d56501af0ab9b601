"""A stream's hidden states between two layers, and moving them through one.

On a CPU they lie beside the weights. A GPU's may be larger than its memory: those wait in pinned
host memory, and a chunk travels while another computes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calibrate.block import LayerOutput, Observer, decoder_layer, mtp_input, rms_norm
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.errors import CheckpointError, UserError
from glm5q.layer import Weights
from glm5q.stream import LayerSource

CHUNK_TOKENS = 8192  # tokens run at once
DEVICE_CHUNK_TOKENS = 65536  # on a GPU: 2048 rows an expert, so that adding to a Gram is cheap
FLOAT32_CHUNK_TOKENS = 16384  # the same where matrices are float32: evaluation, gradients
DEVICE_STATE_BYTES = 4 << 30  # hidden states that stay on a GPU; larger ones wait in host memory
Progress = Callable[[str, float, float], None]  # (what, done, of)
Each = Callable[[slice, LayerOutput], None]  # given a chunk's windows and its output


def silent(_what: str, _done: float, _of: float) -> None:
    """Progress for nobody."""


def ignore(_windows: slice, _output: LayerOutput) -> None:
    """Nothing to do with an output."""


@dataclass(frozen=True)
class States:
    """A stream's hidden states between two layers.

    `hidden` [windows, sequence_length, hidden], on the device that computes or in host memory.
    `indices` are the last indexer's choices a chunk of windows, kept only where a later layer
    shares them. `chunk_tokens` run at once, 0 for CHUNK_TOKENS. In host memory, `spare` is where
    the next layer's states go: pinning memory takes seconds, so both are pinned once.
    """

    hidden: Tensor
    indices: tuple[Tensor, ...] | None = None
    chunk_tokens: int = 0
    spare: Tensor | None = None

    @property
    def windows_at_once(self) -> int:
        return max(1, (self.chunk_tokens or CHUNK_TOKENS) // self.hidden.shape[1])

    def like(self, hidden: Tensor, indices: tuple[Tensor, ...] | None = None) -> States:
        """Returns other states that run in the same chunks."""
        spare = self.hidden if self.spare is not None and self.spare is hidden else None
        return States(hidden, indices, self.chunk_tokens, spare)

    def halved(self) -> States:
        """Returns the same states in chunks of half as many windows."""
        tokens = max(1, self.windows_at_once // 2) * self.hidden.shape[1]
        indices = self.indices
        if indices is not None:
            indices = tuple(torch.cat(indices).split(tokens))
        return replace(self, indices=indices, chunk_tokens=tokens)


def embed(
    source: LayerSource, tokens: Tensor, device: str = "cpu", chunk_tokens: int = 0
) -> States:
    """Returns the embedded windows, float32; tokens int64 [windows, sequence_length]."""
    table = source.top_tensor(names.EMBEDDING)
    if not device.startswith("cuda"):
        return States(torch.nn.functional.embedding(tokens, table).float().to(device))
    hidden = room((*tokens.shape, table.shape[1]), device)
    for window, row in zip(hidden, tokens, strict=True):
        window.copy_(torch.nn.functional.embedding(row, table))
    return on_gpu(hidden, chunk_tokens or DEVICE_CHUNK_TOKENS)


def on_gpu(hidden: Tensor, chunk_tokens: int = DEVICE_CHUNK_TOKENS) -> States:
    """Returns the states of a run on a GPU; those in host memory get room for the next layer's."""
    spare = None if hidden.is_cuda else room(hidden.shape, "cuda")
    return States(hidden, None, chunk_tokens, spare)


def room(shape: Sequence[int], device: str) -> Tensor:
    """Returns float32 of `shape` for hidden states: on `device`, or pinned on the host if large."""
    if device.startswith("cuda") and 4 * math.prod(shape) > DEVICE_STATE_BYTES:
        return _pinned(torch.empty(tuple(shape), dtype=torch.float32))
    return torch.empty(tuple(shape), dtype=torch.float32, device=device)


def _pinned(tensor: Tensor) -> Tensor:
    """Returns the tensor, its memory locked for a GPU's copies.

    torch's own pinned memory comes in powers of two: a third more for 6144 features.
    """
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) != 0:
        raise UserError(
            f"{tensor.nbytes / 1e9:.0f} GB of host memory for hidden states cannot be pinned",
            "give fewer --windows, or raise the limit of locked memory",
        )
    weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor


def chunks(states: States) -> Iterator[tuple[int, slice]]:
    """Yields (number, windows) so that about `states.chunk_tokens` run at once."""
    windows, step = states.hidden.shape[0], states.windows_at_once
    for number, start in enumerate(range(0, windows, step)):
        yield number, slice(start, min(start + step, windows))


def forward(
    config: ModelConfig,
    weights: Weights,
    states: States,
    observer: Observer | None = None,
    windows: range | None = None,
    each: Each = ignore,
) -> None:
    """Runs one layer over every chunk (or those within `windows`) and hands each output to `each`.

    An output's tensors are flat over the chunk's tokens.
    """
    length = states.hidden.shape[1]
    device = next(iter(weights.vectors.values())).device
    asked = range(states.hidden.shape[0]) if windows is None else windows
    for number, part, hidden in _moved(states, asked, device):
        count = hidden.shape[0]
        offsets = torch.arange(count + 1, device=device) * length
        indices = None
        if states.indices is not None:
            first = number * states.windows_at_once
            begin = (part.start - first) * length
            indices = states.indices[number][begin : begin + count * length].to(device)
        if observer is not None:
            observer.first_token = part.start * length
        with torch.no_grad():
            output = decoder_layer(
                config, weights, hidden.flatten(0, 1), offsets, indices, observer
            )
        each(part, output)


def _moved(
    states: States, windows: range, device: torch.device
) -> Iterator[tuple[int, slice, Tensor]]:
    """Yields (chunk's number, its windows within `windows`, their hidden states on `device`).

    From pinned memory the next chunk travels on a stream of its own while this one computes.
    """
    wanted = []
    for number, part in chunks(states):
        part = slice(max(part.start, windows.start), min(part.stop, windows.stop))
        if part.start < part.stop:
            wanted.append((number, part))
    if states.hidden.device == device or device.type != "cuda":
        for number, part in wanted:
            yield number, part, states.hidden[part].to(device)
        return
    copying, computing = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    def send(index: int) -> Tensor:
        with torch.cuda.stream(copying):
            return states.hidden[wanted[index][1]].to(device, non_blocking=True)

    ahead = send(0) if wanted else None
    for index, (number, part) in enumerate(wanted):
        assert ahead is not None
        computing.wait_stream(copying)
        ahead.record_stream(computing)
        current, ahead = ahead, send(index + 1) if index + 1 < len(wanted) else None
        yield number, part, current


def check_finite(number: int, output: LayerOutput) -> None:
    """Raises CheckpointError naming the layer whose finite weights gave something that is not."""
    if not bool(torch.isfinite(output.hidden).all()):
        raise CheckpointError(
            f"layer {number} turns the text into values that are not finite",
            "its weights are damaged: fetch them again",
        )


def advance(
    config: ModelConfig,
    number: int,
    weights: Weights,
    states: States,
    observer: Observer | None = None,
    each: Each = ignore,
) -> States:
    """Returns the states after layer `number`."""
    hidden = torch.empty_like(states.hidden) if states.spare is None else states.spare
    landing = torch.cuda.Stream() if states.spare is not None else None
    indices: list[Tensor] = []
    keep = number + 1 < config.num_layers and not config.full_indexer[number + 1]

    def store(part: slice, output: LayerOutput) -> None:
        check_finite(number, output)
        _land(hidden[part], output.hidden, landing)
        if keep:
            indices.append(output.indices.to(hidden.device))
        each(part, output)

    forward(config, weights, states, observer, each=store)
    if landing is not None:
        landing.synchronize()
    return states.like(hidden, tuple(indices) if keep else None)


def _land(place: Tensor, values: Tensor, stream: torch.cuda.Stream | None) -> None:
    """Copies a chunk's output to where it waits, beside the next chunk's work if on a stream."""
    if stream is None:
        place.copy_(values.view(place.shape))
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        place.copy_(values.view(place.shape), non_blocking=True)
    values.record_stream(stream)


def mtp_states(
    config: ModelConfig, weights: Weights, source: LayerSource, tokens: Tensor, states: States
) -> States:
    """Returns the MTP layer's input: position i has hidden i after the final norm and token i + 1.

    One position shorter than the main stream, whose last token has no successor.
    """
    device = weights.vectors["enorm.weight"].device
    norm = source.top_tensor(names.FINAL_NORM).to(device)
    table = source.top_tensor(names.EMBEDDING)
    hidden = room((tokens.shape[0], tokens.shape[1] - 1, table.shape[1]), str(device))
    for _, part in chunks(states):
        before = states.hidden[part, :-1].to(device)
        following = torch.nn.functional.embedding(tokens[part, 1:], table).float().to(device)
        normed = rms_norm(before, norm, config.rms_norm_eps)
        hidden[part] = mtp_input(config, weights, following, normed)
    if states.spare is None:
        return states.like(hidden)
    return States(hidden, None, states.chunk_tokens, room(hidden.shape, str(device)))
