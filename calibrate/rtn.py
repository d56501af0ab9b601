"""Plain rounding on a searched scale: the floor every other method must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from glm5q import quant
from glm5q.types import IntScheme
from recipes.schema import Clip


def search_scale(weight: Tensor, square: Tensor, scheme: IntScheme, clip: Clip) -> Tensor:
    """Returns float32 scales [stack, out, groups], rounded to their stored dtype.

    Tries `clip.steps` shares of the full-range scale for weight [stack, out, in] and keeps,
    group by group, the one with the least sum of square [stack, in] x (w - q)^2: the output error
    if columns were independent. Costs `steps` roundings of the weight, twice as many if
    `clip.signed`: a group whose longer tail is positive then has a scale below zero, so that
    the tail meets the codes' longer side, to -8.
    """
    best, least = _search(weight, square, scheme, clip)
    if clip.signed:
        turned, error = _search(-weight, square, scheme, clip)
        best = torch.where(error < least, -turned, best)
    return best


def _search(weight: Tensor, square: Tensor, scheme: IntScheme, clip: Clip) -> tuple[Tensor, Tensor]:
    """Returns (the best positive scales, their errors), both [stack, out, groups]."""
    full = quant.absmax_scale(weight, scheme)
    importance = quant.grouped(square.unsqueeze(1), scheme.group_size)
    target = quant.grouped(weight.float(), scheme.group_size)
    best = quant.round_scale(full, scheme)
    least = torch.full_like(best, torch.inf)
    for share in torch.linspace(1.0, clip.lowest, clip.steps).tolist():
        scale = quant.round_scale(full * share, scheme)
        codes = quant.quantize(weight, scale, scheme)
        rounded = quant.grouped(quant.dequantize(codes, scale), scheme.group_size)
        error = ((rounded - target).square() * importance).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, scale, best)
    return best, least


def rtn(weight: Tensor, scale: Tensor, scheme: IntScheme) -> Tensor:
    """Returns int8 codes [stack, out, in] nearest to the weight."""
    return quant.quantize(weight, scale, scheme)
