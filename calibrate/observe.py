"""Statistics of a layer's inputs: Gram matrices, mean squares, ranges, tokens an expert saw."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from calibrate.block import Observer
from calibrate.ranges import Ranges
from fused_ops.expert_gemm.reference import expert_gemm
from glm5q import quant
from glm5q.types import ActivationGrid

Key = TypeVar("Key")

# Matrices that multiply the same input share one Gram.
INPUT_OF = {
    "self_attn.q_a_proj": "attention input",
    "self_attn.kv_a_proj_with_mqa": "attention input",
    "self_attn.indexer.wk": "attention input",
    "self_attn.indexer.weights_proj": "attention input",
    "self_attn.q_b_proj": "query latent",
    "self_attn.indexer.wq_b": "query latent",
    "self_attn.o_proj": "attention output",
    "mlp.gate_proj": "mlp input",
    "mlp.up_proj": "mlp input",
    "mlp.shared_experts.gate_proj": "mlp input",
    "mlp.shared_experts.up_proj": "mlp input",
}


class RowWeights(Protocol):
    """Weights of a routed expert's rows, mean 1; see calibrate.guidance."""

    def rows(self, path: str, tokens: Tensor, offsets: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Moments:
    """Second moments of one input, a stack for routed experts.

    `gram` is the sum of x' x, float32 [stack, in, in]; `square` its diagonal [stack, in], alone
    where no Gram is wanted; `tokens` int64 [stack] counts the rows summed.
    """

    square: Tensor
    tokens: Tensor
    gram: Tensor | None


@dataclass
class Statistics(Observer):
    """An Observer that sums moments and ranges over every forward it watches.

    `gram_paths` are the matrices whose method needs a Gram; the others get mean squares only.
    `guidance` weighs the rows of routed experts; sums of weighted squares stay sums over rows.
    """

    gram_paths: Collection[str]
    guidance: RowWeights | None = None
    moments: dict[str, Moments] = field(default_factory=dict)
    ranges: dict[str, Ranges] = field(default_factory=dict)
    _summed_for: dict[str, str] = field(default_factory=dict)

    def linear(self, path: str, x: Tensor, y: Tensor) -> None:
        self._range(path, x, y)
        key = INPUT_OF.get(path, path)
        if self._summed_for.setdefault(key, path) != path:
            return  # this input was summed for the first matrix that reads it
        offsets = torch.tensor([0, x.shape[0]])
        self._sum(key, x, offsets, any(INPUT_OF.get(p, p) == key for p in self.gram_paths))

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, tokens: Tensor) -> None:
        self._range(path, x, y)
        if self.guidance is not None:
            weight = self.guidance.rows(path, tokens + self.first_token, offsets)
            x = x.float() * weight.sqrt().unsqueeze(1)
        self._sum(path, x, offsets, path in self.gram_paths)

    def of(self, path: str) -> Moments:
        return self.moments[INPUT_OF.get(path, path)]

    def ranges_of(self, path: str) -> Ranges:
        """Returns a matrix's ranges, all zero if nothing was seen of it."""
        return self.ranges.get(path) or Ranges.of_width(1, torch.device("cpu"))

    def _range(self, path: str, x: Tensor, y: Tensor) -> None:
        if path not in self.ranges:
            self.ranges[path] = Ranges.of_width(x.shape[1], x.device)
        self.ranges[path].add(x, y)

    def _sum(self, key: str, x: Tensor, offsets: Tensor, want_gram: bool) -> None:
        """Adds x [rows, in], unscaled: products of bfloat16 are exact in float32."""
        if key not in self.moments:
            self.moments[key] = _empty(len(offsets) - 1, x, want_gram)
        moments = self.moments[key]
        bounds = offsets.tolist()
        for index, (start, end) in enumerate(pairwise(bounds)):
            rows = x[start:end].float()
            moments.square[index] += rows.square().sum(0)
            moments.tokens[index] += end - start
            if moments.gram is not None and end > start:
                moments.gram[index].addmm_(rows.T, rows)


def _empty(stack: int, x: Tensor, want_gram: bool) -> Moments:
    columns = x.shape[1]
    gram = x.new_zeros((stack, columns, columns), dtype=torch.float32) if want_gram else None
    square = x.new_zeros((stack, columns), dtype=torch.float32)
    return Moments(square, torch.zeros(stack, dtype=torch.int64), gram)


@dataclass
class HeldOutErrors(Observer):
    """An Observer that measures candidates' output error on tokens the statistics did not see.

    `candidates` maps a matrix path to its candidate dequantized weights by method name;
    `activation` to the grid its input meets in deployment. Sums are float64 [stack].
    """

    candidates: Mapping[str, Mapping[str, Tensor]]
    activation: Mapping[str, ActivationGrid | None]
    guidance: RowWeights | None = None
    squared: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    reference: dict[str, Tensor] = field(default_factory=dict)

    def linear(self, path: str, x: Tensor, y: Tensor) -> None:
        if path in self.candidates:
            self._measure(path, x, torch.tensor([0, x.shape[0]]), y)

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, tokens: Tensor) -> None:
        if path not in self.candidates:
            return
        weight = None
        if self.guidance is not None:
            weight = self.guidance.rows(path, tokens + self.first_token, offsets)
        self._measure(path, x, offsets, y, weight)

    def _measure(
        self, path: str, x: Tensor, offsets: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> None:
        rounded = quant.quantize_activation(x, self.activation[path])
        _add(self.reference, path, segment_squares(y, offsets, weight))
        for method, candidate in self.candidates[path].items():
            stack = candidate if candidate.dim() == 3 else candidate.unsqueeze(0)
            difference = expert_gemm(rounded, stack, offsets) - y
            _add(self.squared, (path, method), segment_squares(difference, offsets, weight))


def segment_squares(values: Tensor, offsets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns the float64 sum of squares of each segment of rows [segments], rows weighted."""
    rows = values.double().square().sum(-1)
    rows = rows if weight is None else rows * weight
    return torch.segment_reduce(rows, "sum", offsets=offsets.to(rows.device), initial=0)


def _add(table: dict[Key, Tensor], key: Key, value: Tensor) -> None:
    table[key] = table[key] + value if key in table else value
