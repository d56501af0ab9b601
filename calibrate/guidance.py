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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate import rows
from calibrate.block import Observer, after_attention, decoder_layer, rms_norm
from calibrate.mixture_gradient import mixture_gradient
from calibrate.ranks import ALONE, Ranks
from calibrate.row_gradients import exact_linear
from calibrate.shares import Share
from calibrate.shelf import Shelf
from calibrate.states import (
    Progress,
    States,
    advance,
    embed,
    land,
    moved,
    room,
    silent,
    with_less,
)
from calibrate.store import IN_MEMORY, Store
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Weights, runnable
from glm5q.stream import LayerSource, layers
from glm5q.types import Fallback

DOING = "guidance"
SEED = 0  # of the tokens drawn from the model
GRADIENT_TOKENS = {"cuda": 16384}  # taken at once: 7 GB, more is no faster; elsewhere one window


@dataclass(frozen=True)
class Guidance:
    """One layer's token weights, mean 1: `experts` int16 and `weights[path]` float32 [tokens, k].

    Tokens are numbered through this process's windows, `experts` are the source's choices for
    each; the mean is that of all processes.
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


@dataclass(frozen=True)
class Guided:
    """`layers` are each decoder layer's guidance, None where there are no routed experts.

    `fallbacks` say where device memory ran out.
    """

    layers: tuple[Guidance | None, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()


def guide(
    source: LayerSource,
    tokens: Tensor,
    progress: Progress = silent,
    device: str = "cpu",
    store: Store = IN_MEMORY,
    share: Share | None = None,
    ranks: Ranks = ALONE,
) -> Guided:
    """Returns what guides the rounding of every decoder layer.

    `tokens` int64 [windows, sequence_length] are all windows; of them this process sweeps over
    those of its `share`. A Shelf keeps one hidden state a layer; weights of two layers at a time
    are in memory. A GPU multiplies in bfloat16.
    """
    config = source.config
    total = 2 * config.num_hidden_layers
    dtype = _dtype(device)
    states = embed(source, tokens, device, share=share, store=store)
    inputs = Shelf(config.num_hidden_layers, store)
    fallbacks: list[Fallback] = []
    for layer in layers(source.layer, range(config.num_hidden_layers)):
        progress(f"guidance, layer {layer.number}", layer.number, total)
        inputs.put(states)
        weights = runnable(layer, dtype, device)
        run = partial(advance, config, layer.number, weights)
        states = with_less(states, layer.number, run, fallbacks, DOING)
    gradient = _loss_gradient(source, states, device, store)
    del states  # with chunks of it that a GPU keeps near
    guidance: list[Guidance | None] = []
    for layer in layers(source.layer, range(config.num_hidden_layers - 1, -1, -1)):
        progress(f"guidance, layer {layer.number}", total - 1 - layer.number, total)
        weights = runnable(layer, dtype, device)
        gradient, found = backward(
            config, layer.number, weights, inputs.take(), gradient, ranks, fallbacks
        )
        guidance.append(found)
    return Guided(tuple(guidance[::-1]), tuple(fallbacks))


def _dtype(device: str) -> torch.dtype:
    """What a device multiplies in."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def _loss_gradient(source: LayerSource, states: States, device: str, store: Store) -> Tensor:
    """Returns the gradient of -log p(drawn token) before the final norm, shaped as the states'.

    A window's tokens are drawn by its number, whichever process has it.
    """
    config, hidden = source.config, states.hidden
    tied = config.tie_word_embeddings
    dtype = _dtype(device)
    head = source.top_tensor(names.EMBEDDING if tied else names.LM_HEAD).to(device, dtype)
    norm = source.top_tensor(names.FINAL_NORM).to(device)
    generator = torch.Generator(device=device)
    gradient = room(hidden.shape, device, store)
    for window in range(hidden.shape[0]):
        x = hidden[window].detach().to(device).requires_grad_()
        number = window if states.share is None else states.share.number(window)
        generator.manual_seed(SEED + number)
        with torch.enable_grad():
            logits = exact_linear(rms_norm(x, norm, config.rms_norm_eps, dtype), head)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
            loss = F.cross_entropy(logits, drawn.squeeze(1), reduction="sum")
        gradient[window] = torch.autograd.grad(loss, x)[0]
    return gradient


class _Outputs(Observer):
    """An Observer that keeps expert products' outputs."""

    def __init__(self) -> None:
        self.products: dict[str, Tensor] = {}

    def experts(self, path: str, _x: Tensor, _o: Tensor, y: Tensor, _tokens: Tensor) -> None:
        self.products[path] = y


@dataclass(frozen=True)
class _Slopes:
    """Gradients of a few windows: at the layer's input `x` [tokens, hidden], and as squares.

    `squares[path]` [tokens, k] are means over an expert product's output, of the `experts` chosen,
    None where there are no routed ones.
    """

    x: Tensor
    experts: Tensor | None
    squares: dict[str, Tensor]


def backward(
    config: ModelConfig,
    number: int,
    weights: Weights,
    states: States,
    gradient: Tensor,
    ranks: Ranks,
    fallbacks: list[Fallback],
) -> tuple[Tensor, Guidance | None]:
    """Returns (gradient at layer `number`'s input, its guidance), a few windows at a time.

    `gradient` [windows, sequence_length, hidden] is at its output, and written over. All `ranks`
    must come here: the weights' mean is that of all their windows. Out of device memory it goes on
    from the first window left, with fewer at a time, and adds that to `fallbacks`.
    """
    windows, length, _ = gradient.shape
    device = next(iter(weights.vectors.values())).device
    inputs = states.at_most(max(1, GRADIENT_TOKENS.get(device.type, 0) // length))
    away = device.type == "cuda" and not gradient.is_cuda
    landing = torch.cuda.Stream(device) if away else None
    chosen: list[Tensor] = []
    squares: dict[str, list[Tensor]] = {}
    done = 0

    def rest(inputs: States) -> None:
        nonlocal done
        outputs = replace(inputs, hidden=gradient)
        both = (moved(part, range(done, windows), device) for part in (inputs, outputs))
        for (_, part, hidden), (_, _, after) in zip(*both, strict=True):
            indices = _indices_of(states, part, length, device)
            after = after.flatten(0, 1)
            found = _slopes(config, weights, hidden.flatten(0, 1), indices, after, length)
            if found.experts is not None:
                chosen.append(found.experts.to(torch.int16))
            # Nothing takes device memory from here on: a window is done whole or not at all.
            for path, square in found.squares.items():
                squares.setdefault(path, []).append(square)
            land(gradient[part], found.x, landing)
            done = part.stop

    with_less(inputs, number, rest, fallbacks, DOING)
    if landing is not None:
        landing.synchronize()
    if not chosen:
        return gradient, None
    joined = {path: torch.cat(parts) for path, parts in squares.items()}
    normalised = {path: _normalised(square, ranks).cpu() for path, square in joined.items()}
    return gradient, Guidance(torch.cat(chosen).cpu(), normalised)


def _normalised(squares: Tensor, ranks: Ranks) -> Tensor:
    """Returns the squares over all ranks' mean; ones where the loss minds nothing."""
    mean = _mean(squares, ranks)
    return torch.where(mean > 0, squares / mean, torch.ones_like(squares))


def _mean(values: Tensor, ranks: Ranks) -> Tensor:
    """Returns the float32 mean of all ranks' values, summed in float64: whose is which is lost."""
    total = values.sum(dtype=torch.float64)
    count = torch.full_like(total, values.numel())
    total, count = ranks.add(torch.stack([total, count]))
    mean: Tensor = total / count
    return mean.to(values.dtype)


def _slopes(
    config: ModelConfig,
    weights: Weights,
    hidden: Tensor,
    indices: Tensor | None,
    after: Tensor,
    length: int,
) -> _Slopes:
    """Returns the gradients of a layer whose output's is `after`, both [tokens, hidden]."""
    x = hidden.detach().requires_grad_()
    offsets = torch.arange(len(x) // length + 1, device=x.device) * length
    if "mlp.gate" in weights.matrices and rows.fused(hidden):
        with torch.enable_grad(), _repeatable():
            outputs = after_attention(config, weights, x, offsets, indices, length)
        mixture = mixture_gradient(config, weights, outputs[1].detach(), after)
        with _repeatable():
            (slope,) = torch.autograd.grad(outputs, x, (after, mixture.x))
        return _Slopes(slope, mixture.experts, mixture.squares)
    seen = _Outputs()
    with torch.enable_grad(), _repeatable():
        output = decoder_layer(config, weights, x, offsets, indices, seen, length)
        wanted = [x, *seen.products.values()]
        slope, *slopes = torch.autograd.grad(output.hidden, wanted, after)
    if output.experts is None:
        return _Slopes(slope, None, {})
    return _Slopes(slope, output.experts, _squares(output.experts, seen, slopes))


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


def _squares(experts: Tensor, seen: _Outputs, slopes: list[Tensor]) -> dict[str, Tensor]:
    """Returns each path's mean squared gradient [tokens, k], unsorted from expert order."""
    order = experts.flatten().argsort(stable=True)
    found = {}
    for path, slope in zip(seen.products, slopes, strict=True):
        flat = torch.empty(len(order), device=slope.device)
        flat[order] = slope.float().square().mean(-1)
        found[path] = flat.view(experts.shape)
    return found


def _indices_of(states: States, windows: slice, length: int, device: torch.device) -> Tensor | None:
    """A few windows' part of the shared indices."""
    if states.indices is None:
        return None
    first, last = windows.start * length, windows.stop * length
    found = []
    for chunk in states.indices:
        found.append(chunk[max(first, 0) : max(last, 0)])
        first, last = first - len(chunk), last - len(chunk)
    return torch.cat(found).to(device)
