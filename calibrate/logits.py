"""Next-token distributions of two streams, compared a few positions at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate.block import rms_norm
from glm5q import names
from glm5q.stream import LayerSource

LOGIT_ELEMENTS = 1 << 25  # logits held at once: 128 MB as float32


class Head:
    """Final norm and output head of one checkpoint. Tied checkpoints use the embedding."""

    def __init__(self, source: LayerSource, device: str) -> None:
        tied = source.config.tie_word_embeddings
        self._weight = source.top_tensor(names.EMBEDDING if tied else names.LM_HEAD)
        self._weight = self._weight.float().to(device)
        self._norm = source.top_tensor(names.FINAL_NORM).to(device)
        self._eps = source.config.rms_norm_eps

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def positions(self) -> int:
        """How many positions' logits are held at once."""
        return max(1, LOGIT_ELEMENTS // self._weight.shape[0])

    def log_probabilities(self, hidden: Tensor, norm: Tensor | None = None) -> Tensor:
        """Returns float32 [positions, vocabulary] of hidden [positions, hidden]."""
        hidden = hidden.to(self._weight.device)  # long streams wait in host memory
        normed = rms_norm(hidden, self._norm if norm is None else norm, self._eps)
        return F.log_softmax(F.linear(normed.float(), self._weight), -1)


def kl_divergence(source: Tensor, quantized: Tensor) -> Tensor:
    """Returns KL(source || quantized) [positions] of log probabilities, never below zero."""
    return (source.exp() * (source - quantized)).sum(-1).clamp(min=0)


@dataclass(frozen=True)
class Predictions:
    """What two streams predict. Everything is [windows, positions]; `argmax` has both streams'.

    `nll` float32 [2, windows, positions - 1] is the negative log likelihood of the next token.
    """

    kl: Tensor
    nll: Tensor
    argmax: Tensor


def compare_predictions(
    heads: tuple[Head, Head], streams: tuple[Tensor, Tensor], tokens: Tensor
) -> Predictions:
    """Returns both streams' predictions; streams [windows, positions, hidden], tokens like them."""
    windows, length = tokens.shape
    kl = torch.empty((windows, length))
    nll = torch.empty((2, windows, length - 1))
    argmax = torch.empty((2, windows, length), dtype=torch.int64)
    step = heads[0].positions
    for window in range(windows):
        for start in range(0, length, step):
            part = slice(start, min(start + step, length))
            logs = [
                head.log_probabilities(stream[window, part])
                for head, stream in zip(heads, streams, strict=True)
            ]
            kl[window, part] = kl_divergence(logs[0], logs[1]).cpu()
            following = tokens[window, part.start + 1 : part.stop + 1].to(logs[0].device)
            span = slice(part.start, part.start + len(following))
            for side, log in enumerate(logs):
                argmax[side, window, part] = log.argmax(-1).cpu()
                picked = log[: len(following)].gather(1, following.unsqueeze(1)).squeeze(1)
                nll[side, window, span] = -picked.cpu()
    return Predictions(kl, nll, argmax)


def mean_kl(heads: tuple[Head, Head], streams: tuple[Tensor, Tensor]) -> float:
    """Returns the mean KL of the distributions read from two residual streams."""
    total = 0.0
    left, right = (stream.flatten(0, 1) for stream in streams)
    for mine, theirs in zip(
        torch.split(left, heads[0].positions), torch.split(right, heads[0].positions), strict=True
    ):
        logs = heads[0].log_probabilities(mine), heads[1].log_probabilities(theirs)
        total += float(kl_divergence(*logs).double().sum())
    return total / left.shape[0]


def argmax(head: Head, hidden: Tensor, norm: Tensor) -> Tensor:
    """Returns the most likely tokens [windows, positions] of hidden, under another final norm."""
    flat = torch.split(hidden.flatten(0, 1), head.positions)
    norm = norm.to(head.device)
    found = [head.log_probabilities(part, norm).argmax(-1).cpu() for part in flat]
    return torch.cat(found).view(hidden.shape[:2])
