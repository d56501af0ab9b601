"""Whether a model finds what it was told long before: answers to planted questions, told to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.logits import Head
from calibrate.states import FLOAT32_CHUNK_TOKENS, Progress, advance, embed, silent
from glm5q.layer import runnable
from glm5q.stream import LayerSource, layers


@dataclass(frozen=True)
class Answers:
    """`right` bool [windows, questions]: every token of the answer is the likeliest.

    `nll` float32 [windows, questions]: the answer's negative log likelihood, nats a token.
    """

    right: Tensor
    nll: Tensor


def answers(
    model: LayerSource,
    tokens: Tensor,
    starts: Tensor,
    width: int,
    progress: Progress = silent,
    device: str = "cpu",
) -> Answers:
    """Returns how the model answers; activations are quantized where its weights are.

    `tokens` int64 [windows, length] hold facts, questions and their answers; `starts` int64
    [windows, questions] say where the answers of `width` tokens begin.
    """
    config, count = model.config, model.config.num_hidden_layers
    states = embed(model, tokens, device, FLOAT32_CHUNK_TOKENS)
    for layer in layers(model.layer, range(count)):
        progress(f"retrieval, layer {layer.number}", layer.number, count)
        states = advance(config, layer.number, runnable(layer, device=device), states)
    progress("retrieval", count, count)
    head = Head(model, device)
    right = torch.empty(starts.shape, dtype=torch.bool)
    nll = torch.empty(starts.shape)
    for window, row in enumerate(starts):
        at = row.unsqueeze(1) + torch.arange(width)
        hidden = states.hidden[window, (at - 1).flatten().to(states.hidden.device)]
        logs = head.log_probabilities(hidden).cpu().unflatten(0, at.shape)
        wanted = tokens[window][at]
        right[window] = (logs.argmax(-1) == wanted).all(1)
        nll[window] = -logs.gather(2, wanted.unsqueeze(2)).squeeze(2).mean(1)
    return Answers(right, nll)
