"""Candidates for a matrix or stack: what was tried in bounded memory, and what went otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from calibrate import batched
from calibrate.descent import descend
from calibrate.gptq import blend, gptq, layer_mean, pooled_share, with_ridge
from calibrate.observe import Folded, Moments
from calibrate.ranks import ALONE, Ranks
from calibrate.rtn import rtn, search_scale
from glm5q import quant
from glm5q.layer import Codes
from glm5q.types import (
    ActivationGrid,
    CodedScheme,
    Fallback,
    IntScheme,
)
from recipes.schema import Clip, Gptq, Rtn

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

    def to_measure(self, dtype: torch.dtype) -> dict[str, Tensor | Codes | Folded]:
        """Returns the candidates by method, dequantized unless that is for a part at a time."""
        found: dict[str, Tensor | Codes | Folded] = {}
        for method, codes in self.codes.items():
            rounded: Tensor | Codes
            if codes.is_cuda and len(codes) > 1:
                rounded = self.taken(codes, self.scales[method])
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
    damping = torch.zeros(stack.shape[0], device=stack.device)
    layer_gram, share = None, None
    if isinstance(wanted, Gptq):
        layer_gram, share = layer_mean(moments, ranks), pooled_share(moments, wanted.pooling)
        _report_pooling(layer, path, moments, share, plan)
    parts = _parts(ranks.mine(stack.shape[0]), stack)
    while parts:
        try:
            tries = _tries(stack, moments, layer_gram, share, wanted, plan.descent, parts)
            for found, used in tries:
                part = parts.pop(0)
                damping[part] = used
                for method, (method_codes, method_scale) in found.items():
                    codes[method][part], scales[method][part] = method_codes, method_scale
        except torch.OutOfMemoryError:
            if parts[0].stop - parts[0].start == 1:
                raise
            parts = _halved(layer, path, parts, plan)
        if parts and torch.cuda.is_available():
            torch.cuda.empty_cache()
    for tensor in (*codes.values(), *scales.values(), damping):
        ranks.complete(tensor)
    if isinstance(wanted, Gptq):
        _report_damping(layer, path, damping, wanted.damping, plan)
    return Candidates(scheme, codes, scales)


Tried = dict[str, tuple[Tensor, Tensor]]  # by method: codes [part, out, in], scale


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
) -> Iterator[tuple[Tried, Tensor]]:
    """Yields each part's candidates and the damping used.

    On a GPU the next part's Grams are factored beside this part's rounding: factoring leaves most
    of the chip idle.
    """

    parts = tuple(parts)

    def gram(part: slice) -> Tensor | None:
        if layer_gram is None or share is None:
            return None
        grams = blend(moments, part, layer_gram, share)
        return grams if isinstance(wanted, Rtn) else with_ridge(grams, wanted.ridge)

    if not batched.fits(stack, wanted.scheme()):
        for part in parts:
            yield _try(stack[part], moments.square[part], gram(part), wanted, descent)
        return
    beside = torch.cuda.Stream(stack.device) if stack.is_cuda else None

    def factored(part: slice) -> batched.Factored | None:
        grams = gram(part)
        if grams is None or not isinstance(wanted, Gptq):
            return None
        if beside is None:
            return batched.factor(grams, wanted.damping, wanted.act_order)
        beside.wait_stream(torch.cuda.current_stream())
        grams.record_stream(beside)
        with torch.cuda.stream(beside):
            return batched.factor(grams, wanted.damping, wanted.act_order)

    ahead = factored(parts[0]) if parts else None
    for index, part in enumerate(parts):
        if beside is not None and ahead is not None:
            torch.cuda.current_stream().wait_stream(beside)
            ahead.record(torch.cuda.current_stream())
        current = ahead
        ahead = factored(parts[index + 1]) if index + 1 < len(parts) else None
        yield _try_batched(stack[part], moments.square[part], current, wanted, descent)


def _try(
    weight: Tensor, square: Tensor, gram: Tensor | None, wanted: Rtn | Gptq, descent: int
) -> tuple[Tried, Tensor]:
    """Returns the candidates of a part of a stack, and the damping used [part]."""
    scheme = wanted.scheme()
    square = square if gram is None else gram.diagonal(dim1=1, dim2=2)
    scale = search_scale(weight, square, scheme, wanted.clip)
    tried = {"rtn": (rtn(weight, scale, scheme), scale)}
    if gram is None or not isinstance(wanted, Gptq):
        return tried, torch.zeros(len(weight))
    result = gptq(weight, scale, gram, scheme, wanted.damping, wanted.act_order)
    found = result.codes, scale
    if not descent:
        return tried | {"gptq": found}, result.damping
    descended = descend(weight, result.codes, scale, gram, scheme, descent)
    return tried | {"descent": _where_factored(result.damping, descended, found)}, result.damping


def _try_batched(
    weight: Tensor,
    square: Tensor,
    factored: batched.Factored | None,
    wanted: Rtn | Gptq,
    descent: int,
) -> tuple[Tried, Tensor]:
    """As _try, all matrices of the part in one launch; theirs lie transposed in between."""
    scheme = wanted.scheme()
    square = square if factored is None else factored.gram.diagonal(dim1=1, dim2=2)
    scales = _searched(weight, square, scheme, wanted.clip)
    scale = scales.transpose(1, 2)
    tried = {"rtn": (batched.rtn(weight, scales, scheme), scale)}
    if factored is None or not isinstance(wanted, Gptq):
        return tried, torch.zeros(len(weight), device=weight.device)
    problem = batched.Problem(batched.turned(weight), scales, factored.gram, scheme)
    result = batched.gptq(problem, wanted.damping, factored)
    found = batched.turned(result.codes), scale
    if not descent:
        return tried | {"gptq": found}, result.damping
    codes, refitted = batched.descend(problem, result.codes, descent)
    descended = batched.turned(codes), refitted.transpose(1, 2)
    return tried | {"descent": _where_factored(result.damping, descended, found)}, result.damping


def _searched(weight: Tensor, square: Tensor, scheme: IntScheme, clip: Clip) -> Tensor:
    """rtn.search_scale by the batched kernel, which knows positive scales [stack, groups, out]."""
    scales = batched.search_scale(weight, square, scheme, clip)
    if not clip.signed:
        return scales
    turned = -batched.search_scale(-weight, square, scheme, clip)
    errors = [_clip_error(weight, square, s.transpose(1, 2), scheme) for s in (scales, turned)]
    return torch.where((errors[1] < errors[0]).transpose(1, 2), turned, scales)


def _clip_error(weight: Tensor, square: Tensor, scale: Tensor, scheme: IntScheme) -> Tensor:
    """What search_scale minimises [stack, out, groups], a matrix of the stack at a time."""
    found = torch.empty_like(scale)
    for index, (matrix, step) in enumerate(zip(weight, scale, strict=True)):
        rounded = quant.dequantize(quant.quantize(matrix, step, scheme), step)
        error = (rounded - matrix.float()).square() * square[index]
        found[index] = quant.grouped(error, scheme.group_size).sum(-1)
    return found


def _where_factored(
    damping: Tensor, after: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns codes and scales after descent, before it where GPTQ gave a Gram up: `damping` nan.

    What has no factor may hold nan, which descent would turn into codes.
    """
    failed = damping.isnan().view(-1, 1, 1)
    codes, scale = (torch.where(failed, b, a) for a, b in zip(after, before, strict=True))
    return codes, scale


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
