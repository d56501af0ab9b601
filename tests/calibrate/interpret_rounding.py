"""Runs the rounding kernels under Triton's interpreter against the loops, and prints what differs.

A process of its own, as TRITON_INTERPRET counts when a kernel's module is first imported.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from calibrate import batched, descent, gptq, rows, rtn
from calibrate.observe import Moments
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


def mean(gram: Tensor) -> batched.Mixture:
    """Mean Grams as they are."""
    moments = Moments(gram.diagonal(dim1=1, dim2=2), torch.ones(len(gram)), gram)
    return batched.mixture(moments, slice(None), gram[:1], torch.zeros(len(gram)), 0.0)


def error(weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor) -> float:
    difference = (quant.dequantize(codes, scale) - weight).double()
    return float(((difference @ gram.double()) * difference).sum())


def one_round(
    weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor, scheme: IntScheme
) -> tuple[Tensor, Tensor]:
    """A round as batched.descend means it, code by code: scales are refitted in its last pass.

    Every gradient is taken anew from all differences.
    """
    columns = gram.shape[-1]
    width = quant.group_columns(columns, scheme.group_size)
    mean = gram.diagonal(dim1=1, dim2=2).mean(-1).view(-1, 1, 1)
    damped = gram + descent.DAMPING * mean * torch.eye(columns)
    codes, scale = codes.float(), scale.clone()
    for left in reversed(range(descent.PASSES)):
        for column in range(columns):
            group = column // width
            step = scale[:, :, group]
            difference = codes * scale.repeat_interleave(width, -1) - weight
            slope = (difference @ damped[:, :, column : column + 1]).squeeze(-1)
            best = codes[:, :, column] - slope / (damped[:, column, column].unsqueeze(1) * step)
            codes[:, :, column] = best.round().clamp(scheme.code_min, scheme.code_max)
            if not left and (column + 1) % width == 0:
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
    sign = scale[:, :, group].sign()
    other = sign * quant.round_scale((sign * (scale[:, :, group] + shift)).clamp(min=0), scheme)
    changed = difference + (other - scale[:, :, group]).unsqueeze(-1) * part
    before, after = (((d @ gram) * d).sum(-1) for d in (difference, changed))
    return torch.where((after < before) & (sign * other > 0), other, scale[:, :, group])


def rounding(scheme: IntScheme, columns: int, clip: Clip = CLIP) -> dict[str, float]:
    weight, gram = problem(columns)
    square = gram.diagonal(dim1=1, dim2=2)
    scale = rtn.search_scale(weight, square, scheme, clip)
    plain_codes = torch.empty(weight.shape, dtype=torch.int8)
    found = batched.search(weight, square, scheme, clip, plain_codes).transpose(1, 2)
    loop = gptq.gptq(weight, scale, gram, scheme, 0.05, act_order=True)
    turned = weight.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
    stack = batched.Problem(*turned, scheme)
    mine = batched.gptq(stack, 0.05, batched.factor(mean(gram), 0.05, act_order=True))
    codes, scales = batched.descend(stack, mine.codes, mean(gram), 1)
    codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
    exact = quant.dequantize(mine.codes.transpose(1, 2), scale).sub(weight).transpose(1, 2)
    plain = one_round(weight, loop.codes, scale, gram, scheme)
    slow = descent.descend(weight, loop.codes, scale, gram, scheme, 1)
    return {
        "scales": float((found != scale).sum()),
        "below zero": float((scale < 0).sum()),
        "rounded": float((plain_codes != rtn.rtn(weight, found, scheme)).sum()),
        "turned": float((batched.turned(weight) != turned[0]).sum()),
        "difference": float((batched._difference(stack, mine.codes) - exact).abs().max()),
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
    stack = batched.Problem(*turned, GROUP)
    mine = batched.gptq(stack, 0.05, batched.factor(mean(gram), 0.05, act_order=False))
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
    plain = row_steps()
    rows.fused = lambda _x: True
    fused = row_steps()
    rounded = {grid: grid_kernel(x, grid) for grid in ("int8", "fp8")}
    found = {
        grid: float((mine != quant.quantize_activation(x, grid)).sum())
        for grid, mine in rounded.items()
    }
    found |= {name: float((plain[name] - fused[name]).abs().max()) for name in plain}
    return found | {"grams": grams()}


def _take_loaded_bounds() -> None:
    """Lets the interpreter (3.6.0) loop between loaded numbers, which numpy 2.4 no longer casts."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def grams() -> float:
    """Sums of x' x of three experts, one without rows, over two calls; the largest difference."""
    generator = torch.Generator().manual_seed(3)
    summed, exact = torch.zeros(3, 300, 300), torch.zeros(3, 300, 300)
    for bounds in ([0, 3, 3, 70], [0, 65, 65, 66]):
        x = torch.randn(bounds[-1], 300, generator=generator)
        rows.add_grams(x, torch.tensor(bounds), summed)
        for expert, (start, end) in enumerate(pairwise(bounds)):
            exact[expert] += x[start:end].T @ x[start:end]
    rows.mirror_grams(summed)
    return float((summed - exact).abs().max()) / 10


def grid_kernel(x: Tensor, grid: str) -> Tensor:
    """round_activation's kernel, which the launch keeps for bfloat16, on float32."""
    from calibrate.kernels import rows as row_kernels

    out = torch.empty_like(x)
    row_kernels.round_rows[(len(x),)](
        x, out, x.stride(0), x.shape[1], REACH=rows.REACH[grid], FP8=grid == "fp8", SPAN=512
    )
    return out


def row_steps() -> dict[str, Tensor]:
    """Every other step of rows.py, on odd sizes; in kernels or plain torch as rows.fused says."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)

    both, gates = random(5, 192), random(6, 3)
    order = torch.randint(0, 4, (18,), generator=generator).argsort(stable=True)
    hidden, weight, heads = random(6, 100), random(100), random(6, 4, 20)
    angles = random(6, 4), random(6, 4)
    wide = random(7, 130)
    rows.rotate_heads(heads, 12, angles)
    total, normed = rows.add_and_norm(hidden, random(6, 100), weight, 1e-5, torch.float32)
    tall = random(2 * rows.TALL + 5, 130)
    tall[-1, 129] = -9
    expanded = codes(2, 6, 96), random(2, 6, 3).abs(), random(2, 6, 96)
    return {
        "swiglu": rows.swiglu(both),
        "choices": rows.add_choices(random(18, 100), gates, order, None, hidden),
        "choices and a shared expert": rows.add_choices(
            random(18, 100), gates, order, random(6, 100), hidden
        ),
        "rotated": heads,
        "sum": total,
        "norm of the sum": normed,
        "norm": rows.rms_norm(wide[:, :100], weight, 1e-5),
        "column maxima": rows.column_absmax(tall),
        "squares": rows.row_squares(random(7, 130), wide) / 130,
        "dequantized": rows.dequantize(expanded[0], expanded[1], torch.float32),
        "code errors": torch.stack(rows.code_errors(*expanded)) / expanded[2].numel(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    _take_loaded_bounds()
    answer = {
        "group": rounding(GROUP, 384),
        "signed": rounding(GROUP, 384, Clip(steps=6, lowest=0.5, signed=True)),
        "channel": rounding(CHANNEL, 128),
        "failing": failing(),
        "rows": activations(),
    }
    json.dump(answer, sys.stdout)
