"""How much the model's own loss minds an error at each routed expert, token by token.

One sweep forward over the source keeps every layer's input; one sweep backward, one layer resident,
gives the gradient of -log p(a token drawn from the model) at each expert product's output. Its mean
square over the output, the diagonal of the Fisher information, weighs the token in the Gram of that
product (GuidedQuant, arXiv 2505.07004, with one weight a token instead of one a group of rows).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate.block import LayerOutput, Observer, decoder_layer, rms_norm
from calibrate.shares import IN_MEMORY, Store
from calibrate.states import (
    DEVICE_STATE_BYTES,
    FLOAT32_CHUNK_TOKENS,
    Progress,
    States,
    advance,
    embed,
    room,
    silent,
)
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Weights, runnable
from glm5q.stream import LayerSource, layers

SEED = 0  # of the tokens drawn from the model
GRADIENT_TOKENS = 16384  # of which a GPU takes gradients at once: 20 GB of a graph at full size


@dataclass(frozen=True)
class Guidance:
    """One layer's token weights, mean 1: `experts` int16 and `weights[path]` float32 [tokens, k].

    Tokens are numbered through the windows, `experts` are the source's choices for each.
    """

    experts: Tensor
    weights: dict[str, Tensor]

    def rows(self, path: str, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Returns the float32 weight [rows] of rows sorted by expert.

        `tokens` int64 [rows] numbers them through the stream. A pair of token and expert that the
        source did not choose weighs 1, the mean.
        """
        if not len(tokens):
            return torch.ones(0, device=tokens.device)
        device, (first, last) = tokens.device, (int(end) for end in torch.aminmax(tokens))
        part, local = slice(first, last + 1), tokens - first
        numbers = torch.arange(len(offsets) - 1, device=device)
        mine = numbers.repeat_interleave(offsets.diff().to(device), output_size=len(tokens))
        match = self.experts[part].to(device)[local] == mine.unsqueeze(1)
        weight = (self.weights[path][part].to(device)[local] * match).sum(1)
        return torch.where(match.any(1), weight, torch.ones_like(weight))


def guide(
    source: LayerSource,
    tokens: Tensor,
    progress: Progress = silent,
    device: str = "cpu",
    store: Store = IN_MEMORY,
) -> list[Guidance | None]:
    """Returns the guidance of every decoder layer, None where there are no routed experts.

    `tokens` int64 [windows, sequence_length]. Keeps one hidden state a layer, on the host or in
    `store`; weights of two layers at a time are in memory. A GPU multiplies in bfloat16.
    """
    config = source.config
    total = 2 * config.num_hidden_layers
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    states, inputs = embed(source, tokens, device, FLOAT32_CHUNK_TOKENS), []
    for layer in layers(source.layer, range(config.num_hidden_layers)):
        progress(f"guidance, layer {layer.number}", layer.number, total)
        inputs.append(_kept(states, config.num_hidden_layers, store))
        states = replace(inputs[-1], spare=None)
        states = advance(config, layer.number, runnable(layer, dtype, device), states)
    gradient = _loss_gradient(source, states.hidden, device, store)
    guidance: list[Guidance | None] = []
    for layer in layers(source.layer, range(config.num_hidden_layers - 1, -1, -1)):
        progress(f"guidance, layer {layer.number}", total - 1 - layer.number, total)
        weights = runnable(layer, dtype, device)
        gradient, found = backward(config, weights, inputs[layer.number], gradient)
        inputs.pop()
        guidance.append(found)
    return guidance[::-1]


def _kept(states: States, layers: int, store: Store) -> States:
    """Returns the states where as many as there are layers have room: a GPU's only if small."""
    size = layers * states.hidden.nbytes
    limit = None if store.memory_bytes is None else 2 * store.memory_bytes // layers
    each = replace(store, memory_bytes=limit)
    small = states.hidden.is_cuda and size <= DEVICE_STATE_BYTES
    if small or (states.hidden.device.type == "cpu" and each.takes(states.hidden.nbytes)):
        return states
    hidden = room(states.hidden.shape, "cpu", each).copy_(states.hidden)
    return replace(states, hidden=hidden, spare=None)


def _loss_gradient(source: LayerSource, hidden: Tensor, device: str, store: Store) -> Tensor:
    """Returns the gradient of -log p(drawn token) before the final norm, shaped as `hidden`."""
    config = source.config
    tied = config.tie_word_embeddings
    head = source.top_tensor(names.EMBEDDING if tied else names.LM_HEAD).float().to(device)
    norm = source.top_tensor(names.FINAL_NORM).to(device)
    generator = torch.Generator(device=device).manual_seed(SEED)
    gradient = room(hidden.shape, device, store)
    for window in range(hidden.shape[0]):
        x = hidden[window].detach().to(device).requires_grad_()
        with torch.enable_grad():
            logits = F.linear(rms_norm(x, norm, config.rms_norm_eps), head)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            loss = F.cross_entropy(logits, drawn.squeeze(1), reduction="sum")
        gradient[window] = torch.autograd.grad(loss, x)[0]
    return gradient


class _Outputs(Observer):
    """An Observer that keeps expert products' outputs, and which tokens' they are."""

    def __init__(self) -> None:
        self.products: dict[str, tuple[Tensor, Tensor]] = {}

    def experts(self, path: str, _x: Tensor, _o: Tensor, y: Tensor, tokens: Tensor) -> None:
        self.products[path] = (y, tokens)


def backward(
    config: ModelConfig, weights: Weights, states: States, gradient: Tensor
) -> tuple[Tensor, Guidance | None]:
    """Returns (gradient at the layer's input, its guidance), a few windows at a time.

    `gradient` [windows, sequence_length, hidden] is at its output, and written over.
    """
    windows, length, _ = states.hidden.shape
    chosen: list[Tensor] = []
    squares: dict[str, list[Tensor]] = {}
    device = next(iter(weights.vectors.values())).device
    for part in _parts(windows, length, device):
        count = part.stop - part.start
        x = states.hidden[part].detach().flatten(0, 1).to(device).requires_grad_()
        offsets = torch.arange(count + 1, device=device) * length
        seen = _Outputs()
        with torch.enable_grad(), _repeatable():
            indices = _indices_of(states, part, length)
            indices = None if indices is None else indices.to(device)
            output = decoder_layer(config, weights, x, offsets, indices, seen, length)
            wanted = [x, *(y for y, _ in seen.products.values())]
            after = gradient[part].to(device).flatten(0, 1)
            found = torch.autograd.grad(output.hidden, wanted, after)
        gradient[part] = found[0].view(count, length, -1)
        if output.experts is not None:
            chosen.append(output.experts.to(torch.int16).cpu())
            _collect(output, seen, found[1:], squares)
    if not chosen:
        return gradient, None
    joined = {path: torch.cat(parts) for path, parts in squares.items()}
    normalised = {path: weight / weight.mean() for path, weight in joined.items()}
    return gradient, Guidance(torch.cat(chosen), normalised)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Has a GPU's attention take its gradients in a fixed order."""
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


def _parts(windows: int, length: int, device: torch.device) -> Iterator[slice]:
    """Yields the windows whose gradients are taken at once: one, but on a GPU GRADIENT_TOKENS."""
    step = max(1, GRADIENT_TOKENS // length) if device.type == "cuda" else 1
    for start in range(0, windows, step):
        yield slice(start, min(start + step, windows))


def _collect(
    output: LayerOutput,
    seen: _Outputs,
    gradients: tuple[Tensor, ...],
    squares: dict[str, list[Tensor]],
) -> None:
    """Adds each path's mean squared gradient [tokens, k], unsorted from expert order."""
    assert output.experts is not None
    order = output.experts.flatten().argsort(stable=True)
    for path, slope in zip(seen.products, gradients, strict=True):
        flat = torch.empty(len(order), device=slope.device)
        flat[order] = slope.float().square().mean(-1)
        squares.setdefault(path, []).append(flat.view(output.experts.shape).cpu())


def _indices_of(states: States, windows: slice, length: int) -> Tensor | None:
    """A few windows' part of the shared indices."""
    if states.indices is None:
        return None
    return torch.cat(states.indices)[windows.start * length : windows.stop * length]
