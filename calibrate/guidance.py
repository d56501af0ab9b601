"""How much the model's own loss minds an error at each routed expert, token by token.

One sweep forward over the source keeps every layer's input; one sweep backward, one layer resident,
gives the gradient of -log p(a token drawn from the model) at each expert product's output. Its mean
square over the output, the diagonal of the Fisher information, weighs the token in the Gram of that
product (GuidedQuant, arXiv 2505.07004, with one weight a token instead of one a group of rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate.block import LayerOutput, Observer, decoder_layer, rms_norm
from calibrate.states import FLOAT32_CHUNK_TOKENS, Progress, States, advance, embed, silent
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Weights, runnable
from glm5q.stream import LayerSource, layers

SEED = 0  # of the tokens drawn from the model


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
        counts = offsets.diff()
        mine = torch.repeat_interleave(torch.arange(len(counts)), counts.cpu())
        match = self.experts[tokens.cpu()] == mine.unsqueeze(1)
        weight = (self.weights[path][tokens.cpu()] * match).sum(1)
        weight = torch.where(match.any(1), weight, torch.ones_like(weight))
        return weight.to(tokens.device)


def guide(
    source: LayerSource, tokens: Tensor, progress: Progress = silent, device: str = "cpu"
) -> list[Guidance | None]:
    """Returns the guidance of every decoder layer, None where there are no routed experts.

    `tokens` int64 [windows, sequence_length]. Keeps one hidden state a layer; weights of two layers
    at a time are in memory.
    """
    config = source.config
    total = 2 * config.num_hidden_layers
    states, inputs = embed(source, tokens, device, FLOAT32_CHUNK_TOKENS), []
    states = replace(states, spare=None)  # every layer's input is kept
    for layer in layers(source.layer, range(config.num_hidden_layers)):
        progress(f"guidance, layer {layer.number}", layer.number, total)
        inputs.append(states)
        states = advance(config, layer.number, runnable(layer, device=device), states)
    gradient = _loss_gradient(source, states.hidden, device)
    guidance: list[Guidance | None] = []
    for layer in layers(source.layer, range(config.num_hidden_layers - 1, -1, -1)):
        progress(f"guidance, layer {layer.number}", total - 1 - layer.number, total)
        weights = runnable(layer, device=device)
        gradient, found = _backward(config, weights, inputs[layer.number], gradient)
        inputs.pop()
        guidance.append(found)
    return guidance[::-1]


def _loss_gradient(source: LayerSource, hidden: Tensor, device: str) -> Tensor:
    """Returns the gradient of -log p(drawn token) before the final norm, shaped as `hidden`."""
    config = source.config
    tied = config.tie_word_embeddings
    head = source.top_tensor(names.EMBEDDING if tied else names.LM_HEAD).float().to(device)
    norm = source.top_tensor(names.FINAL_NORM).to(device)
    generator = torch.Generator(device=device).manual_seed(SEED)
    gradient = torch.empty_like(hidden)
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


def _backward(
    config: ModelConfig, weights: Weights, states: States, gradient: Tensor
) -> tuple[Tensor, Guidance | None]:
    """Returns (gradient at the layer's input, its guidance), a window at a time."""
    windows, length, _ = states.hidden.shape
    before = torch.empty_like(gradient)
    chosen: list[Tensor] = []
    squares: dict[str, list[Tensor]] = {}
    device = next(iter(weights.vectors.values())).device
    offsets = torch.tensor([0, length], device=device)
    for window in range(windows):
        x = states.hidden[window].detach().to(device).requires_grad_()
        seen = _Outputs()
        with torch.enable_grad():
            indices = _window_indices(states, window, length)
            indices = None if indices is None else indices.to(device)
            output = decoder_layer(config, weights, x, offsets, indices, seen)
        wanted = [x, *(y for y, _ in seen.products.values())]
        found = torch.autograd.grad(output.hidden, wanted, gradient[window].to(device))
        before[window] = found[0]
        if output.experts is not None:
            chosen.append(output.experts.to(torch.int16).cpu())
            _collect(output, seen, found[1:], squares)
    if not chosen:
        return before, None
    joined = {path: torch.cat(parts) for path, parts in squares.items()}
    normalised = {path: weight / weight.mean() for path, weight in joined.items()}
    return before, Guidance(torch.cat(chosen), normalised)


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


def _window_indices(states: States, window: int, length: int) -> Tensor | None:
    """One window's part of the shared indices."""
    if states.indices is None:
        return None
    return torch.cat(states.indices)[window * length : (window + 1) * length]
