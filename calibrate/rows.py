"""What a forward does to rows beside its products, in one pass each where a GPU has Triton.

At full size a copy of the routed rows is 6 GB, and plain torch makes several of each.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from glm5q import quant
from glm5q.types import ActivationGrid

SPAN = 2048  # columns a program handles
LONGEST = 1 << 15  # columns of a row that one program rounds
REACH = {"int8": 127.0, "fp8": quant.FP8_MAX}


def fused(x: Tensor) -> bool:
    """Whether x is what the kernels take: bfloat16 on a GPU, nobody wanting a gradient."""
    plain = x.dtype == torch.bfloat16 and not torch.is_grad_enabled()
    return x.is_cuda and plain and find_spec("triton") is not None


def round_activation(x: Tensor, grid: ActivationGrid | None) -> Tensor:
    """quant.quantize_activation."""
    if not fused(x) or grid not in REACH or x.dim() != 2 or x.shape[1] > LONGEST:
        return quant.quantize_activation(x, grid)
    from calibrate import kernels

    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        kernels.round_rows[(x.shape[0],)](
            x, out, x.stride(0), x.shape[1],
            REACH=REACH[str(grid)], FP8=grid == "fp8", SPAN=_power_of_two(x.shape[1]),
            num_warps=8,
        )  # fmt: skip
    return out


def swiglu(both: Tensor) -> Tensor:
    """Returns silu(gate) x up [rows, width] of rows that hold gate, then up."""
    gate, up = both.chunk(2, -1)
    if not fused(both) or not both.numel():
        return F.silu(gate) * up
    from calibrate import kernels

    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=both.dtype, device=both.device)
    span = min(SPAN, _power_of_two(width))
    kernels.gate_rows[(rows, -(-width // span))](both.contiguous(), out, width, SPAN=span)
    return out


def add_choices(rows: Tensor, gates: Tensor, order: Tensor) -> Tensor:
    """Returns the gated sum [tokens, columns] of each token's rows, which lie in `order`.

    `order` int64 [tokens x choices] is the sorting by expert that took the rows where they are.
    """
    tokens, choices = gates.shape
    if not fused(rows) or not rows.numel():
        by_token = torch.empty_like(rows)
        by_token[order] = rows  # summed in a fixed order: index_add_ is not repeatable
        by_token = by_token.unflatten(0, (-1, choices))
        total: Tensor = (by_token.float() * gates.unsqueeze(-1)).sum(1).to(rows.dtype)
        return total
    from calibrate import kernels

    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    columns = rows.shape[1]
    out = torch.empty((tokens, columns), dtype=rows.dtype, device=rows.device)
    span = min(SPAN, _power_of_two(columns))
    kernels.add_choices[(tokens, -(-columns // span))](
        rows, place, gates.contiguous(), out, columns, CHOICES=choices, SPAN=span
    )
    return out


def _power_of_two(x: int) -> int:
    return 1 << (x - 1).bit_length()
