"""Candidates for a matrix or stack: what was tried in bounded memory, and what went otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from calibrate import batched
from calibrate.descent import descend
from calibrate.gptq import blend, gptq, layer_mean, pooled_share, with_ridge
from calibrate.observe import Folded, Moments
from calibrate.products import Stack
from calibrate.ranks import ALONE, Ranks
from calibrate.rtn import rtn, search_scale
from glm5q import quant
from glm5q.layer import Codes
from glm5q.types import (
    ActivationGrid,
    CodedScheme,
    Fallback,
)
from recipes.schema import Gptq, Rtn

STACK_ELEMENTS = 1 << 28  # weights of a stack worked on at once: 1 GB as float32
FOLD_BAR = 0.9  # of the squared error without: a fold that wins less on few tokens, wins nothing
DEVICE_STACK_ELEMENTS = 3 << 27  # on a GPU: 16 experts' gate and up fill an H200 once


@dataclass(frozen=True)
class Candidates:
    """What was tried for one matrix: codes int8 [stack, out, in] by method, on one scale each.

    `scales` float32 [stack, out, groups] by method. Later methods must beat the first to be taken.
    `input_scale` is the static activation scale, for a scheme that has one. `folds` int8
    [stack, in] by method say where the codes are not of the weight but of its columns x 2^fold.
    """

    scheme: CodedScheme
    codes: dict[str, Tensor]
    scales: dict[str, Tensor]
    input_scale: float | None = None
    folds: dict[str, Tensor] = field(default_factory=dict)

    @property
    def unfolded(self) -> list[str]:
        """Returns the methods whose codes are of the weight as it is."""
        return [method for method in self.codes if method not in self.folds]

    def bar(self, method: str) -> float:
        """Returns how much of the others' squared error a method's has to stay under."""
        return FOLD_BAR if method in self.folds else 1.0

    def weight(self, method: str) -> Tensor:
        return quant.dequantize(self.codes[method], self.scales[method])

    def to_measure(self, dtype: torch.dtype) -> dict[str, Tensor | Stack | Folded]:
        """Returns the candidates by method, dequantized but for large stacks on a GPU."""
        found: dict[str, Tensor | Stack | Folded] = {}
        for method, codes in self.codes.items():
            rounded: Tensor | Stack
            if codes.is_cuda and len(codes) > 1:
                rounded = Stack.of(self.taken(codes, self.scales[method]))
            else:
                rounded = self.weight(method).to(dtype)
            fold = self.folds.get(method)
            found[method] = rounded if fold is None else Folded(rounded, fold)
        return found

    def taken(self, codes: Tensor, scale: Tensor) -> Codes:
        return Codes(codes, scale, self.scheme, self.input_scale)

    def activation(self) -> ActivationGrid | None:
        """Returns the grid its input meets in deployment."""
        method = next(iter(self.codes))
        return self.taken(self.codes[method], self.scales[method]).activation()


@dataclass
class LayerPlan:
    """Candidates of every matrix that gets codes, kept matrices, and what did not go as asked.

    `own` is what did not on this rank alone. `heads` are attention's, and how many rows of a head
    in kv_b_proj are its key's, before its value's.
    """

    descent: int  # rounds after GPTQ
    candidates: dict[str, Candidates] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    own: list[Fallback] = field(default_factory=list)
    heads: tuple[int, int] = (1, 0)


def find_candidates(
    layer: int,
    path: str,
    stack: Tensor,
    moments: Moments,
    wanted: Rtn | Gptq,
    plan: LayerPlan,
    ranks: Ranks = ALONE,
) -> Candidates:
    """Works through this rank's part of a stack a few matrices at a time, in bounded memory."""
    scheme = wanted.scheme()
    second = ["descent" if plan.descent else "gptq"] if isinstance(wanted, Gptq) else []
    methods = ["rtn", *second]
    groups = stack.shape[-1] // quant.group_columns(stack.shape[-1], scheme.group_size)
    codes = {m: torch.empty(stack.shape, dtype=torch.int8, device=stack.device) for m in methods}
    scales = {m: stack.new_empty((*stack.shape[:2], groups), dtype=torch.float32) for m in methods}
    damping = torch.zeros(stack.shape[0])
    layer_gram, share = None, None
    if isinstance(wanted, Gptq):
        layer_gram, share = layer_mean(moments, ranks), pooled_share(moments, wanted.pooling)
        _report_pooling(layer, path, moments, share, plan)
    parts = _parts(ranks.mine(stack.shape[0]), stack)
    while parts:
        try:
            found = {method: (codes[method], scales[method]) for method in methods}
            tries = _tries(stack, moments, layer_gram, share, wanted, plan.descent, parts, found)
            for used in tries:
                damping[parts.pop(0)] = used
        except torch.OutOfMemoryError:
            if parts[0].stop - parts[0].start == 1:
                raise
            parts = _halved(layer, path, parts, plan)
        if parts and torch.cuda.is_available():
            torch.cuda.empty_cache()
    damping = damping.to(stack.device)
    for tensor in (*codes.values(), *scales.values(), damping):
        ranks.complete(tensor)
    if isinstance(wanted, Gptq):
        _report_damping(layer, path, damping, wanted.damping, plan)
    return Candidates(scheme, codes, scales)


Tried = dict[str, tuple[Tensor, Tensor]]  # by method: codes [part, out, in], scale, to write to


def _parts(mine: range, stack: Tensor) -> list[slice]:
    """Returns what is worked on at once of this rank's entries of a stack."""
    elements = DEVICE_STACK_ELEMENTS if stack.is_cuda else STACK_ELEMENTS
    step = max(1, elements // stack[0].numel())
    return [slice(s, min(s + step, mine.stop)) for s in range(mine.start, mine.stop, step)]


def _halved(layer: int, path: str, parts: list[slice], plan: LayerPlan) -> list[slice]:
    """Returns the same entries in parts half as large, said in the record."""
    step = -(-(parts[0].stop - parts[0].start) // 2)
    action = f"{step} matrices rounded at once"
    plan.own.append(Fallback(layer, path, "device out of memory", action))
    first, last = parts[0].start, parts[-1].stop
    return [slice(start, min(start + step, last)) for start in range(first, last, step)]


def _tries(
    stack: Tensor,
    moments: Moments,
    layer_gram: Tensor | None,
    share: Tensor | None,
    wanted: Rtn | Gptq,
    descent: int,
    parts: Sequence[slice],
    found: Tried,
) -> Iterator[Tensor]:
    """Writes each part's candidates to `found` and yields the damping used.

    On a GPU the next part's Grams are factored beside this part's rounding: factoring leaves most
    of the chip idle.
    """

    parts = tuple(parts)

    def into(part: slice) -> Tried:
        return {method: (codes[part], scale[part]) for method, (codes, scale) in found.items()}

    if not batched.fits(stack, wanted.scheme()):
        for part in parts:
            gram = None
            if layer_gram is not None and share is not None and isinstance(wanted, Gptq):
                gram = with_ridge(blend(moments, part, layer_gram, share), wanted.ridge)
            yield _try(stack[part], moments.square[part], gram, wanted, descent, into(part))
        return
    beside = torch.cuda.Stream(stack.device) if stack.is_cuda else None
    counted = replace(moments, tokens=moments.tokens.to(stack.device))

    def factored(part: slice) -> batched.Factored | None:
        if layer_gram is None or share is None or not isinstance(wanted, Gptq):
            return None
        with torch.cuda.stream(beside):
            grams = batched.mixture(counted, part, layer_gram, share, wanted.ridge)
            return batched.factor(grams, wanted.damping, wanted.act_order)

    if beside is not None:
        beside.wait_stream(torch.cuda.current_stream())
    ahead = factored(parts[0]) if parts else None
    for index, part in enumerate(parts):
        if beside is not None and ahead is not None:
            torch.cuda.current_stream().wait_stream(beside)
            ahead.record(torch.cuda.current_stream())
        current = ahead
        ahead = factored(parts[index + 1]) if index + 1 < len(parts) else None
        yield _try_batched(stack[part], moments.square[part], current, wanted, descent, into(part))


def _try(
    weight: Tensor,
    square: Tensor,
    gram: Tensor | None,
    wanted: Rtn | Gptq,
    descent: int,
    found: Tried,
) -> Tensor:
    """Writes the candidates of a part of a stack, and returns the damping used [part]."""
    scheme = wanted.scheme()
    square = square if gram is None else gram.diagonal(dim1=1, dim2=2)
    scale = search_scale(weight, square, scheme, wanted.clip)
    _write(found["rtn"], rtn(weight, scale, scheme), scale)
    if gram is None or not isinstance(wanted, Gptq):
        return torch.zeros(len(weight))
    result = gptq(weight, scale, gram, scheme, wanted.damping, wanted.act_order)
    if not descent:
        _write(found["gptq"], result.codes, scale)
        return result.damping
    codes, refitted = descend(weight, result.codes, scale, gram, scheme, descent)
    # What has no factor may hold nan, which descent would turn into codes.
    failed = result.damping.isnan().view(-1, 1, 1)
    _write(
        found["descent"],
        torch.where(failed, result.codes, codes),
        torch.where(failed, scale, refitted),
    )
    return result.damping


def _write(place: tuple[Tensor, Tensor], codes: Tensor, scale: Tensor) -> None:
    for old, new in zip(place, (codes, scale), strict=True):
        old.copy_(new)


def _try_batched(
    weight: Tensor,
    square: Tensor,
    factored: batched.Factored | None,
    wanted: Rtn | Gptq,
    descent: int,
    found: Tried,
) -> Tensor:
    """As _try, all matrices of the part in one launch; theirs lie transposed in between."""
    scheme = wanted.scheme()
    square = square if factored is None else factored.grams.diagonal
    codes, scale = found["rtn"]
    scales = batched.search(weight, square, scheme, wanted.clip, codes)
    scale.copy_(scales.transpose(1, 2))
    if factored is None or not isinstance(wanted, Gptq):
        return torch.zeros(len(weight))
    problem = batched.Problem(batched.turned(weight), scales, scheme)
    result = batched.gptq(problem, wanted.damping, factored)
    codes = result.codes
    if descent:
        codes, scales = batched.descend(problem, codes, factored.grams, descent)
        for index in result.damping.isnan().nonzero().flatten().tolist():  # on the CPU
            codes[index], scales[index] = result.codes[index], problem.scales[index]
    done, scale = found["descent" if descent else "gptq"]
    batched.turned(codes, done)
    scale.copy_(scales.transpose(1, 2))
    return result.damping


def _report_pooling(
    layer: int, path: str, moments: Moments, share: Tensor, plan: LayerPlan
) -> None:
    for expert, part in enumerate(share.tolist()):
        if part >= 0.5:
            tokens = int(moments.tokens[expert])
            plan.fallbacks.append(
                Fallback(
                    layer,
                    path,
                    f"only {tokens} calibration tokens",
                    f"{part:.0%} of its Gram is the layer's",
                    expert,
                )
            )


def _report_damping(layer: int, path: str, used: Tensor, asked: float, plan: LayerPlan) -> None:
    for index, value in enumerate(used.tolist()):
        if math.isnan(value):
            action = "plain rounding"
        elif value > asked * 1.5:
            action = f"damping {value:g}"
        else:
            continue
        reason = "Gram not positive definite"
        plan.fallbacks.append(Fallback(layer, path, reason, action, index))
