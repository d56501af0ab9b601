"""Steps of rows.py with gradients of their own, one pass each where a GPU has Triton.

Autograd through the plain steps keeps float32 copies of every row and goes over them some ten
times. Elsewhere it does just that.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F  # noqa: N812 - its usual name

from calibrate import rows
from fused_ops.triton_support import power_of_two


def fused(x: Tensor) -> bool:
    """Whether a gradient at x is wanted, and x is what the kernels take."""
    return x.requires_grad and torch.is_grad_enabled() and rows.fused(x.detach())


def _kernels() -> ModuleType:
    """Triton is imported on use: it is not needed on a CPU."""
    from calibrate.kernels import gradients

    return gradients


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """rows.rms_norm."""
    if not fused(x) or x.dim() != 2 or x.stride(1) != 1:
        return rows.rms_norm(x, weight, eps, dtype)
    out: Tensor = _applied(_Norm, x, weight.float(), eps, dtype or x.dtype)
    return out


def add_and_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """rows.add_and_norm."""
    if not fused(x) or x.dtype != torch.float32:
        return rows.add_and_norm(x, added, weight, eps, dtype)
    total, out = _applied(_AddAndNorm, x, added, weight.float(), eps, dtype)
    return total, out


def rotate_heads(x: Tensor, heads: int, first: int, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Returns x [tokens, heads x features], its memory rotated in place by rows.rotate_heads."""
    if fused(x):
        rotated: Tensor = _applied(_Rotated, x, heads, first, *angles)
        return rotated
    rows.rotate_heads(x.unflatten(1, (heads, -1)), first, angles)
    return x


def keys(latent: Tensor, k_rope: Tensor, padded: Tensor) -> Tensor:
    """Returns [tokens, heads, features]: latent x padded', then k_rope in each head's last ones.

    `padded` [heads, features, latent] is zero where the rotated features go. Autograd would copy
    and zero the keys' gradient there; the zeros do that in the product.
    """
    found: Tensor = _applied(_Keys, latent, k_rope, padded)
    return found


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns float32 x weight'; of bfloat16 every product is exact, and summed in float32.

    A gradient taken through it is rounded to bfloat16 first, as all others behind it are.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return F.linear(x.float(), weight.float())
    found: Tensor = _applied(_ExactLinear, x, weight)
    return found


def gate_gradients(
    both: Tensor, slope: Tensor, gates: Tensor, order: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of gate x rows.swiglu(both), and their mean squares at `both`.

    `both` [rows, 2 x width]; `slope` [rows, width] is the gradient at the product, gates left out;
    row r has number `order[r]` in float32 `gates`. They are those at both, like both, and at gates,
    like gates; the squares are like gates.
    """
    out = torch.empty_like(both)
    of_gates, squares = torch.empty_like(gates), torch.empty_like(gates)
    width = slope.shape[1]
    if both.numel():
        _kernels().gate_gradients[(len(both),)](
            both, slope.contiguous(), gates, order, out, of_gates, squares, width,
            SPAN=power_of_two(width, 1), num_warps=8,
        )  # fmt: skip
    return out, of_gates, squares


def _norm_gradient(
    x: Tensor, slope: Tensor, weight: Tensor, eps: float, other: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the gradient at x as x's dtype, and with `other` added the same as `dtype`."""
    count, columns = x.shape
    out = torch.empty((count, columns), dtype=x.dtype, device=x.device)
    half = out if other is None else torch.empty_like(out, dtype=dtype)
    if count:
        _kernels().norm_gradients[(count,)](
            x, slope.contiguous(), weight, out if other is None else other.contiguous(), out, half,
            x.stride(0), columns, eps, ADD=other is not None, SPAN=power_of_two(columns, 1),
            num_warps=8,
        )  # fmt: skip
    return out, half


def _applied(function: Any, *arguments: Any) -> Any:
    """Function.apply, which has no types."""
    return function.apply(*arguments)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rows.rms_norm(x.detach(), weight, eps, dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return _norm_gradient(x, slope, weight, ctx.eps, None, x.dtype)[0], None, None, None


class _AddAndNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        total, out = rows.add_and_norm(x.detach(), added.detach(), weight, eps, dtype)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.dtype = eps, added.dtype
        return total, out

    @staticmethod
    def backward(ctx: Any, other: Tensor, slope: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        found = _norm_gradient(total, slope, weight, ctx.eps, other, ctx.dtype)
        return *found, None, None, None


class _Rotated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int, first: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.first = heads, first
        ctx.mark_dirty(x)
        rows.rotate_heads(x.detach().unflatten(1, (heads, -1)), first, (cos, sin))
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        slope = slope.clone(memory_format=torch.contiguous_format)
        rows.rotate_heads(slope.unflatten(1, (ctx.heads, -1)), ctx.first, (cos, -sin))
        return slope, None, None, None, None


class _Keys(Function):
    @staticmethod
    def forward(ctx: Any, latent: Tensor, k_rope: Tensor, padded: Tensor) -> Tensor:
        ctx.save_for_backward(padded)
        ctx.rope = k_rope.shape[1]
        key: Tensor = F.linear(latent, padded.flatten(0, 1)).unflatten(-1, (len(padded), -1))
        key[..., -ctx.rope :] = k_rope.unsqueeze(1)
        return key

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (padded,) = ctx.saved_tensors
        return slope.flatten(1) @ padded.flatten(0, 1), slope[..., -ctx.rope :].sum(1), None


class _ExactLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        found: Tensor = slope.to(weight.dtype) @ weight
        return found, None
