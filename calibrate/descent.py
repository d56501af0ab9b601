"""Coordinate descent on codes, and scales refitted to them, after a first rounding.

Minimises tr(D H D') exactly, one code or one scale at a time, D = rounded - weight. The codes stay
on the grid, so kernels see nothing new (QuantEase, arXiv 2309.01885; scales by least squares).
"""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.gptq import diagonal_mean
from glm5q import quant
from glm5q.types import IntScheme

BLOCK = 32  # columns moved before the gradient of the others is brought up to date
PASSES = 2  # over all codes a round, before its scales are refitted
DAMPING = 0.003  # of the mean diagonal: enough that a column nobody excites stays where it is


def descend(
    weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor, scheme: IntScheme, rounds: int
) -> tuple[Tensor, Tensor]:
    """Returns (codes int8 [stack, out, in], scale float32 [stack, out, groups]) of no larger error.

    Each round moves every code PASSES times and refits every scale once. `gram` [stack, in, in] is
    the mean of x' x. Costs PASSES + 1 products of [out, in] with [in, in] a round.
    """
    weight = weight.float()
    columns = gram.shape[-1]
    damped = gram + (DAMPING * diagonal_mean(gram)).view(-1, 1, 1) * torch.eye(
        columns, device=gram.device
    )
    for _ in range(rounds):
        for _ in range(PASSES):
            codes = _move_codes(weight, codes, scale, damped, scheme)
        scale = _refit_scales(weight, codes, scale, damped, scheme)
    return codes, scale


def _move_codes(
    weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor, scheme: IntScheme
) -> Tensor:
    """One pass over all columns: each code to its best given the others."""
    columns = weight.shape[-1]
    width = quant.group_columns(columns, scheme.group_size)
    gradient = (quant.dequantize(codes, scale) - weight) @ gram
    curvature = gram.diagonal(dim1=1, dim2=2)
    codes = codes.clone()
    for start in range(0, columns, BLOCK):
        block = slice(start, min(start + BLOCK, columns))
        local = gradient[:, :, block].clone()
        moved = torch.zeros_like(local)
        for index, column in enumerate(range(block.start, block.stop)):
            step = scale[:, :, column // width]
            old = codes[:, :, column].float()
            best = old - local[:, :, index] / (curvature[:, column].unsqueeze(1) * step)
            new = best.round().clamp(scheme.code_min, scheme.code_max)
            codes[:, :, column] = new.to(torch.int8)
            moved[:, :, index] = (new - old) * step
            ahead = gram[:, column, block].unsqueeze(1)
            local += moved[:, :, index].unsqueeze(-1) * ahead
        gradient += moved @ gram[:, block, :]
    return codes


def _refit_scales(
    weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor, scheme: IntScheme
) -> Tensor:
    """Each group's scale to its least-squares value, rounded to its stored dtype, if that helps.

    A scale keeps its sign.
    """
    columns = weight.shape[-1]
    width = quant.group_columns(columns, scheme.group_size)
    gradient = (quant.dequantize(codes, scale) - weight) @ gram
    scale = scale.clone()
    for group in range(columns // width):
        span = slice(group * width, (group + 1) * width)
        part = codes[:, :, span].float()
        product = part @ gram[:, span, :]
        curvature = (product[:, :, span] * part).sum(-1)
        slope = (gradient[:, :, span] * part).sum(-1)
        sign = scale[:, :, group].sign()
        wanted = sign * (scale[:, :, group] - slope / curvature.clamp(min=1e-30))
        change = sign * quant.round_scale(wanted.clamp(min=0), scheme) - scale[:, :, group]
        gain = 2 * change * slope + change.square() * curvature
        change = torch.where((gain < 0) & (wanted > 0), change, torch.zeros_like(change))
        scale[:, :, group] += change
        gradient += change.unsqueeze(-1) * product
    return scale
