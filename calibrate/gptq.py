"""GPTQ in its LDLQ form: each column is rounded after the errors of earlier ones are fed into it.

With H = U U' (U upper triangular) and M = U diag(U)^-1, rounding w_j + sum_{i<j} (w_i - q_i) M_ij
column by column gives GPTQ's codes (QuIP, arXiv 2307.13304, theorem 1; arXiv 2210.17323) from one
Cholesky factorisation, without the inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from calibrate.observe import Moments
from calibrate.ranks import ALONE, Ranks
from glm5q import quant
from glm5q.types import IntScheme

BLOCK = 32  # columns rounded before one product feeds their errors on; 128 takes twice as long
DAMPING_STEPS = 4  # each ten times the last, before a stack entry is given up to plain rounding


@dataclass(frozen=True)
class GptqResult:
    """`codes` int8 [stack, out, in]; `damping` float [stack] used, nan where factorising failed."""

    codes: Tensor
    damping: Tensor


def pooled(moments: Moments, pooling: float) -> tuple[Tensor, Tensor]:
    """Returns (mean Gram [stack, in, in], the layer's share [stack]) with few tokens pooled.

    An entry of m tokens takes the share n0 / (n0 + m) of the layer's mean Gram, n0 = pooling x in;
    one without tokens takes all of it, so no column it never saw is lost.
    """
    layer = layer_mean(moments)
    assert moments.gram is not None
    share = pooled_share(moments, pooling)
    return blend(moments, slice(None), layer, share), share


def layer_mean(moments: Moments, ranks: Ranks = ALONE) -> Tensor:
    """Returns the layer's mean Gram [1, in, in] over all entries, whichever rank summed them."""
    if moments.gram is None:
        raise ValueError("pooling needs Gram matrices")
    tokens = moments.tokens.to(moments.gram.device).float()
    return ranks.sum_of_stack(moments.gram) / tokens.sum().clamp(min=1)


def pooled_share(moments: Moments, pooling: float) -> Tensor:
    """Returns the layer's share [stack] of each entry's Gram; see pooled."""
    tokens = moments.tokens.to(moments.square.device).float()
    prior = pooling * moments.square.shape[-1]
    return prior / (prior + tokens) if prior else (tokens == 0).float()


def blend(moments: Moments, part: slice, layer: Tensor, share: Tensor) -> Tensor:
    """Returns the mean Grams of the entries in `part`, each with its share of the layer's."""
    assert moments.gram is not None
    gram = moments.gram[part]
    tokens = moments.tokens[part].to(gram.device).float()
    own = gram / tokens.clamp(min=1).view(-1, 1, 1)
    return torch.lerp(own, layer.expand_as(own), share[part].view(-1, 1, 1))


def with_ridge(gram: Tensor, ridge: float) -> Tensor:
    """Returns the Grams [stack, in, in] with `ridge` x their mean diagonal added to it, in place.

    Inputs that calibration text does not have, as if they came evenly from everywhere. 32,768
    tokens' own Grams left 1.6 times the error on other text that they had on theirs (layer 1 of
    the embedded checkpoint); a ridge of 0.2 leaves 1.46 times, and 7.6 % less of it.
    """
    if ridge:
        gram.diagonal(dim1=1, dim2=2).add_((ridge * diagonal_mean(gram)).unsqueeze(-1))
    return gram


def gptq(
    weight: Tensor, scale: Tensor, gram: Tensor, scheme: IntScheme, damping: float, act_order: bool
) -> GptqResult:
    """Rounds weight [stack, out, in] on the fixed grid of scale [stack, out, groups].

    `gram` [stack, in, in] is the mean of x' x. Columns go in descending order of its diagonal if
    `act_order`; groups stay those of the stored order, so nothing changes for the kernel.
    """
    stack, rows, columns = weight.shape
    diagonal = gram.diagonal(dim1=1, dim2=2)
    if act_order:
        order = diagonal.argsort(dim=-1, descending=True, stable=True)
    else:
        order = torch.arange(columns, device=weight.device).expand(stack, columns)
    ordered = gram.gather(1, order.unsqueeze(-1).expand_as(gram))
    ordered = ordered.gather(2, order.unsqueeze(1).expand_as(gram))
    feedback, used = _feedback(ordered, damping)
    original = weight.float().gather(2, order.unsqueeze(1).expand_as(weight))
    work = original.clone()
    group = order // quant.group_columns(columns, scheme.group_size)
    column_scale = scale.gather(2, group.unsqueeze(1).expand(stack, rows, columns))
    ordered_codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for start in range(0, columns, BLOCK):
        block = slice(start, min(start + BLOCK, columns))
        errors, ordered_codes[:, :, block] = _round_block(
            original[:, :, block],
            work[:, :, block],
            column_scale[:, :, block],
            feedback[:, block, block],
            scheme,
        )
        if block.stop < columns:
            work[:, :, block.stop :] += errors @ feedback[:, block, block.stop :]
    codes = torch.empty_like(ordered_codes)
    codes.scatter_(2, order.unsqueeze(1).expand_as(codes), ordered_codes)
    return GptqResult(codes, used)


def _round_block(
    original: Tensor, work: Tensor, scale: Tensor, feedback: Tensor, scheme: IntScheme
) -> tuple[Tensor, Tensor]:
    """Returns (errors, codes) [stack, rows, columns of the block], rounding left to right.

    `work` is the original weight plus what earlier blocks fed in; errors are against the original.
    """
    work = work.clone()
    errors = torch.empty_like(work)
    codes = torch.empty(work.shape, dtype=torch.int8, device=work.device)
    for column in range(work.shape[-1]):
        step = scale[:, :, column]
        code = (work[:, :, column] / step).round().clamp(scheme.code_min, scheme.code_max)
        codes[:, :, column] = code.to(torch.int8)
        errors[:, :, column] = original[:, :, column] - code * step
        ahead = feedback[:, column, column + 1 :].unsqueeze(1)
        work[:, :, column + 1 :] += errors[:, :, column].unsqueeze(-1) * ahead
    return errors, codes


def diagonal_mean(gram: Tensor) -> Tensor:
    """Returns what damping is a share of, [stack]: the diagonal's mean, 1 if that is 0."""
    return positive_mean(gram.diagonal(dim1=1, dim2=2))


def positive_mean(diagonal: Tensor) -> Tensor:
    """Returns diagonal_mean of Grams with `diagonal` [stack, in]."""
    mean = diagonal.mean(-1)
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _feedback(gram: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Returns (M [stack, in, in] unit upper triangular, damping used [stack]).

    The Cholesky factor of the reversed matrix, reversed back, is upper triangular. Where it fails
    the damping grows tenfold; after DAMPING_STEPS the entry gets nan and M = identity.
    """
    columns = gram.shape[-1]
    mean = diagonal_mean(gram)
    used = torch.full_like(mean, damping)
    reversed_gram = gram.flip((1, 2))
    eye = torch.eye(columns, device=gram.device)
    for _ in range(DAMPING_STEPS):
        damped = reversed_gram + (used * mean).view(-1, 1, 1) * eye
        lower, info = torch.linalg.cholesky_ex(damped)
        failed = (info != 0) | ~torch.isfinite(lower).all(-1).all(-1)
        if not bool(failed.any()):
            break
        used = torch.where(failed, used * 10, used)
    used = torch.where(failed, torch.nan, used)
    upper = lower.flip((1, 2))
    feedback = upper / upper.diagonal(dim1=1, dim2=2).unsqueeze(1)
    return torch.where(failed.view(-1, 1, 1), eye, feedback), used
