"""Statistics of a layer's inputs: Gram matrices, mean squares, ranges, tokens an expert saw."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from calibrate.block import Observer
from calibrate.ranges import Ranges
from calibrate.ranks import ALONE, Ranks
from calibrate.rows import round_activation
from fused_ops.expert_gemm.reference import expert_gemm
from glm5q import quant
from glm5q.layer import Codes
from glm5q.types import ActivationGrid

Key = TypeVar("Key")
BAND = 2048  # rows of a Gram summed at a time, up to the diagonal
PART = 16  # matrices of a stack dequantized at a time
CAP_QUANTILE, CAP = 0.999, 2.0  # a massive token: over twice this quantile of squared norms

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
    Of a stack shared out over `ranks` only this one's part is summed, tokens are counted of all.
    `token_cap` lets no row weigh more in its sums than capped() says.
    """

    gram_paths: Collection[str]
    guidance: RowWeights | None = None
    token_cap: bool = False
    moments: dict[str, Moments] = field(default_factory=dict)
    ranges: dict[str, Ranges] = field(default_factory=dict)
    ranks: Ranks = ALONE
    _summed_for: dict[str, str] = field(default_factory=dict)

    def linear(self, path: str, x: Tensor, y: Tensor) -> None:
        self._range(path, x, y)
        key = INPUT_OF.get(path, path)
        if self._summed_for.setdefault(key, path) != path:
            return  # this input was summed for the first matrix that reads it
        offsets = torch.tensor([0, x.shape[0]])
        x = capped(x) if self.token_cap else x
        self._sum(key, x, offsets, any(INPUT_OF.get(p, p) == key for p in self.gram_paths))

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, tokens: Tensor) -> None:
        self._range(path, x, y)
        x = capped(x) if self.token_cap else x
        if self.guidance is not None:
            weight = self.guidance.rows(path, tokens + self.first_token, offsets)
            x = torch.mul(x, weight.sqrt().unsqueeze(1), out=torch.empty_like(x))
        self._sum(path, x, offsets, path in self.gram_paths)

    def complete(self) -> None:
        """Mirrors Grams whose one half was summed, and takes the squares from their diagonals."""
        for moments in self.moments.values():
            if moments.gram is None or not moments.gram.is_cuda:
                continue
            for index in self.mine(len(moments.gram)):
                gram = moments.gram[index]
                for start in range(0, gram.shape[0], BAND):
                    band, width = slice(start, start + BAND), min(start + BAND, gram.shape[0])
                    gram[:start, band] = gram[band, :start].T
                    square = gram[band, start:width]
                    square.copy_(square.tril() + square.tril(-1).T)
            moments.square.copy_(moments.gram.diagonal(dim1=1, dim2=2))

    def release(self) -> None:
        """Drops the Grams once they have been used: most of what a layer holds."""
        self.moments = {key: replace(m, gram=None) for key, m in self.moments.items()}

    def mine(self, stack: int) -> range:
        """Which entries of a stack this rank sums."""
        return self.ranks.mine(stack)

    def of(self, path: str) -> Moments:
        return self.moments[INPUT_OF.get(path, path)]

    def ranges_of(self, path: str) -> Ranges:
        """Returns a matrix's ranges, all zero if nothing was seen of it."""
        return self.ranges.get(path) or Ranges.of_width(1, torch.device("cpu"))

    def seen(self, path: str) -> Ranges | None:
        """Returns a matrix's ranges, None if no token ever met it: zero would be a finding."""
        found = self.ranges.get(path)
        return found if found and (found.input_absmax != 0 or found.output_absmax != 0) else None

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
            moments.tokens[index] += end - start
            if index not in self.mine(len(bounds) - 1) or end == start:
                continue
            if x.is_cuda:
                _add_on_device(moments, index, x[start:end])
                continue
            rows = x[start:end].float()
            moments.square[index] += rows.square().sum(0)
            if moments.gram is not None:
                moments.gram[index].addmm_(rows.T, rows)


def capped(x: Tensor) -> Tensor:
    """Returns x [rows, in] with each row's square times min(1, CAP q / |x|^2).

    q is the CAP_QUANTILE of |x|^2 over the rows, those of all experts that run at once: eight
    massive tokens of 8192 otherwise make a Gram that forgets the others.
    """
    if not x.numel():
        return x
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
    limit = CAP**0.5 * norm.quantile(CAP_QUANTILE, interpolation="lower")
    share = (limit / norm.clamp(min=1e-30)).clamp(max=1)
    share = torch.where(limit > 0, share, torch.ones_like(share))  # hardly a row that is not zero
    return torch.mul(x, share.unsqueeze(1), out=torch.empty_like(x))


def _add_on_device(moments: Moments, index: int, rows: Tensor) -> None:
    """Adds rows [tokens, in] on a GPU: exact products, float32 sums, at its full rate.

    Of a Gram only half, which `complete` mirrors; its diagonal holds the squares.
    """
    if moments.gram is not None:
        gram = moments.gram[index]
        for start in range(0, gram.shape[0], BAND):  # the half on and below the diagonal
            band, width = slice(start, start + BAND), min(start + BAND, gram.shape[0])
            part = gram[band, :width]
            torch.addmm(part, rows[:, band].T, rows[:, :width], out_dtype=torch.float32, out=part)
    else:
        moments.square[index] += torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32).square()


def _empty(stack: int, x: Tensor, want_gram: bool) -> Moments:
    columns = x.shape[1]
    gram = x.new_zeros((stack, columns, columns), dtype=torch.float32) if want_gram else None
    square = x.new_zeros((stack, columns), dtype=torch.float32)
    return Moments(square, torch.zeros(stack, dtype=torch.int64), gram)


@dataclass
class HeldOutErrors(Observer):
    """An Observer that measures candidates' output error on tokens the statistics did not see.

    `candidates` maps a matrix path to its candidate weights by method name, dequantized, or codes
    of a stack too large to have so more than a part at a time;
    `activation` to the grid its input meets in deployment. Sums are float64 [stack].
    """

    candidates: Mapping[str, Mapping[str, Tensor | Codes]]
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
        _add(self.reference, path, segment_squares(y, offsets, weight))
        if any(isinstance(candidate, Codes) for candidate in self.candidates[path].values()):
            self._measure_parts(path, x, offsets, y, weight)
            return
        rounded = round_activation(x, self.activation[path])
        for method, candidate in self.candidates[path].items():
            assert isinstance(candidate, Tensor)
            stack = candidate if candidate.dim() == 3 else candidate.unsqueeze(0)
            difference = expert_gemm(rounded, stack, offsets) - y
            _add(self.squared, (path, method), segment_squares(difference, offsets, weight))

    def _measure_parts(
        self, path: str, x: Tensor, offsets: Tensor, y: Tensor, weight: Tensor | None
    ) -> None:
        """As _measure, PART entries of the stack at a time."""
        found: dict[str, list[Tensor]] = {method: [] for method in self.candidates[path]}
        bounds = offsets.tolist()
        for start in range(0, len(bounds) - 1, PART):
            stop = min(start + PART, len(bounds) - 1)
            rows = slice(bounds[start], bounds[stop])
            local = offsets[start : stop + 1] - bounds[start]
            rounded = round_activation(x[rows], self.activation[path])
            weights = None if weight is None else weight[rows]
            for method, candidate in self.candidates[path].items():
                assert isinstance(candidate, Codes)
                part = quant.dequantize(
                    candidate.codes[start:stop], candidate.scale[start:stop], x.dtype
                )
                difference = expert_gemm(rounded, part, local) - y[rows]
                found[method].append(segment_squares(difference, local, weights))
        for method, parts in found.items():
            _add(self.squared, (path, method), torch.cat(parts))


def segment_squares(values: Tensor, offsets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns the float64 sum of squares of each segment of rows [segments], rows weighted."""
    rows = _row_squares(values)
    rows = rows if weight is None else rows * weight
    return torch.segment_reduce(rows, "sum", offsets=offsets.to(rows.device), initial=0)


def _row_squares(values: Tensor) -> Tensor:
    """float64 [rows]; on a GPU no float64 copy is made, a row's own sum is float32."""
    if values.is_cuda:
        norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
        return norms.double().square()
    return values.double().square().sum(-1)


def _add(table: dict[Key, Tensor], key: Key, value: Tensor) -> None:
    table[key] = table[key] + value if key in table else value
