"""Statistics of a layer's inputs: Gram matrices, mean squares, ranges, tokens an expert saw."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from calibrate.block import Observer
from calibrate.float8_grams import HeldRows, takes
from calibrate.products import Stack
from calibrate.ranges import Ranges
from calibrate.ranks import ALONE, Ranks
from calibrate.rows import (
    column_absmax,
    mirror_grams,
    round_activation,
    row_squares,
    sum_grams,
)
from fused_ops.expert_gemm.reference import expert_gemm
from glm5q import names
from glm5q.layer import powers_of_two
from glm5q.types import ActivationGrid

Key = TypeVar("Key")
ROUTER = "mlp.gate"  # reads what the experts read
HELD_CALLS = 4  # chunks whose rows wait as float8: 18 GB at full size, gate_up's and down's
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
class Folded:
    """A candidate of which columns were multiplied by 2^fold, int8 [stack, in].

    Its input is divided by that first: exact but for the grid that activations are rounded on.
    """

    rounded: Tensor | Stack
    fold: Tensor

    def divided(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Returns x [rows, in] over 2^fold, rows sorted by entry of the stack."""
        counts = offsets.diff().to(x.device)
        power = powers_of_two(-self.fold.to(x.device)).to(x.dtype)
        return x * power.repeat_interleave(counts, 0)


@dataclass(frozen=True)
class Moments:
    """Second moments of one input, a stack for routed experts.

    `gram` is the sum of x' x, float32 [stack, in, in] once complete; `square` its diagonal
    [stack, in], alone where no Gram is wanted; `tokens` int64 [stack] counts the rows summed.
    """

    square: Tensor
    tokens: Tensor
    gram: Tensor | None


@dataclass
class Statistics(Observer):
    """An Observer that sums moments and ranges over every forward it watches.

    `gram_paths` are the matrices whose method needs a Gram; the others get mean squares only.
    `guidance` weighs the rows of routed experts; sums of weighted squares stay sums over rows.
    Each of `ranks` sums its own tokens, of every expert; `complete` brings the sums together.
    `token_cap` lets no row weigh more in its sums than capped() says. `float8_grams` takes experts'
    Grams of inputs rounded to e4m3 where a GPU multiplies those; see calibrate.float8_grams.
    """

    gram_paths: Collection[str]
    guidance: RowWeights | None = None
    token_cap: bool = False
    moments: dict[str, Moments] = field(default_factory=dict)
    ranges: dict[str, Ranges] = field(default_factory=dict)
    ranks: Ranks = ALONE
    float8_grams: bool = False
    _summed_for: dict[str, str] = field(default_factory=dict)
    _held: dict[str, HeldRows] = field(default_factory=dict)

    def linear(self, path: str, x: Tensor, y: Tensor) -> None:
        self._range(path, x, y)
        key = INPUT_OF.get(path, path)
        if self._summed_for.setdefault(key, path) != path:
            return  # this input was summed for the first matrix that reads it
        offsets = torch.tensor([0, x.shape[0]])
        x = capped(x) if self.token_cap else x
        self._sum(key, x, offsets, any(INPUT_OF.get(p, p) == key for p in self.gram_paths))

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, tokens: Tensor) -> None:
        same = path == names.GATE_UP and ROUTER in self.ranges  # each token's row several times
        self._range(path, x[:0] if same else x, y)
        seen = self.ranges[ROUTER if same else path].channel_absmax
        plain = self.guidance is None and not self.token_cap
        largest = seen.amax() if plain else None
        x = capped(x) if self.token_cap else x
        if self.guidance is not None:
            weight = self.guidance.rows(path, tokens + self.first_token, offsets)
            x = torch.mul(x, weight.sqrt().unsqueeze(1), out=torch.empty_like(x))
        self._sum(path, x, offsets, path in self.gram_paths, largest)

    def complete(self) -> None:
        """Brings all ranks' sums together in float32: counts, squares, ranges, its experts' Grams.

        Mirrors Grams whose one half was summed, and takes their squares from their diagonals. The
        Grams of experts that other ranks round are not to be used.
        """
        for key, held in self._held.items():
            gram = self.moments[key].gram
            assert gram is not None
            held.flush(gram)
        self._held.clear()
        for key, moments in self.moments.items():
            self.moments[key] = self._collected(moments)
        self.ranges = {path: found.of_all(self.ranks) for path, found in self.ranges.items()}
        if ROUTER in self.ranges and names.GATE_UP in self.ranges:
            both = self.ranges[names.GATE_UP], self.ranges[ROUTER]
            self.ranges[names.GATE_UP] = both[0].with_input_of(both[1])

    def _collected(self, moments: Moments) -> Moments:
        device = moments.square.device
        tokens = self.ranks.add(moments.tokens.to(device)).cpu()
        gram, square = moments.gram, moments.square
        if gram is None:
            return Moments(self.ranks.add(square).float(), tokens, None)
        self.ranks.collect(gram)
        if not gram.is_cuda:
            gram = gram.float()
        else:
            mine = self.ranks.mine(len(gram))
            mirror_grams(gram[mine.start : mine.stop])
        return Moments(gram.diagonal(dim1=1, dim2=2).clone(), tokens, gram)

    def release(self) -> None:
        """Drops the Grams once they have been used: most of what a layer holds."""
        self.moments = {key: replace(m, gram=None) for key, m in self.moments.items()}

    def of(self, path: str) -> Moments:
        return self.moments[INPUT_OF.get(path, path)]

    def ranges_of(self, path: str) -> Ranges:
        """Returns a matrix's ranges, all zero if nothing was seen of it."""
        return self.ranges.get(path) or Ranges.of_width(1, torch.device("cpu"))

    def ranges_of_outputs(self) -> dict[str, Ranges]:
        """Returns the ranges of the stack whose outputs were not wanted."""
        return {path: found for path, found in self.ranges.items() if path == names.DOWN}

    def seen(self, path: str) -> Ranges | None:
        """Returns a matrix's ranges, None if no token ever met it: zero would be a finding."""
        found = self.ranges.get(path)
        return found if found and (found.input_absmax != 0 or found.output_absmax != 0) else None

    def _range(self, path: str, x: Tensor, y: Tensor) -> None:
        if path not in self.ranges:
            self.ranges[path] = Ranges.of_width(x.shape[1], x.device)
        self.ranges[path].add(x, y)

    def _sum(
        self,
        key: str,
        x: Tensor,
        offsets: Tensor,
        want_gram: bool,
        largest: Tensor | None = None,
    ) -> None:
        """Adds x [rows, in], unscaled: products of bfloat16 are exact in float32.

        `largest` is no less than any |x|, if known.
        """
        if key not in self.moments:
            self.moments[key] = _empty(len(offsets) - 1, x, want_gram)
        moments = self.moments[key]
        if moments.gram is not None:
            counts = offsets.diff().to(moments.tokens.device)
            self.moments[key] = replace(moments, tokens=moments.tokens + counts)
            if self.float8_grams and len(x) and len(moments.gram) > 1 and takes(x, moments.gram):
                held = self._held.setdefault(key, HeldRows(HELD_CALLS))
                held.add(x, offsets.to(x.device), moments.gram, _bound(x, largest))
            else:
                sum_grams(x, offsets, moments.gram)
            return
        for index, (start, end) in enumerate(pairwise(offsets.tolist())):
            if end == start:
                continue
            moments.tokens[index] += end - start
            rows = x[start:end]
            squares = _column_squares(rows) if x.is_cuda else rows.float().square().sum(0)
            moments.square[index] += squares


def _bound(x: Tensor, largest: Tensor | None) -> Tensor:
    """Returns 1.75 times a power of two, no less than any |x|: e4m3's 448 is 1.75 x 256.

    So that what else was seen, which `largest` is of, moves only what e4m3 holds in fewer bits:
    what is below 2^-13 of the largest.
    """
    largest = column_absmax(x).amax() if largest is None else largest
    return 1.75 * powers_of_two(torch.frexp(largest.float() / 1.75).exponent)


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


def _column_squares(rows: Tensor) -> Tensor:
    """float32 [columns], without a float32 copy."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float32)
    return norms.square()


def _empty(stack: int, x: Tensor, want_gram: bool) -> Moments:
    """Sums to be: float64 on a CPU, where that hides the ranks' order; a GPU has no room for it."""
    columns = x.shape[1]
    dtype = torch.float32 if x.is_cuda else torch.float64
    gram = x.new_zeros((stack, columns, columns), dtype=dtype) if want_gram else None
    square = x.new_zeros((stack, columns), dtype=dtype)
    counted = x.device if want_gram else "cpu"
    return Moments(square, torch.zeros(stack, dtype=torch.int64, device=counted), gram)


@dataclass
class HeldOutErrors(Observer):
    """An Observer that measures candidates' output error on tokens the statistics did not see.

    `candidates` maps a matrix path to its candidate weights by method name, dequantized, or a
    quantized stack that would be too large so;
    `activation` to the grid its input meets in deployment. Sums are float64 [stack]. `unseen` are
    the ranges of stacks whose outputs the statistics did without, which are seen here.
    """

    candidates: Mapping[str, Mapping[str, Tensor | Stack | Folded]]
    activation: Mapping[str, ActivationGrid | None]
    guidance: RowWeights | None = None
    unseen: Mapping[str, Ranges] = field(default_factory=dict)
    squared: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    reference: dict[str, Tensor] = field(default_factory=dict)

    def complete(self, ranks: Ranks, device: torch.device | str) -> None:
        """Adds up what all ranks measured; one of them may have had no window at all."""
        if ranks.size == 1:
            return
        for ranges in self.unseen.values():
            ranges.share_outputs(ranks)
        for path, candidates in self.candidates.items():
            first = next(iter(candidates.values()))
            first = first.rounded if isinstance(first, Folded) else first
            stack = len(first)
            none = torch.zeros(stack, dtype=torch.float64, device=device)
            seen = (none[:1] + (path in self.reference)).to(device)
            own = [self.squared.get((path, method), none) for method in candidates]
            parts = (seen, self.reference.get(path, none), *own)
            total = ranks.add(torch.cat([part.to(device) for part in parts]))
            if total[0] > 0:  # kv_b's product is never taken on its own
                self.reference[path], *others = total[1:].split(stack)
                for method, squared in zip(candidates, others, strict=True):
                    self.squared[path, method] = squared

    def linear(self, path: str, x: Tensor, y: Tensor) -> None:
        if path in self.candidates:
            self._measure(path, x, torch.tensor([0, x.shape[0]]), y)

    def experts(self, path: str, x: Tensor, offsets: Tensor, y: Tensor, tokens: Tensor) -> None:
        if path in self.unseen:
            self.unseen[path].add(x[:0], y)
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
        for method, candidate in self.candidates[path].items():
            given, matrix = x, candidate
            if isinstance(candidate, Folded):
                given, matrix = candidate.divided(x, offsets), candidate.rounded
            if isinstance(matrix, Stack):
                found = matrix.product(given, offsets)
            else:
                assert isinstance(matrix, Tensor)
                stack = matrix if matrix.dim() == 3 else matrix.unsqueeze(0)
                found = expert_gemm(round_activation(given, self.activation[path]), stack, offsets)
            squares = row_squares(found, y)
            _add(self.squared, (path, method), segment_sums(squares, offsets, weight))


def segment_squares(values: Tensor, offsets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Returns the float64 sum of squares of each segment of rows [segments], rows weighted."""
    return segment_sums(_row_squares(values), offsets, weight)


def segment_sums(rows: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the sum of each segment of `rows` [rows], weighted."""
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
