"""Symmetric positive definite stacks on a GPU: Cholesky factors in panels, and systems solved.

Between panels go batched products of bfloat16 with float32 sums, of numbers split in two: 16 bits
of each count. Within a panel a Triton kernel factors the square for one matrix a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

BLOCK = 128  # columns of a block on the diagonal kept in float32
PANEL = 256  # columns factored at a time, a multiple of BLOCK; 512 takes 4 % longer
PART = 32  # of them a program eliminates in registers
TILE = (128, 64, 64)  # rows, columns and pivots of a panel's product
DOT = "tf32x3"

Halves = tuple[Tensor, Tensor]  # of float32 numbers, in the products' dtype; see split
Panels = Callable[[int, int], Tensor]  # rows start .. stop from column `start` on, to be used up


@dataclass(frozen=True)
class Factor:
    """U of A = U' U, each of a stack: `upper` its halves [stack, columns, width].

    `width` beyond `columns` holds what U' takes to the columns that followed A's. Left of a panel
    of PANEL rows is nothing that counts. `corner` float32 [stack, blocks, BLOCK, BLOCK] has the
    blocks on the diagonal, `inverse` halves [stack, panels, PANEL, PANEL] the inverses of the
    panels' lower squares, `failed` bool [stack] says where there was no factor.
    """

    upper: Halves
    corner: Tensor
    inverse: tuple[Halves, ...]
    failed: Tensor


def fits(gram: Tensor) -> bool:
    """Whether the kernels can factor gram [stack, columns, columns]."""
    return gram.is_cuda and gram.shape[-1] % BLOCK == 0 and find_spec("triton") is not None


def solve(gram: Tensor, right: Tensor) -> Tensor:
    """Returns X of gram X = right, float32 [stack, n, m]; 0 where gram is not positive definite.

    `gram` float32 [stack, n, n] is symmetric. On a GPU 2048 columns and as many right sides take
    0.5 ms a matrix of 32 to a relative 1e-5; torch.linalg.solve takes 6.3 (H200).
    """
    if fits(gram):
        found, failed = _solve_in_panels(gram, right)
    else:
        lower, info = torch.linalg.cholesky_ex(gram)
        found, failed = torch.cholesky_solve(right, lower), info != 0
    return found.masked_fill_(failed.view(-1, 1, 1), 0.0)


def _solve_in_panels(gram: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Forwards by factoring [gram, right], backwards panel by panel."""
    columns = gram.shape[-1]
    both = torch.cat((gram, right), 2)
    made = factor(lambda start, stop: both[:, start:stop, start:].contiguous(), both)
    forward = tuple(half[:, :, columns:] for half in made.upper)
    found = torch.empty_like(right)
    halves: Halves = tuple(torch.empty_like(half) for half in forward)  # type: ignore[assignment]
    for start in range((columns - 1) // PANEL * PANEL, -1, -PANEL):
        stop = min(start + PANEL, columns)
        total = (forward[0][:, start:stop].float() + forward[1][:, start:stop].float()).contiguous()
        if stop < columns:
            left = tuple(half[:, start:stop, stop:columns] for half in made.upper)
            subtract(total, left, tuple(half[:, stop:] for half in halves))
        inverse = tuple(half.transpose(1, 2) for half in made.inverse[start // PANEL])
        found[:, start:stop] = split_product(inverse, split(total))
        for half, values in zip(halves, split(found[:, start:stop]), strict=True):
            half[:, start:stop] = values
    return found, made.failed


def factor(panels: Panels, like: Tensor) -> Factor:
    """Factors A [stack, columns, columns] at the left of what `panels` gives, as wide as `like`.

    6144 columns take 1.2 ms a matrix of 16 on an H200; the library's kernels within a panel took
    1.9, its own factors 4.7 one by one and 7.9 batched.
    """
    stack, columns, _ = like.shape
    upper: Halves = tuple(torch.empty_like(like, dtype=operand(like)) for _ in range(2))  # type: ignore[assignment]
    corner = like.new_empty((stack, columns // BLOCK, BLOCK, BLOCK))
    inverse = []
    for start in range(0, columns, PANEL):
        stop = min(start + PANEL, columns)
        panel = panels(start, stop)
        if start:
            left = tuple(half[:, :start, start:stop].transpose(1, 2) for half in upper)
            subtract(panel, left, tuple(half[:, :start, start:] for half in upper))
        inverse.append(_factor_panel(panel, upper, corner, start))
    diagonal = corner.diagonal(dim1=2, dim2=3)
    failed = ~((diagonal > 0) & torch.isfinite(diagonal)).flatten(1).all(1)
    return Factor(upper, corner, tuple(inverse), failed)


def _factor_panel(panel: Tensor, upper: Halves, corner: Tensor, start: int) -> Halves:
    """Writes rows of U of a panel [stack, side, width - start]; returns the square's inverse."""
    stack, side, pitch = panel.shape
    work = panel.new_empty((stack, side, side))
    inverse = (
        torch.empty_like(work, dtype=operand(work)),
        torch.empty_like(work, dtype=operand(work)),
    )
    kernels = _kernels()
    kernels.factor_square[(stack,)](
        panel, work, *inverse, corner, pitch, start, corner.shape[1],
        SIDE=side, BLOCK=BLOCK, PART=PART, DOT=DOT, num_warps=8,
    )  # fmt: skip
    tall, wide, deep = TILE
    kernels.finish_panel[(-(-pitch // wide), side // tall, stack)](
        panel, *inverse, *upper, pitch, *upper[0].shape[1:], start,
        SIDE=side, TALL=tall, WIDE=wide, DEEP=deep, num_warps=8, num_stages=2,
    )  # fmt: skip
    return inverse


def split(values: Tensor) -> Halves:
    """Returns float32 values as the sum of two of the products' dtype: 16 bits of bfloat16's."""
    high = values.to(operand(values))
    return high, (values - high).to(high.dtype)


def split_product(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns left x right of halves, but for the product of the two small ones."""
    total = product(left[0], right[0])
    if left[0].dtype != torch.float32:  # whose small halves are zero
        for one, other in ((0, 1), (1, 0)):
            add_product(total, left[one], right[other])
    return total


def subtract(total: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """total -= left x right of halves, as split_product."""
    exact = left[0].dtype == torch.float32
    for one, other in ((0, 0),) if exact else ((0, 0), (0, 1), (1, 0)):
        add_product(total, left[one], right[other], -1)


def operand(tensor: Tensor) -> torch.dtype:
    """What products between blocks take: bfloat16 on a GPU; a CPU has no use for it."""
    return torch.bfloat16 if tensor.is_cuda else torch.float32


def product(left: Tensor, right: Tensor) -> Tensor:
    """Batched product with float32 sums."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32)


def add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1) -> None:
    """total += scale x left x right, batched, with float32 sums."""
    if left.dtype == torch.float32:
        total.baddbmm_(left, right, alpha=scale)
    else:
        torch.baddbmm(total, left, right, alpha=scale, out_dtype=torch.float32, out=total)


def _kernels() -> ModuleType:
    """Triton is imported on use: it is not needed on a CPU."""
    from calibrate.kernels import factors

    return factors
