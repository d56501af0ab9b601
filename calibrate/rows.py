"""What a forward does to rows beside its products, in one pass each where a GPU has Triton.

At full size a copy of the routed rows is 6 GB, and plain torch makes several of each.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from fused_ops.triton_support import power_of_two
from glm5q import quant
from glm5q.types import ActivationGrid

SPAN = 2048  # columns a program handles
LONGEST = 1 << 15  # columns of a row that one program holds
TALL, STEP = 1024, 16  # rows whose column maxima a program takes, and of them at once
GRAM_TILE, GRAM_STAGES = (128, 256, 64, 8), 3  # rows, columns, tokens at once, warps
MIRROR = 64
REACH = {"int8": 127.0, "fp8": quant.FP8_MAX}


def fused(x: Tensor) -> bool:
    """Whether x is what the kernels take: on a GPU, nobody wanting a gradient."""
    plain = x.dtype in (torch.bfloat16, torch.float32, torch.int8) and x.shape[-1] <= LONGEST
    return x.is_cuda and plain and not x.requires_grad and find_spec("triton") is not None


def _kernels() -> ModuleType:
    """Triton is imported on use: it is not needed on a CPU."""
    from calibrate.kernels import rows

    return rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Returns x / rms(x) x weight over the last dimension, in float32 until stored as `dtype`."""
    dtype = dtype or x.dtype
    if not fused(x) or x.dim() != 2 or x.stride(1) != 1:
        values = x.float()
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        return (values * scale * weight.float()).to(x.dtype).to(dtype)
    return _normed(x, None, weight, eps, dtype)[1]


def add_and_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns (x + added, rms_norm of that in `dtype`) of a residual stream x [rows, columns]."""
    if not fused(x) or x.dtype != torch.float32:
        x = x + added
        return x, rms_norm(x, weight, eps, dtype)
    return _normed(x, added.contiguous(), weight, eps, dtype)


def _normed(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    total = x if added is None else torch.empty_like(x)
    if rows:
        _kernels().norm_rows[(rows,)](
            x, out if added is None else added, weight.float(), total, out, x.stride(0), columns,
            eps, ADD=added is not None, SPAN=power_of_two(columns, 1), num_warps=8,
        )  # fmt: skip
    return total, out


def rotate_heads(x: Tensor, first: int, angles: tuple[Tensor, Tensor]) -> None:
    """Rotates adjacent pairs of x [tokens, heads, features] from feature `first` on, in place.

    `angles` are float32 (cos, sin) [tokens, pairs].
    """
    cos, sin = angles
    powers = all(size & (size - 1) == 0 for size in (x.shape[1], cos.shape[1]))
    if not fused(x) or x.stride(2) != 1 or not powers:
        part = x[..., first:]
        even, odd = part[..., 0::2].float(), part[..., 1::2].float()
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        part.copy_(torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2))
        return
    if x.numel():
        _kernels().rotate_heads[(x.shape[0],)](
            x, cos.contiguous(), sin.contiguous(), x.stride(0), x.stride(1), first,
            HEADS=x.shape[1], HALF=cos.shape[1],
        )  # fmt: skip


def round_activation(x: Tensor, grid: ActivationGrid | None) -> Tensor:
    """quant.quantize_activation."""
    if not fused(x) or x.dtype != torch.bfloat16 or grid not in REACH or x.dim() != 2:
        return quant.quantize_activation(x, grid)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _kernels().round_rows[(x.shape[0],)](
            x, out, x.stride(0), x.shape[1],
            REACH=REACH[str(grid)], FP8=grid == "fp8", SPAN=power_of_two(x.shape[1], 1),
            num_warps=8,
        )  # fmt: skip
    return out


def swiglu(both: Tensor) -> Tensor:
    """Returns silu(gate) x up [rows, width] of rows that hold gate, then up."""
    gate, up = both.chunk(2, -1)
    if not fused(both) or not both.numel():
        return F.silu(gate) * up
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=both.dtype, device=both.device)
    span = min(SPAN, power_of_two(width, 1))
    _kernels().gate_rows[(rows, -(-width // span))](both.contiguous(), out, width, SPAN=span)
    return out


def add_choices(
    rows: Tensor, gates: Tensor, order: Tensor, shared: Tensor | None, hidden: Tensor
) -> Tensor:
    """Returns hidden [tokens, columns] plus the gated sum of each token's rows.

    `order` int64 [tokens x choices] is the sorting by expert that took the rows where they are;
    `shared` [tokens, columns] is what a shared expert adds.
    """
    tokens, choices = gates.shape
    if not fused(rows) or not rows.numel():
        by_token = torch.empty_like(rows)
        by_token[order] = rows  # summed in a fixed order: index_add_ is not repeatable
        by_token = by_token.unflatten(0, (-1, choices))
        total: Tensor = (by_token.float() * gates.unsqueeze(-1)).sum(1).to(rows.dtype)
        return hidden + (total if shared is None else total + shared)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    columns = rows.shape[1]
    out = torch.empty_like(hidden)
    span = min(SPAN, power_of_two(columns, 1))
    _kernels().add_choices[(tokens, -(-columns // span))](
        rows, place, gates.contiguous(), rows if shared is None else shared.contiguous(),
        hidden.contiguous(), out, columns, CHOICES=choices, SHARED=shared is not None, SPAN=span,
    )  # fmt: skip
    return out


def column_absmax(x: Tensor) -> Tensor:
    """Returns float32 [columns]: the largest magnitude of each column of x [rows, columns]."""
    if not fused(x) or x.dim() != 2 or x.stride(1) != 1:
        return x.abs().amax(0).float()
    rows, columns = x.shape
    parts = -(-rows // TALL)
    found = torch.empty((parts, columns), dtype=torch.float32, device=x.device)
    span = min(128, power_of_two(columns, 1))
    _kernels().column_absmax[(parts, -(-columns // span))](
        x, found, rows, columns, x.stride(0), TALL=TALL, STEP=STEP, SPAN=span
    )
    return found.amax(0)


def adds_grams(x: Tensor) -> bool:
    """Whether add_grams takes x [rows, columns]."""
    return fused(x) and x.dtype == torch.bfloat16 and x.stride(1) == 1


def add_grams(x: Tensor, offsets: Tensor, grams: Tensor) -> None:
    """Adds x' x of each expert's rows to `grams` float32 [experts, columns, columns], on a GPU.

    Products are exact and their sums float32; only what lies on and below the diagonal is there
    until mirror_grams. `offsets` [experts + 1] bounds the rows x [rows, columns] of each.
    """
    columns, (tall, wide, deep, warps) = x.shape[1], GRAM_TILE
    tiles = _tiles(columns, tall, wide, x.device)
    _kernels().add_grams[(len(tiles), len(grams))](
        x, offsets, grams, tiles, columns, x.stride(0),
        TALL=tall, WIDE=wide, DEEP=deep, DOT="tf32", num_warps=warps, num_stages=GRAM_STAGES,
    )  # fmt: skip


def sum_grams(x: Tensor, offsets: Tensor, grams: Tensor) -> None:
    """As add_grams where that takes x, and so one half; else whole, an expert at a time."""
    if adds_grams(x):
        add_grams(x, offsets.to(x.device), grams)
        return
    for index, (start, end) in enumerate(pairwise(offsets.tolist())):
        if end > start:
            rows = x[start:end].float()
            grams[index] += rows.T @ rows


def all_rows(x: Tensor) -> Tensor:
    """Returns int64 [2], the bounds of x's rows as one expert's; a copy to a GPU would wait."""
    return torch.arange(2, device=x.device) * len(x)


def mirror_grams(grams: Tensor) -> None:
    """Fills in what add_grams left out of `grams` [experts, columns, columns], in place."""
    if len(grams):
        tiles = _tiles(grams.shape[1], MIRROR, MIRROR, grams.device)
        _kernels().mirror_grams[(len(tiles), len(grams))](grams, tiles, grams.shape[1], SIDE=MIRROR)


@lru_cache
def _tiles(columns: int, tall: int, wide: int, device: torch.device) -> Tensor:
    """Returns int32 [tiles, 2]: which tiles of a square hold something on or below its diagonal."""
    found = [
        (row, column)
        for column in range(-(-columns // wide))
        for row in range(column * wide // tall, -(-columns // tall))
    ]
    return torch.tensor(found, dtype=torch.int32, device=device)


def row_squares(x: Tensor, other: Tensor) -> Tensor:
    """Returns float64 [rows]: the sum of (x - other)^2 of each row, float32 within one on a GPU."""
    if not fused(x) or not x.is_contiguous() or not other.is_contiguous():
        return (x - other).double().square().sum(-1)
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        _kernels().row_squares[(x.shape[0],)](
            x, other, out, x.shape[1], SPAN=power_of_two(x.shape[1], 1), num_warps=8
        )
    return out.double()


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """quant.dequantize of int8 codes [..., out, in]."""
    if not _expandable(codes, scale):
        return quant.dequantize(codes, scale, dtype)
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    rows, columns = codes.shape[:-1].numel(), codes.shape[-1]
    _kernels().expand_codes[(rows,)](
        codes, scale, out, columns, scale.shape[-1], SPAN=power_of_two(columns, 1), num_warps=8
    )
    return out


def code_errors(codes: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float64 sums of (codes x scale - weight)^2 and of weight^2."""
    if not _expandable(codes, scale) or not weight.is_contiguous():
        rounded, exact = quant.dequantize(codes, scale), weight.float()
        return (rounded - exact).double().square().sum(), exact.double().square().sum()
    rows, columns = codes.shape[:-1].numel(), codes.shape[-1]
    out = torch.empty((rows, 2), dtype=torch.float32, device=codes.device)
    _kernels().code_errors[(rows,)](
        codes, scale, weight, out, columns, scale.shape[-1],
        SPAN=power_of_two(columns, 1), num_warps=8,
    )  # fmt: skip
    difference, size = out.sum(0, dtype=torch.float64)
    return difference, size


def _expandable(codes: Tensor, scale: Tensor) -> bool:
    plain = codes.dtype == torch.int8 and codes.is_contiguous() and scale.is_contiguous()
    return fused(codes) and plain and scale.dtype == torch.float32 and codes.numel() > 0
