"""Runs the rounding kernels under Triton's interpreter against the loops, and prints what differs.

A process of its own, as TRITON_INTERPRET counts when a kernel's module is first imported.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from calibrate import batched, descent, gptq, rows, rtn
from glm5q import quant
from glm5q.types import IntScheme
from recipes.schema import Clip

GROUP, CHANNEL = IntScheme(4, 128, "bfloat16", None), IntScheme(8, None, "bfloat16", None)
CLIP = Clip(steps=6, lowest=0.5)


def problem(columns: int) -> tuple[Tensor, Tensor]:
    """Two matrices of ten rows, and Grams of alike neighbours with an outlier channel."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(2, 10, columns, generator=generator)
    x = torch.randn(2, 600, columns, generator=generator)
    x = x + 0.7 * x.roll(1, -1)
    x[:, :, 3] *= 20
    return weight, x.transpose(1, 2) @ x / 600


def error(weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor) -> float:
    difference = (quant.dequantize(codes, scale) - weight).double()
    return float(((difference @ gram.double()) * difference).sum())


def one_round(
    weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor, scheme: IntScheme
) -> tuple[Tensor, Tensor]:
    """A round as batched.descend means it, code by code: two passes, scales refitted in the second.

    Every gradient is taken anew from all differences.
    """
    columns = gram.shape[-1]
    width = quant.group_columns(columns, scheme.group_size)
    mean = gram.diagonal(dim1=1, dim2=2).mean(-1).view(-1, 1, 1)
    damped = gram + descent.DAMPING * mean * torch.eye(columns)
    codes, scale = codes.float(), scale.clone()
    for refit in (False, True):
        for column in range(columns):
            group = column // width
            step = scale[:, :, group]
            difference = codes * scale.repeat_interleave(width, -1) - weight
            slope = (difference @ damped[:, :, column : column + 1]).squeeze(-1)
            best = codes[:, :, column] - slope / (damped[:, column, column].unsqueeze(1) * step)
            codes[:, :, column] = best.round().clamp(scheme.code_min, scheme.code_max)
            if refit and (column + 1) % width == 0:
                scale[:, :, group] = _refitted(weight, codes, scale, damped, group, scheme)
    return codes.to(torch.int8), scale


def _refitted(
    weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor, group: int, scheme: IntScheme
) -> Tensor:
    """A group's scale, or the stored one nearest to least squares if its error is less."""
    width = codes.shape[-1] // scale.shape[-1]
    mine = torch.zeros_like(codes)
    mine[:, :, group * width : (group + 1) * width] = 1
    part = codes * mine
    difference = codes * scale.repeat_interleave(width, -1) - weight
    shift = -((difference @ gram) * part).sum(-1) / ((part @ gram) * part).sum(-1)
    other = quant.round_scale((scale[:, :, group] + shift).clamp(min=0), scheme)
    changed = difference + (other - scale[:, :, group]).unsqueeze(-1) * part
    before, after = (((d @ gram) * d).sum(-1) for d in (difference, changed))
    return torch.where((after < before) & (other > 0), other, scale[:, :, group])


def rounding(scheme: IntScheme, columns: int) -> dict[str, float]:
    weight, gram = problem(columns)
    square = gram.diagonal(dim1=1, dim2=2)
    scale = rtn.search_scale(weight, square, scheme, CLIP)
    found = batched.search_scale(weight, square, scheme, CLIP).transpose(1, 2)
    loop = gptq.gptq(weight, scale, gram, scheme, 0.05, act_order=True)
    turned = weight.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
    stack = batched.Problem(*turned, gram, scheme)
    mine = batched.gptq(stack, 0.05, batched.factor(gram, 0.05, act_order=True))
    codes, scales = batched.descend(stack, mine.codes, 1)
    codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
    plain = one_round(weight, loop.codes, scale, gram, scheme)
    slow = descent.descend(weight, loop.codes, scale, gram, scheme, 1)
    return {
        "scales": float((found != scale).sum()),
        "codes": float((mine.codes.transpose(1, 2) != loop.codes).sum()),
        "moved": float((codes != plain[0]).sum() + (scales != plain[1]).sum()),
        "stored": float((quant.round_scale(scales, scheme) != scales).sum()),
        "rtn": error(weight, rtn.rtn(weight, scale, scheme), scale, gram),
        "gptq": error(weight, loop.codes, scale, gram),
        "descent": error(weight, *slow, gram),
        "batched": error(weight, codes, scales, gram),
    }


def failing() -> dict[str, list[float]]:
    """Grams without a factor: more damping for one, plain rounding for one that has none at all."""
    weight, gram = problem(128)
    gram[0] -= 0.3 * torch.eye(128) * gram[0].diagonal().mean()
    gram[1] = -gram[1]
    scale = rtn.search_scale(weight, gram.diagonal(dim1=1, dim2=2).abs(), GROUP, CLIP)
    loop = gptq.gptq(weight, scale, gram, GROUP, 0.05, act_order=False)
    turned = weight.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
    stack = batched.Problem(*turned, gram, GROUP)
    mine = batched.gptq(stack, 0.05, batched.factor(gram, 0.05, act_order=False))
    return {
        "loop": loop.damping.tolist(),
        "batched": mine.damping.tolist(),
        "codes": [float((mine.codes.transpose(1, 2) != loop.codes).sum())],
    }


def activations() -> dict[str, float]:
    """The row kernels against plain torch, on magnitudes down to e4m3's subnormals."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 300, generator=generator) * torch.logspace(-5, 2, 300)
    x[2] = 0
    both, gates = torch.randn(5, 192, generator=generator), torch.rand(6, 3, generator=generator)
    order = torch.randint(0, 4, (18,), generator=generator).argsort(stable=True)
    chosen = torch.randn(18, 100, generator=generator)
    plain = rows.swiglu(both), rows.add_choices(chosen, gates, order)
    rows.fused = lambda _x: True
    fused = rows.swiglu(both), rows.add_choices(chosen, gates, order)
    found = {
        grid: float((rows.round_activation(x, grid) != quant.quantize_activation(x, grid)).sum())
        for grid in ("int8", "fp8")
    }
    names = ("swiglu", "choices")
    parts = zip(names, plain, fused, strict=True)
    return found | {name: float((a - b).abs().max()) for name, a, b in parts}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer = {
        "group": rounding(GROUP, 384),
        "channel": rounding(CHANNEL, 128),
        "failing": failing(),
        "rows": activations(),
    }
    json.dump(answer, sys.stdout)
