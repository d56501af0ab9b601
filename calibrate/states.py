"""A stream's hidden states between two layers, and moving them through one.

On a CPU they lie beside the weights. A GPU's may be larger than its memory: those wait in pinned
host memory, and a chunk travels while another computes. Past a limit they lie in files.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from calibrate.block import LayerOutput, Observer, decoder_layer, mtp_input, rms_norm
from calibrate.ranks import ALONE, Ranks
from calibrate.shares import Share, cut, ends
from calibrate.store import IN_MEMORY, Store
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.errors import CheckpointError, UserError
from glm5q.layer import Weights
from glm5q.stream import LayerSource
from glm5q.types import Fallback

CHUNK_TOKENS = 8192  # tokens run at once
DEVICE_CHUNK_TOKENS = 65536  # on a GPU: 2048 rows an expert, so that adding to a Gram is cheap
FEWEST_CHUNKS, FEWEST_HELD_OUT = 8, 2  # of either kind of window, so that ranks can share them
FLOAT32_CHUNK_TOKENS = 16384  # the same where matrices are float32: evaluation, gradients
DEVICE_STATE_BYTES = 4 << 30  # hidden states that stay on a GPU; larger ones wait in host memory
NEAR_BYTES = 6 << 30  # of those, what a GPU keeps too
Progress = Callable[[str, float, float], None]  # (what, done, of)
Each = Callable[[slice, LayerOutput], None]  # given a chunk's windows and its output


def silent(_what: str, _done: float, _of: float) -> None:
    """Progress for nobody."""


def ignore(_windows: slice, _output: LayerOutput) -> None:
    """Nothing to do with an output."""


def share_out(
    windows: int, held_out: int, length: int, device: str = "cpu", ranks: Ranks = ALONE
) -> Share:
    """Returns this rank's windows of `length` tokens, the last `held_out` of which are held out.

    Both kinds are cut into chunks that do not depend on how many ranks there are, as a product's
    last bits may depend on its size; where ranks are more, so are chunks. A rank gets neighbouring
    chunks of both, as even as they are. Raises UserError where one would have no windows for
    statistics.
    """
    tokens = DEVICE_CHUNK_TOKENS if device.startswith("cuda") else CHUNK_TOKENS
    at_once = max(1, tokens // length)
    seen = ends(windows - held_out, at_once, FEWEST_CHUNKS)
    if len(seen) - 1 < ranks.size:
        seen = ends(windows - held_out, at_once, ranks.size)
    if len(seen) - 1 < ranks.size:
        raise UserError(
            f"{windows} windows, {held_out} held out, are too few for {ranks.size} processes",
            "give more text or fewer processes",
        )
    own = ranks.part(len(seen) - 1, ranks.rank)
    kept = ends(held_out, at_once, FEWEST_HELD_OUT)
    others = ranks.part(len(kept) - 1, ranks.rank)
    bounds = [end - seen[own.start] for end in seen[own.start : own.stop + 1]]
    bounds += [bounds[-1] + kept[n + 1] - kept[others.start] for n in others]
    first = windows - held_out
    return Share(
        range(seen[own.start], seen[own.stop]),
        range(first + kept[others.start], first + kept[others.stop]),
        tuple(bounds),
    )


@dataclass(frozen=True)
class Near:
    """Chunks of `hidden` [windows, length, hidden] that a GPU keeps, by first window and end.

    The first, so that no pass waits for it to come from the host, and those held out, which are
    read three times a layer: 0.13 s of 8 at full size.
    """

    hidden: Tensor
    chunks: dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class States:
    """A stream's hidden states between two layers.

    `hidden` [windows, sequence_length, hidden], on the device that computes or in host memory.
    `indices` are the last indexer's choices a chunk of windows, kept only where a later layer
    shares them. `chunk_tokens` run at once, 0 for CHUNK_TOKENS, or else the chunks of `share`.
    In host memory, `spare` is where the next layer's states go: pinning memory takes seconds, so
    both are pinned once; `near` are chunks that are on the device as well.
    """

    hidden: Tensor
    indices: tuple[Tensor, ...] | None = None
    chunk_tokens: int = 0
    spare: Tensor | None = None
    share: Share | None = None
    store: Store = IN_MEMORY
    near: Near | None = None

    @property
    def bounds(self) -> tuple[int, ...]:
        """The chunks' ends, 0 first."""
        if self.share is not None:
            return self.share.bounds
        at_once = max(1, (self.chunk_tokens or CHUNK_TOKENS) // self.hidden.shape[1])
        return (*range(0, self.hidden.shape[0], at_once), self.hidden.shape[0])

    @property
    def windows_at_once(self) -> int:
        return max(end - start for start, end in pairwise(self.bounds))

    def kept(self, windows: slice) -> Tensor | None:
        """Returns the hidden states of a chunk that is on the device as well."""
        if self.near is None or self.near.hidden is not self.hidden:
            return None
        return self.near.chunks.get((windows.start, windows.stop))

    def on(self, device: torch.device, windows: slice) -> Tensor:
        """Returns the hidden states of some windows [windows, length, hidden] on `device`."""
        kept = self.kept(windows)
        return self.hidden[windows].to(device) if kept is None else kept

    def like(self, hidden: Tensor, indices: tuple[Tensor, ...] | None = None) -> States:
        """Returns other states that run in the same chunks."""
        spare = self.hidden if self.spare is not None and self.spare is hidden else None
        return replace(self, hidden=hidden, indices=indices, spare=spare, near=None)

    def halved(self) -> States:
        """Returns the same states in chunks of half as many windows."""
        return self.in_chunks((self.windows_at_once + 1) // 2)

    def in_chunks(self, windows: int) -> States:
        """Returns the same states and indices in chunks of at most `windows`, none kept near."""
        found = replace(self.at_most(windows), near=None)
        if self.indices is None:
            return found
        sizes = [(end - start) * self.hidden.shape[1] for start, end in pairwise(found.bounds)]
        return replace(found, indices=torch.cat(self.indices).split(sizes))

    def at_most(self, windows: int) -> States:
        """Returns the same states in chunks of at most `windows`; the indices' stay as they are."""
        windows = min(windows, self.windows_at_once)
        share = self.share
        if share is not None:
            share = replace(share, bounds=cut(share.bounds, windows))
        return replace(self, chunk_tokens=windows * self.hidden.shape[1], share=share)


def embed(
    source: LayerSource,
    tokens: Tensor,
    device: str = "cpu",
    chunk_tokens: int = 0,
    share: Share | None = None,
    store: Store = IN_MEMORY,
) -> States:
    """Returns the embedded windows, float32; tokens int64 [windows, sequence_length].

    Of a run shared out, `tokens` are all windows and the states this process's own.
    """
    table = source.top_tensor(names.EMBEDDING)
    tokens = tokens if share is None else share.of(tokens)
    hidden = room((*tokens.shape, table.shape[1]), device, store)
    for window, row in zip(hidden, tokens, strict=True):
        window.copy_(torch.nn.functional.embedding(row, table))
    if not device.startswith("cuda"):
        return States(hidden, share=share, store=store)
    return on_gpu(hidden, chunk_tokens or DEVICE_CHUNK_TOKENS, share, store)


def on_gpu(
    hidden: Tensor,
    chunk_tokens: int = DEVICE_CHUNK_TOKENS,
    share: Share | None = None,
    store: Store = IN_MEMORY,
) -> States:
    """Returns a GPU's states; those not in its memory get room for the next layer's."""
    spare = None if hidden.is_cuda else room(hidden.shape, "cuda", store)
    return States(hidden, None, chunk_tokens, spare, share, store)


def room(
    shape: Sequence[int],
    device: str,
    store: Store = IN_MEMORY,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns a tensor of `shape` for hidden states.

    On `device`, or on the host if large for a GPU: pinned, or in a file where `store` says so.
    """
    size, on_gpu = dtype.itemsize * math.prod(shape), device.startswith("cuda")
    if (not on_gpu or size > DEVICE_STATE_BYTES) and not store.takes(size):
        return store.file(shape, dtype)
    if on_gpu and size > DEVICE_STATE_BYTES:
        return _pinned(torch.empty(tuple(shape), dtype=dtype))
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def _pinned(tensor: Tensor) -> Tensor:
    """Returns the tensor, zeroed, its memory locked for a GPU's copies.

    Zeroed by all cores: locking would have the system do it, with one of them. torch's own pinned
    memory comes in powers of two: a third more for 6144 features.
    """
    tensor.zero_()
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
    """Yields each chunk's (number, windows)."""
    for number, (start, end) in enumerate(pairwise(states.bounds)):
        yield number, slice(start, end)


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
    for number, part, hidden in moved(states, asked, device):
        count = hidden.shape[0]
        offsets = torch.arange(count + 1, device=device) * length
        indices = None
        if states.indices is not None:
            begin = (part.start - states.bounds[number]) * length
            indices = states.indices[number][begin : begin + count * length].to(device)
        if observer is not None:
            observer.first_token = part.start * length
        with torch.no_grad():
            output = decoder_layer(
                config, weights, hidden.flatten(0, 1), offsets, indices, observer, length
            )
        each(part, output)


def moved(
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
    copying, computing = _copying(device), torch.cuda.current_stream(device)

    def send(index: int) -> tuple[Tensor, torch.cuda.Event | None]:
        kept = states.kept(wanted[index][1])
        if kept is not None:
            return kept, None
        with torch.cuda.stream(copying):
            sent = states.hidden[wanted[index][1]].to(device, non_blocking=True)
            return sent, copying.record_event()

    ahead = send(0) if wanted else None
    for index, (number, part) in enumerate(wanted):
        assert ahead is not None
        current, arrived = ahead
        if arrived is not None:
            computing.wait_event(arrived)
            current.record_stream(computing)
        ahead = send(index + 1) if index + 1 < len(wanted) else None
        yield number, part, current


@lru_cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream that states travel on: memory is kept apart for each stream there is."""
    return torch.cuda.Stream(device)


def all_finite(output: LayerOutput) -> Tensor:
    """Returns bool []: whether a layer's output is finite, without waiting for the device."""
    least, most = torch.aminmax(output.hidden)  # nan where any value is
    return torch.isfinite(least) & torch.isfinite(most)


def check_finite(number: int, *finite: Tensor) -> None:
    """Raises CheckpointError naming the layer whose finite weights gave something that is not."""
    if finite and not bool(torch.stack(finite).all()):
        raise CheckpointError(
            f"layer {number} turns the text into values that are not finite",
            "its weights are damaged: fetch them again",
        )


Made = TypeVar("Made")


def with_less(
    states: States,
    number: int,
    make: Callable[[States], Made],
    fallbacks: list[Fallback],
    doing: str = "forward",
) -> Made:
    """Returns make(states); out of device memory, again in chunks of half as many windows.

    Each time is added to `fallbacks`. Raises UserError naming the layer where one window is too
    much.
    """
    while True:
        try:
            return make(states)
        except torch.OutOfMemoryError:
            if states.windows_at_once == 1:
                raise UserError(
                    f"layer {number}: the device's memory is too small for "
                    f"{states.hidden.shape[1]} tokens",
                    "give a smaller --sequence-length or a larger device",
                ) from None
        if torch.cuda.is_available():  # outside the handler, whose traceback holds tensors
            torch.cuda.empty_cache()
        states = states.halved()
        tokens = states.windows_at_once * states.hidden.shape[1]
        fallbacks.append(
            Fallback(number, doing, "device out of memory", f"chunks of {tokens} tokens")
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
    hidden = states.spare
    if hidden is None:
        hidden = room(states.hidden.shape, str(states.hidden.device), states.store)
    landing = torch.cuda.Stream() if states.spare is not None else None
    near, wanted = Near(hidden, {}), _near(states) if landing is not None else set()
    indices: list[Tensor] = []
    keep = number + 1 < config.num_layers and not config.full_indexer[number + 1]
    chooses = keep and config.full_indexer[number]  # else the choices stay those there are

    finite: list[Tensor] = []

    def store(part: slice, output: LayerOutput) -> None:
        finite.append(all_finite(output))
        land(hidden[part], output.hidden, landing)
        if (part.start, part.stop) in wanted:
            near.chunks[part.start, part.stop] = output.hidden.view(hidden[part].shape)
        if chooses:
            indices.append(output.indices.to(hidden.device))
        each(part, output)

    forward(config, weights, states, observer, each=store)
    check_finite(number, *finite)
    if landing is not None:
        landing.synchronize()
    kept = tuple(indices) if chooses else states.indices
    after = states.like(hidden, kept if keep else None)
    return replace(after, near=near) if near.chunks else after


def _near(states: States) -> set[tuple[int, int]]:
    """Returns the first chunk's and the held out ones' windows, as many as NEAR_BYTES hold."""
    found, room_left = set(), NEAR_BYTES
    held_out = states.hidden.shape[0] if states.share is None else states.share.split.start
    for start, end in pairwise(states.bounds):
        if start == 0 or start >= held_out:
            room_left -= states.hidden[start:end].nbytes
            if room_left >= 0:
                found.add((start, end))
    return found


def land(place: Tensor, values: Tensor, stream: torch.cuda.Stream | None) -> None:
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

    `tokens` [windows, sequence_length] are the states' own.
    One position shorter than the main stream, whose last token has no successor.
    """
    device = weights.vectors["enorm.weight"].device
    norm = source.top_tensor(names.FINAL_NORM).to(device)
    table = source.top_tensor(names.EMBEDDING)
    shape = (tokens.shape[0], tokens.shape[1] - 1, table.shape[1])
    hidden = room(shape, str(device), states.store)
    for _, part in chunks(states):
        before = states.hidden[part, :-1].to(device)
        following = torch.nn.functional.embedding(tokens[part, 1:], table).float().to(device)
        normed = rms_norm(before, norm, config.rms_norm_eps)
        hidden[part] = mtp_input(config, weights, following, normed)
    if states.spare is None:
        return states.like(hidden)
    spare = room(hidden.shape, str(device), states.store)
    return replace(states.like(hidden), spare=spare)
