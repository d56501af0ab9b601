"""Source against quantized, side by side, a layer at a time, on tokens calibration did not see."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate import selection
from calibrate.block import LayerOutput, Observer
from calibrate.logits import Head, argmax, compare_predictions, mean_kl
from calibrate.selection import Recall, SelectionMap, index_overlap
from calibrate.states import (
    FLOAT32_CHUNK_TOKENS,
    Progress,
    States,
    advance,
    embed,
    mtp_states,
    silent,
    with_less,
)
from fused_ops.expert_gemm.reference import expert_gemm
from glm5q import names, quant
from glm5q.layer import Layer, Weights, runnable
from glm5q.stream import LayerSource, layers
from glm5q.types import Fallback, Role

BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True)
class LayerComparison:
    """One layer's agreement between the streams; see reports.record.LayerAccuracy."""

    layer: int
    hidden_error: float
    role_error: dict[str, float]
    topk_overlap: float | None
    topk_overlap_p1: float | None
    router_agreement: float | None
    kl: float


@dataclass(frozen=True)
class IndexerComparison:
    """What the indexer selects in both streams; see reports.measures.Indexer.

    `overlap` is by layer and bucket of positions; `maps` by layer, source's and quantized's;
    `mass` float32 [queries, sizes] is the source's attention mass on its best k of `sizes`.
    """

    overlap: dict[int, list[float | None]]
    maps: dict[int, tuple[SelectionMap, SelectionMap]]
    sizes: list[int]
    mass: Tensor


@dataclass(frozen=True)
class Comparison:
    """What evaluating gave. KL in nats a token, source relative to quantized.

    `token_kl` [windows, positions]; `nll` [2, windows, positions - 1] and `argmax` [2, windows,
    positions] are the source's and the quantized stream's. `draft` is (agreement, acceptance of the
    source's draft, of the quantized one's), None where either lacks an MTP layer. `fallbacks` say
    where device memory ran out.
    """

    token_kl: Tensor
    nll: Tensor
    argmax: Tensor
    layers: tuple[LayerComparison, ...]
    indexer: IndexerComparison
    draft: tuple[float, float, float] | None
    time_s: float
    fallbacks: tuple[Fallback, ...]


def bootstrap_interval(window_means: Tensor, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % interval of the mean over windows, resampled with replacement.

    Windows, not tokens: neighbouring tokens are not independent.
    """
    generator = np.random.default_rng(seed)
    values = window_means.double().numpy()
    picks = generator.integers(0, len(values), (BOOTSTRAP_SAMPLES, len(values)))
    low, high = np.quantile(values[picks].mean(1), (0.025, 0.975))
    return float(low), float(high)


def evaluate(
    source: LayerSource,
    quantized: LayerSource,
    tokens: Tensor,
    progress: Progress = silent,
    quantize_activations: bool = True,
    device: str = "cpu",
) -> Comparison:
    """Returns how far the quantized stream is from the source on tokens [windows, length].

    Two layers of each are in memory at a time. The quantized one runs at its activation precision
    unless `quantize_activations` is False.
    """
    started = time.perf_counter()
    run = _Evaluation(source, quantized, tokens, quantize_activations, device)
    count = source.config.num_hidden_layers
    pairs = zip(
        layers(source.layer, range(count)), layers(quantized.layer, range(count)), strict=True
    )
    for mine, theirs in pairs:
        progress(f"evaluating layer {mine.number}", mine.number, count + 1)
        run.layer(mine, theirs)
    progress("evaluating logits", count, count + 1)
    predictions = compare_predictions(run.heads, (run.left.hidden, run.right.hidden), tokens)
    draft = run.draft(predictions.argmax)
    progress("evaluating logits", count + 1, count + 1)
    return Comparison(
        predictions.kl,
        predictions.nll,
        predictions.argmax,
        tuple(run.compared),
        run.indexer(),
        draft,
        time.perf_counter() - started,
        tuple(run.fallbacks),
    )


class _Evaluation:
    """The two streams between two layers, and what has been found so far."""

    def __init__(
        self,
        source: LayerSource,
        quantized: LayerSource,
        tokens: Tensor,
        quantize_activations: bool,
        device: str,
    ) -> None:
        self.source, self.quantized, self.tokens = source, quantized, tokens
        self.config, self.device = source.config, device
        self.quantize_activations = quantize_activations
        self.left = embed(source, tokens, device, FLOAT32_CHUNK_TOKENS)
        self.right = embed(quantized, tokens, device, FLOAT32_CHUNK_TOKENS)
        self.heads = Head(source, device), Head(quantized, device)
        self.compared: list[LayerComparison] = []
        self.fallbacks: list[Fallback] = []
        self._sizes = selection.recall_sizes(self.config.index_topk, tokens.shape[1])
        self._mapped = selection.mapped_layers(self.config)
        self._overlap: dict[int, list[float | None]] = {}
        self._maps: dict[int, tuple[SelectionMap, SelectionMap]] = {}
        self._mass: list[Tensor] = []

    def layer(self, mine: Layer, theirs: Layer) -> None:
        """Runs one layer of both streams."""
        number, length = mine.number, self.tokens.shape[1]
        watch, choices = self._advance(mine, theirs)
        self._mass += watch.recall.mass
        overlap = self._own_overlap(number, choices, length)
        self.compared.append(
            LayerComparison(
                layer=number,
                hidden_error=_relative(self.right.hidden - self.left.hidden, self.left.hidden),
                role_error=watch.relative(),
                topk_overlap=float(overlap.mean()) if overlap.numel() else None,
                topk_overlap_p1=float(overlap.quantile(0.01)) if overlap.numel() else None,
                router_agreement=choices.router_agreement(),
                kl=mean_kl(self.heads, (self.left.hidden, self.right.hidden)),
            )
        )

    def _advance(self, mine: Layer, theirs: Layer) -> tuple[SourceWatch, _Choices]:
        """Moves both streams on, in chunks of half as many windows where memory runs out."""
        number, config, length = mine.number, self.config, self.tokens.shape[1]
        weights = runnable(mine, device=self.device), self._runnable(theirs)
        roles = {m.path: m.role for m in names.layer_modules(config, number)}

        def both(left: States) -> tuple[SourceWatch, _Choices]:
            watch = SourceWatch(weights[1], roles, Recall(length, self._sizes))
            choices = _Choices(length, number in self._mapped)
            right = self.right if left is self.left else self.right.in_chunks(left.windows_at_once)
            after = advance(config, number, weights[0], left, watch, choices.keep)
            self.right = advance(config, number, weights[1], right, None, choices.compare)
            self.left = after
            return watch, choices

        return with_less(self.left, number, both, self.fallbacks, "evaluation")

    def _runnable(self, layer: Layer) -> Weights:
        return runnable(layer, device=self.device, quantize_activations=self.quantize_activations)

    def _own_overlap(self, number: int, choices: _Choices, length: int) -> Tensor:
        """The overlap of a layer with its own indexer; empty for one that shares another's."""
        if not self.config.full_indexer[number]:
            return torch.empty(0)
        positions, overlap = choices.positions_and_overlap()
        self._overlap[number] = selection.by_bucket(positions, overlap, length)
        if choices.maps:
            self._maps[number] = choices.maps[0], choices.maps[1]
        return overlap

    def indexer(self) -> IndexerComparison:
        mass = torch.cat(self._mass) if self._mass else torch.empty((0, len(self._sizes)))
        return IndexerComparison(self._overlap, self._maps, self._sizes, mass)

    def draft(self, own: Tensor) -> tuple[float, float, float] | None:
        """Runs the first MTP layer of both: drafts of token i + 2 from hidden i and token i + 1.

        `own` [2, windows, positions] are the streams' argmaxes; a draft is accepted where the model
        itself chooses that token at position i + 1.
        """
        if not (
            self.config.num_nextn_predict_layers and self.quantized.config.num_nextn_predict_layers
        ):
            return None
        number, drafts = self.config.num_hidden_layers, []
        streams = (self.source, self.left), (self.quantized, self.right)
        for side, (model, states) in enumerate(streams):
            layer = model.layer(number)
            weights = self._runnable(layer) if side else runnable(layer, device=self.device)
            before = mtp_states(self.config, weights, model, self.tokens, states)
            after = advance(self.config, number, weights, before).hidden
            drafts.append(argmax(self.heads[side], after, layer.vectors["shared_head.norm.weight"]))
        agreement = float((drafts[0] == drafts[1]).float().mean())
        accepted = [float((drafts[s] == own[s, :, 1:]).float().mean()) for s in (0, 1)]
        return agreement, accepted[0], accepted[1]


@dataclass
class SourceWatch(Observer):
    """Watches the source: each role's error were its matrices the quantized ones, and recall."""

    quantized: Weights
    roles: Mapping[str, Role]
    recall: Recall
    squares: dict[str, Tensor] = field(default_factory=dict)

    def linear(self, path: str, x: Tensor, y: Tensor) -> None:
        grid = self.quantized.activation[path]
        rounded = quant.quantize_activation(x, grid).to(y.dtype)
        self._add(path, F.linear(rounded, self.quantized.matrices[path].to(y.dtype)), y)

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, _tokens: Tensor) -> None:
        rounded = quant.quantize_activation(x, self.quantized.activation[path])
        self._add(path, expert_gemm(rounded, self.quantized.matrices[path], offsets), y)

    def indexer(self, query: Tensor, key: Tensor, gates: Tensor, offsets: Tensor) -> None:
        self.recall.first_token = self.first_token
        self.recall.indexer(query, key, gates, offsets)

    def attention(self, query: Tensor, latent: Tensor, offsets: Tensor, scale: float) -> None:
        self.recall.attention(query, latent, offsets, scale)

    def _add(self, path: str, other: Tensor, y: Tensor) -> None:
        both = torch.stack(((other - y).double().square().sum(), y.double().square().sum())).cpu()
        role = self.roles[path].value
        self.squares[role] = self.squares.get(role, torch.zeros(2, dtype=torch.float64)) + both

    def relative(self) -> dict[str, float]:
        """Returns each role's relative output error."""
        return {r: float((s[0] / s[1].clamp(min=1e-30)).sqrt()) for r, s in self.squares.items()}


class _Choices:
    """The source stream's index and router choices, to be met by the quantized stream's."""

    def __init__(self, length: int, mapped: bool) -> None:
        self._kept: dict[int, LayerOutput] = {}
        self._overlap: list[tuple[Tensor, Tensor]] = []
        self._routed: list[Tensor] = []
        self._length = length
        self.maps = [SelectionMap(length), SelectionMap(length)] if mapped else []

    def keep(self, windows: slice, output: LayerOutput) -> None:
        self._kept[windows.start] = output

    def compare(self, windows: slice, output: LayerOutput) -> None:
        mine = self._kept.pop(windows.start)
        self._overlap.append(index_overlap(mine.indices, output.indices, self._length))
        if self.maps:
            self.maps[0].add(mine.indices)
            self.maps[1].add(output.indices)
        if mine.experts is not None and output.experts is not None:
            equal = (mine.experts.unsqueeze(2) == output.experts.unsqueeze(1)).any(2)
            self._routed.append(equal.float().mean(1).cpu())

    def positions_and_overlap(self) -> tuple[Tensor, Tensor]:
        positions, overlap = zip(*self._overlap, strict=True)
        return torch.cat(positions), torch.cat(overlap)

    def router_agreement(self) -> float | None:
        return float(torch.cat(self._routed).mean()) if self._routed else None


def _relative(difference: Tensor, reference: Tensor) -> float:
    """|difference| / |reference|, a window at a time: no float64 copy of a whole stream."""
    squares = [
        torch.stack((d.double().square().sum(), r.double().square().sum()))
        for d, r in zip(difference, reference, strict=True)
    ]
    total = torch.stack(squares).sum(0)
    return math.sqrt(float(total[0]) / max(float(total[1]), 1e-30))
