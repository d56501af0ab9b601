"""Many matrices rounded at once on a GPU: the same methods as rtn, gptq and descent, in blocks.

Between blocks of columns go batched products of bfloat16 with float32 sums; within a block one
Triton kernel walks the columns for all rows of all matrices. Differs from the loops of gptq.py and
descent.py in the order of sums and, between blocks, in bfloat16 operands; a descent round refits a
group's scale as it leaves the group instead of after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calibrate.descent import DAMPING
from calibrate.gptq import DAMPING_STEPS, GptqResult, diagonal_mean
from glm5q import quant
from glm5q.types import IntScheme
from recipes.schema import Clip

if TYPE_CHECKING:
    from types import ModuleType

BLOCK = 128  # columns a kernel walks; one group of the usual int4 grid
MICRO = 16  # of them GPTQ's kernel holds in registers; 32 take a minute to compile
ROWS = 128  # rows a program walks, one a thread: 0.095 ms a block of 16 x 4096 rows, 256 0.138
REFIT_ROWS = 64  # 0.075 ms, 32 0.084
SIDE = 128  # of the tiles that a stack is turned in
PANEL = 256  # columns factorised at a time, a multiple of BLOCK; 512 takes 4 % longer
SEARCH_TILE = 4096  # weights a clip search program holds
ROUND_DOT, MOVE_DOT = "tf32x3", "tf32"  # a move is a few bits times a scale: exact in tf32


def fits(weight: Tensor, scheme: IntScheme) -> bool:
    """Whether the kernels can round weight [stack, out, in] on this scheme's grid."""
    width = quant.group_columns(weight.shape[-1], scheme.group_size)
    aligned = weight.shape[-1] % BLOCK == 0 and width in (BLOCK, weight.shape[-1])
    return weight.is_cuda and aligned and find_spec("triton") is not None


def search_scale(weight: Tensor, square: Tensor, scheme: IntScheme, clip: Clip) -> Tensor:
    """rtn.search_scale with scales [stack, groups, out]: a column's rows are neighbours."""
    stack, rows, columns = weight.shape
    width = quant.group_columns(columns, scheme.group_size)
    groups = columns // width
    span = 1 << (width - 1).bit_length()
    height = max(1, SEARCH_TILE // span)
    scales = torch.empty((stack, groups, rows), dtype=torch.float32, device=weight.device)
    shares = torch.linspace(1.0, clip.lowest, clip.steps).to(weight.device)
    _kernels().search_clip[(-(-rows // height), groups, stack)](
        weight.contiguous(), square.float().contiguous(), shares, scales, rows, columns,
        STEPS=clip.steps, REACH=7.5 if scheme.bits == 4 else 127.0,
        **_grid(scheme), BFLOAT16=scheme.scale_dtype == "bfloat16",
        WIDTH=width, SPAN=span, ROWS=height,
    )  # fmt: skip
    return scales


def rtn(weight: Tensor, scales: Tensor, scheme: IntScheme) -> Tensor:
    """rtn.rtn with scales [stack, groups, out]."""
    stack, rows, columns = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    _kernels().round_codes[(stack * rows,)](
        weight.contiguous(), scales, codes, rows, columns, scales.shape[1],
        **_grid(scheme), SPAN=1 << (columns - 1).bit_length(), num_warps=8,
    )  # fmt: skip
    return codes


def turned(stack: Tensor) -> Tensor:
    """Returns stack [stack, rows, columns] as [stack, columns, rows], contiguous."""
    count, rows, columns = stack.shape
    out = torch.empty((count, columns, rows), dtype=stack.dtype, device=stack.device)
    _kernels().turn[(-(-columns // SIDE), -(-rows // SIDE), count)](
        stack.contiguous(), out, rows, columns, SIDE=SIDE
    )
    return out


@dataclass(frozen=True)
class Problem:
    """A stack being rounded, transposed: `weight` [stack, in, out], `scales` [stack, groups, out].

    `gram` float32 [stack, in, in] is the mean of x' x.
    """

    weight: Tensor
    scales: Tensor
    gram: Tensor
    scheme: IntScheme

    @property
    def width(self) -> int:
        return quant.group_columns(self.weight.shape[1], self.scheme.group_size)

    def launch(self, kernel: Any, height: int, *arguments: Any, **constants: Any) -> None:
        """Starts `kernel` on every row of every matrix, `height` rows a program."""
        stack, columns, rows = self.weight.shape
        sizes = (rows, columns, self.scales.shape[1])
        before, start = arguments[:-1], arguments[-1]
        kernel[(-(-rows // height), stack)](
            *before, *sizes, start, BLOCK=BLOCK, ROWS=height, **constants
        )


@dataclass(frozen=True)
class Factored:
    """What GPTQ needs of a stack's Grams: `gram` itself, the columns' order, M of gptq._feedback.

    `feedback` [stack, in, in] in the products' dtype, `corner` its diagonal blocks in float32;
    `failed` bool [stack] where there was no factor.
    """

    gram: Tensor
    order: Tensor
    feedback: Tensor
    corner: Tensor
    mean: Tensor
    failed: Tensor

    def record(self, stream: torch.cuda.Stream) -> None:
        """Says that `stream` uses what another one made."""
        for tensor in vars(self).values():
            tensor.record_stream(stream)


def factor(gram: Tensor, damping: float, act_order: bool) -> Factored:
    """Factors the Grams [stack, in, in] without waiting for the device."""
    stack, columns, _ = gram.shape
    found = Factored(
        gram,
        _order(gram, act_order),
        torch.empty_like(gram, dtype=_operand(gram)),
        gram.new_empty((stack, columns // BLOCK, BLOCK, BLOCK)),
        diagonal_mean(gram),
        torch.zeros(stack, dtype=torch.bool, device=gram.device),
    )
    _factor(found, slice(0, stack), damping * found.mean)
    return found


def gptq(problem: Problem, damping: float, factored: Factored) -> GptqResult:
    """gptq.gptq; codes come back transposed, int8 [stack, in, out]."""
    weight = problem.weight
    stack, columns, rows = weight.shape
    used = _escalate(factored, damping)
    index = factored.order.unsqueeze(-1)
    ordered = weight.gather(1, index.expand_as(weight))
    group = (factored.order // problem.width).to(torch.int32)
    errors = torch.empty_like(ordered, dtype=_operand(weight))
    codes = torch.empty_like(ordered, dtype=torch.int8)
    precise = weight.new_empty((stack, BLOCK, rows), dtype=torch.float32)
    for start in range(0, columns, BLOCK):
        before = factored.feedback[:, :start, start : start + BLOCK].transpose(1, 2)
        fed = _product(before, errors[:, :start]) if start else torch.zeros_like(precise)
        problem.launch(
            _kernels().round_block, ROWS, fed, ordered, problem.scales, group,
            factored.corner[:, start // BLOCK].contiguous(), errors, precise, codes, start,
            **_grid(problem.scheme), MICRO=MICRO, DOT=ROUND_DOT,
        )  # fmt: skip
    unordered = torch.empty_like(codes)
    unordered.scatter_(1, index.expand_as(codes), codes)
    return GptqResult(unordered, used)


def descend(problem: Problem, codes: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """descent.descend from transposed codes int8 [stack, in, out]; returns (codes, scales).

    A round moves every code twice and refits every scale once, at two products of [out, in] with
    [in, in] where a group is a block, four where it is a row.
    """
    gram = _damped(problem.gram, DAMPING).to(_operand(problem.weight))
    moving = Problem(problem.weight, problem.scales.clone(), gram, problem.scheme)
    codes = codes.clone()
    difference = _difference(moving, codes)
    grouped = moving.width == BLOCK
    for _ in range(rounds):
        for refit in (False, True):
            _sweep(moving, codes, difference, refit and grouped)
        if not grouped:
            _refit_rows(moving, codes, difference)
    return codes, moving.scales


def _sweep(problem: Problem, codes: Tensor, difference: Tensor, refit: bool) -> None:
    """One pass over all columns, in place: moves, and scales if `refit`."""
    stack, columns, rows = problem.weight.shape
    changes = torch.empty(
        (stack, BLOCK, rows), dtype=problem.gram.dtype, device=problem.gram.device
    )
    kernels = _kernels()
    for start in range(0, columns, BLOCK):
        if start % (2 * BLOCK) == 0:  # twice the columns a product: the GPU reads `difference` half
            both = _product(problem.gram[:, start : start + 2 * BLOCK], difference)
            gradient = both[:, :BLOCK]
        else:
            pairs = problem.gram[:, start : start + BLOCK, start - BLOCK : start]
            gradient = both[:, BLOCK:].contiguous()
            _add_product(gradient, pairs, changes)
        common = (
            gradient,
            changes,
            gradient.stride(0),
            problem.weight,
            problem.scales,
            problem.gram,
            difference,
            codes,
            start,
        )
        problem.launch(
            kernels.move_block, ROWS, *common,
            **_grid(problem.scheme), WIDTH=problem.width, DOT=MOVE_DOT,
        )  # fmt: skip
        if refit:
            problem.launch(
                kernels.refit_block, REFIT_ROWS, *common,
                BFLOAT16=problem.scheme.scale_dtype == "bfloat16", DOT=MOVE_DOT,
            )  # fmt: skip


def _refit_rows(problem: Problem, codes: Tensor, difference: Tensor) -> None:
    """Scales of whole rows to their least-squares value, in place."""
    slope = torch.zeros_like(problem.scales[:, 0])
    curvature = torch.zeros_like(slope)
    values = codes.to(_operand(problem.weight))
    for start in range(0, codes.shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        q = codes[:, part].float()
        slope += (_product(problem.gram[:, part], difference) * q).sum(1)
        curvature += (_product(problem.gram[:, part], values) * q).sum(1)
    scale = problem.scales[:, 0]
    sign = scale.sign()
    wanted = sign * (scale - slope / curvature.clamp(min=1e-30))
    change = sign * quant.round_scale(wanted.clamp(min=0), problem.scheme) - scale
    gain = 2 * change * slope + change.square() * curvature
    problem.scales[:, 0] = torch.where((gain < 0) & (wanted > 0), scale + change, scale)
    difference.copy_(_difference(problem, codes))


def _difference(problem: Problem, codes: Tensor) -> Tensor:
    """Rounded less the weight [stack, in, out], in the products' dtype."""
    difference = torch.empty_like(problem.weight, dtype=_operand(problem.weight))
    stack, columns, rows = problem.weight.shape
    height = 4 * ROWS
    _kernels().subtract_weight[(-(-rows // height), columns // BLOCK, stack)](
        codes, problem.scales, problem.weight, difference, rows, columns, problem.scales.shape[1],
        BLOCK=BLOCK, ROWS=height,
    )  # fmt: skip
    return difference


def _order(gram: Tensor, act_order: bool) -> Tensor:
    diagonal = gram.diagonal(dim1=1, dim2=2)
    if act_order:
        return diagonal.argsort(dim=-1, descending=True, stable=True)
    return torch.arange(gram.shape[-1], device=gram.device).expand(diagonal.shape)


def _escalate(factored: Factored, damping: float) -> Tensor:
    """Factors again, with more damping, what failed; returns the damping used [stack]."""
    used = torch.full_like(factored.mean, damping)
    for index in factored.failed.nonzero().flatten().tolist():
        for _ in range(DAMPING_STEPS - 1):
            used[index] *= 10
            part = slice(index, index + 1)
            _factor(factored, part, used[part] * factored.mean[part])
            if not bool(factored.failed[index]):
                break
        else:
            used[index] = torch.nan
            factored.feedback[index] = torch.eye(factored.gram.shape[1], device=used.device)
            factored.corner[index] = torch.eye(BLOCK, device=used.device)
    return used


def _factor(factored: Factored, part: slice, ridge: Tensor) -> None:
    """Writes M of a part of the stack, and where factorising failed; `ridge` [part] is added.

    A Cholesky factorisation in panels of all matrices at once, what earlier panels take off a later
    one in _split products. 6144 columns took 1.9 ms a matrix of 16 and gave M to 2e-5, a 1/80 of
    what its bfloat16 loses; the library's own took 4.7 ms one by one and 7.9 ms batched (H200).
    """
    damped = _reordered(factored.gram[part], factored.order[part].flip(1))
    damped.diagonal(dim1=1, dim2=2).add_(ridge.unsqueeze(-1))
    stack, columns, _ = damped.shape
    feedback, corner = factored.feedback[part], factored.corner[part]
    lower = tuple(torch.empty_like(damped, dtype=_operand(damped)) for _ in range(2))
    failed = torch.zeros(stack, dtype=torch.bool, device=damped.device)
    for start in range(0, columns, PANEL):
        stop = min(start + PANEL, columns)
        panel = damped[:, start:, start:stop].contiguous()
        if start:
            left = tuple(half[:, start:, :start] for half in lower)
            _subtract(panel, left, tuple(h[:, : stop - start].transpose(1, 2) for h in left))
        square, info = torch.linalg.cholesky_ex(panel[:, : stop - start])
        eye = torch.eye(stop - start, device=damped.device).expand_as(square)
        inverse = torch.linalg.solve_triangular(square, eye, upper=False).transpose(1, 2)
        below = _split_product(_split(panel[:, stop - start :]), _split(inverse))
        panel = torch.cat((square, below), 1)
        for half, values in zip(lower, _split(panel), strict=True):
            half[:, start:, start:stop] = values
        diagonal = square.diagonal(dim1=1, dim2=2)  # what is nan below shows in a later one
        failed |= (info != 0) | ~torch.isfinite(diagonal.sum(1))
        # M = U diag(U)^-1 with U the reversed lower factor: divide columns, then reverse.
        panel /= diagonal.unsqueeze(1)
        reverse = panel.flip((1, 2))
        feedback[:, : columns - start, columns - stop : columns - start] = reverse
        blocks = reverse[:, columns - stop :].unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))
        corner[:, (columns - stop) // BLOCK : (columns - start) // BLOCK] = blocks.diagonal(
            dim1=1, dim2=3
        ).permute(0, 3, 1, 2)
    factored.failed[part] = failed


def _reordered(gram: Tensor, order: Tensor) -> Tensor:
    """Returns gram [stack, in, in] with rows and columns in `order` [stack, in]."""
    found = torch.empty_like(gram)
    for one, matrix, place in zip(found, gram, order, strict=True):
        torch.index_select(matrix.index_select(0, place), 1, place, out=one)
    return found


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 values as the sum of two of the products' dtype: 16 bits of bfloat16's."""
    high = values.to(_operand(values))
    return high, (values - high).to(high.dtype)


def _split_product(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns left x right of _split pairs, but for the product of the two small halves."""
    total = _product(left[0], right[0])
    if left[0].dtype != torch.float32:  # whose small halves are zero
        for one, other in ((0, 1), (1, 0)):
            _add_product(total, left[one], right[other])
    return total


def _subtract(total: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """total -= left x right of _split pairs, as _split_product."""
    exact = left[0].dtype == torch.float32
    for one, other in ((0, 0),) if exact else ((0, 0), (0, 1), (1, 0)):
        _add_product(total, left[one], right[other], -1)


def _damped(gram: Tensor, share: float) -> Tensor:
    damped = gram.clone()
    damped.diagonal(dim1=1, dim2=2).add_(share * diagonal_mean(gram).unsqueeze(-1))
    return damped


def _operand(tensor: Tensor) -> torch.dtype:
    """What products between blocks take: bfloat16 on a GPU; a CPU has no use for it."""
    return torch.bfloat16 if tensor.is_cuda else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Batched product with float32 sums."""
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    return torch.bmm(left, right, out_dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float = 1) -> None:
    """total += scale x left x right, batched, with float32 sums."""
    if left.dtype == torch.float32:
        total.baddbmm_(left, right, alpha=scale)
    else:
        torch.baddbmm(total, left, right, alpha=scale, out_dtype=torch.float32, out=total)


def _grid(scheme: IntScheme) -> dict[str, int]:
    return {"LOW": scheme.code_min, "HIGH": scheme.code_max}


def _kernels() -> ModuleType:
    """Triton is imported on use: it is not needed on a CPU."""
    from calibrate import kernels

    return kernels
