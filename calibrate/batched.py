"""Many matrices rounded at once on a GPU: the same methods as rtn, gptq and descent, in blocks.

Between blocks of columns go batched products of bfloat16 with float32 sums; within a block one
Triton kernel walks the columns for all rows of all matrices. Differs from the loops of gptq.py and
descent.py in the order of sums and, between blocks, in bfloat16 operands; a descent round refits a
group's scale as it leaves the group instead of after all.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calibrate import solves
from calibrate.descent import DAMPING, PASSES
from calibrate.gptq import DAMPING_STEPS, GptqResult, positive_mean
from calibrate.observe import Moments
from calibrate.solves import BLOCK, add_product, operand, product
from fused_ops.triton_support import power_of_two
from glm5q import quant
from glm5q.types import IntScheme
from recipes.schema import Clip

if TYPE_CHECKING:
    from types import ModuleType

MICRO = 16  # columns that GPTQ's kernel holds in registers; 32 take a minute to compile
ROWS = 128  # rows a program walks, one a thread: 0.095 ms a block of 16 x 4096 rows, 256 0.138
REFIT_ROWS, REFIT_WARPS = 32, 8  # 0.082 ms; 64 rows took longer, 4 warps 1 % less of all
SIDE = 128  # of the tiles that a stack is turned in
SPAN = 1024  # columns of a Gram that a program mixes
SEARCH_TILE, SEARCH_PIECES = 4096, 4  # weights a clip search program holds; in how many tiles
ROUND_DOT, MOVE_DOT = "tf32x3", "tf32"  # a move is a few bits times a scale: exact in tf32


def fits(weight: Tensor, scheme: IntScheme) -> bool:
    """Whether the kernels can round weight [stack, out, in] on this scheme's grid."""
    width = quant.group_columns(weight.shape[-1], scheme.group_size)
    aligned = weight.shape[-1] % BLOCK == 0 and width in (BLOCK, weight.shape[-1])
    return weight.is_cuda and aligned and find_spec("triton") is not None


def search(weight: Tensor, square: Tensor, scheme: IntScheme, clip: Clip, codes: Tensor) -> Tensor:
    """Returns rtn.search_scale's scales [stack, groups, out], and writes rtn.rtn's `codes`.

    Weight and codes are [stack, out, in]; in the scales a column's rows are neighbours.
    """
    stack, rows, columns = weight.shape
    width = quant.group_columns(columns, scheme.group_size)
    groups = columns // width
    span = power_of_two(width, 1)
    height = max(1, SEARCH_TILE // span)
    scales = torch.empty((stack, groups, rows), dtype=torch.float32, device=weight.device)
    shares = torch.linspace(1.0, clip.lowest, clip.steps)
    shares = torch.cat((shares, -shares)) if clip.signed else shares
    _kernels().search_clip[(-(-rows // height), groups, stack)](
        weight.contiguous(), square.float().contiguous(),
        shares.to(weight.device, non_blocking=True), scales, codes, rows, columns,
        STEPS=len(shares), REACH=7.5 if scheme.bits == 4 else 127.0, **_grid(scheme),
        BFLOAT16=scheme.scale_dtype == "bfloat16", WIDTH=width, SPAN=span, ROWS=height,
        PIECES=SEARCH_PIECES,
    )  # fmt: skip
    return scales


def turned(stack: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns stack [stack, rows, columns] as [stack, columns, rows], in `out` if given."""
    count, rows, columns = stack.shape
    if out is None:
        out = torch.empty((count, columns, rows), dtype=stack.dtype, device=stack.device)
    _kernels().turn[(-(-columns // SIDE), -(-rows // SIDE), count)](
        stack.contiguous(), out, rows, columns, SIDE=SIDE
    )
    return out


@dataclass(frozen=True)
class Problem:
    """A stack being rounded, transposed: weight [stack, in, out], scales [stack, groups, out]."""

    weight: Tensor
    scales: Tensor
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
class Mixture:
    """Mean Grams of a stack, made anew where they are used: gptq.blend's, then with_ridge's.

    `own` x `sums` + `share` x `layer`, `ridge` on the diagonal: sums [stack, in, in] and layer
    [1, in, in] float32, the others [stack]. `diagonal` [stack, in] is what comes out there.
    """

    sums: Tensor
    layer: Tensor
    own: Tensor
    share: Tensor
    ridge: Tensor
    diagonal: Tensor

    @property
    def mean(self) -> Tensor:
        """Returns what damping is a share of [stack]."""
        return positive_mean(self.diagonal)

    def of(self, part: slice) -> Mixture:
        mine = {name: value[part] for name, value in vars(self).items() if name != "layer"}
        return Mixture(layer=self.layer, **mine)

    def damped(self, damping: Tensor) -> Tensor:
        """Returns the Grams with `damping` [stack] on the diagonal, in the products' dtype."""
        stack, columns, _ = self.sums.shape
        out = torch.empty_like(self.sums, dtype=operand(self.sums))
        _factor_kernels().mix_grams[(stack, -(-columns // SPAN), columns)](
            self.sums, self.layer, self.own, self.share, self.ridge + damping, out, columns,
            SPAN=SPAN,
        )  # fmt: skip
        return out

    def panel(self, order: Tensor, damping: Tensor, start: int, stop: int) -> Tensor:
        """Returns rows start .. stop of the damped Grams in `order`, float32, from start on."""
        stack, columns, _ = self.sums.shape
        out = self.sums.new_empty((stack, stop - start, columns - start))
        _factor_kernels().gather_panel[(stop - start, stack)](
            self.sums, self.layer, self.own, self.share, self.ridge + damping, order, out,
            columns, start, SIDE=stop - start, SPAN=power_of_two(columns, 1), num_warps=8,
        )  # fmt: skip
        return out


def mixture(moments: Moments, part: slice, layer: Tensor, share: Tensor, ridge: float) -> Mixture:
    """Returns the mean Grams of the entries in `part`, each with its share of the layer's."""
    assert moments.gram is not None
    sums, share = moments.gram[part], share[part]
    own = (1 - share) / moments.tokens[part].to(sums.device).float().clamp(min=1)
    mine, others = (gram.diagonal(dim1=1, dim2=2) for gram in (sums, layer))
    diagonal = own.unsqueeze(1) * mine + share.unsqueeze(1) * others
    added = ridge * positive_mean(diagonal)
    return Mixture(sums, layer, own, share, added, diagonal + added.unsqueeze(1))


@dataclass(frozen=True)
class Factored:
    """Mean Grams and what GPTQ needs of them: their factor with the most excited columns last.

    `order` int32 [stack, in] is the columns' from the last that is rounded to the first. M of
    gptq._feedback is, from j to an earlier i, upper[i, j] / upper[i, i]: `upper` [stack, in, in] in
    the products' dtype, `corner` its diagonal blocks in float32; see solves.Factor. `failed` bool
    [stack] where there was no factor.
    """

    grams: Mixture
    order: Tensor
    upper: Tensor
    corner: Tensor
    failed: Tensor

    def record(self, stream: torch.cuda.Stream) -> None:
        """Says that `stream` uses what another one made."""
        for tensor in (*vars(self).values(), *vars(self.grams).values()):
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)


def factor(grams: Mixture, damping: float, act_order: bool) -> Factored:
    """Factors mean Grams without waiting for the device."""
    order = _order(grams.diagonal, act_order)
    made = _factor(grams, order, damping * grams.mean)
    return Factored(grams, order, made.upper[0], made.corner, made.failed)


def gptq(problem: Problem, damping: float, factored: Factored) -> GptqResult:
    """gptq.gptq; codes come back transposed, int8 [stack, in, out], the damping on the CPU.

    Two blocks a product, so that the GPU reads `errors` half as often.
    """
    weight = problem.weight
    stack, columns, rows = weight.shape
    used = _escalate(factored, damping)
    errors = torch.empty_like(weight, dtype=operand(weight))
    codes = torch.empty_like(weight, dtype=torch.int8)
    precise = torch.empty((stack, BLOCK, rows), dtype=torch.float32, device=weight.device)
    for stop in range(columns, 0, -2 * BLOCK):
        first = max(0, stop - 2 * BLOCK)
        if stop == columns:
            both = precise.new_zeros((stack, stop - first, rows))
        else:
            both = product(factored.upper[:, first:stop, stop:], errors[:, stop:])
        for start in range(stop - BLOCK, first - 1, -BLOCK):
            fed, end = both[:, start - first : start - first + BLOCK], start + BLOCK
            if end < stop:
                add_product(fed, factored.upper[:, start:end, end:stop], errors[:, end:stop])
            problem.launch(
                _kernels().round_block, ROWS, fed, fed.stride(0), weight, problem.scales,
                factored.order, factored.corner, errors, precise, codes, start,
                **_grid(problem.scheme), MICRO=MICRO, DOT=ROUND_DOT,
            )  # fmt: skip
    return GptqResult(codes, used)


def descend(problem: Problem, codes: Tensor, grams: Mixture, rounds: int) -> tuple[Tensor, Tensor]:
    """descent.descend from transposed codes int8 [stack, in, out]; returns (codes, scales).

    A pass costs a product of [out, in] with [in, in]; where a group is a row, refitting two more.
    """
    gram = grams.damped(DAMPING * grams.mean)
    moving = Problem(problem.weight, problem.scales.clone(), problem.scheme)
    codes = codes.clone()
    difference = _difference(moving, codes)
    grouped = moving.width == BLOCK
    for _ in range(rounds):
        for left in reversed(range(PASSES)):
            _sweep(moving, codes, gram, difference, refit=grouped and not left)
        if not grouped:
            _refit_rows(moving, codes, gram, difference)
    return codes, moving.scales


def _sweep(problem: Problem, codes: Tensor, gram: Tensor, difference: Tensor, refit: bool) -> None:
    """One pass over all columns, in place: moves, and scales if `refit`."""
    stack, columns, rows = problem.weight.shape
    changes = torch.empty((stack, BLOCK, rows), dtype=gram.dtype, device=gram.device)
    kernels = _kernels()
    for start in range(0, columns, BLOCK):
        if start % (2 * BLOCK) == 0:  # twice the columns a product: the GPU reads `difference` half
            both = product(gram[:, start : start + 2 * BLOCK], difference)
            gradient = both[:, :BLOCK]
        else:
            gradient = both[:, BLOCK:]
            add_product(gradient, gram[:, start : start + BLOCK, start - BLOCK : start], changes)
        common = (
            gradient, changes, gradient.stride(0), problem.weight, problem.scales, gram,
            difference, codes, start,
        )  # fmt: skip
        problem.launch(
            kernels.move_block, ROWS, *common,
            **_grid(problem.scheme), WIDTH=problem.width, DOT=MOVE_DOT,
        )  # fmt: skip
        if refit:
            problem.launch(
                kernels.refit_block, REFIT_ROWS, *common,
                BFLOAT16=problem.scheme.scale_dtype == "bfloat16", DOT=MOVE_DOT,
                num_warps=REFIT_WARPS,
            )  # fmt: skip


def _refit_rows(problem: Problem, codes: Tensor, gram: Tensor, difference: Tensor) -> None:
    """Scales of whole rows to their least-squares value, in place."""
    slope = torch.zeros_like(problem.scales[:, 0])
    curvature = torch.zeros_like(slope)
    values = codes.to(operand(problem.weight))
    for start in range(0, codes.shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        q = codes[:, part].float()
        slope += (product(gram[:, part], difference) * q).sum(1)
        curvature += (product(gram[:, part], values) * q).sum(1)
    scale = problem.scales[:, 0]
    sign = scale.sign()
    wanted = sign * (scale - slope / curvature.clamp(min=1e-30))
    change = sign * quant.round_scale(wanted.clamp(min=0), problem.scheme) - scale
    gain = 2 * change * slope + change.square() * curvature
    problem.scales[:, 0] = torch.where((gain < 0) & (wanted > 0), scale + change, scale)
    difference.copy_(_difference(problem, codes))


def _difference(problem: Problem, codes: Tensor) -> Tensor:
    """Rounded less the weight [stack, in, out], in the products' dtype."""
    difference = torch.empty_like(problem.weight, dtype=operand(problem.weight))
    stack, columns, rows = problem.weight.shape
    height = 4 * ROWS
    _kernels().subtract_weight[(-(-rows // height), columns // BLOCK, stack)](
        codes, problem.scales, problem.weight, difference, rows, columns, problem.scales.shape[1],
        BLOCK=BLOCK, ROWS=height,
    )  # fmt: skip
    return difference


def _order(diagonal: Tensor, act_order: bool) -> Tensor:
    """Returns the columns [stack, in] from the last that GPTQ rounds to the first."""
    if act_order:
        found = diagonal.argsort(dim=-1, descending=True, stable=True)
    else:
        found = torch.arange(diagonal.shape[1], device=diagonal.device).expand(diagonal.shape)
    return found.flip(1).to(torch.int32)


def _factor(grams: Mixture, order: Tensor, damping: Tensor) -> solves.Factor:
    def panels(start: int, stop: int) -> Tensor:
        return grams.panel(order, damping, start, stop)

    return solves.factor(panels, grams.sums)


def _escalate(factored: Factored, damping: float) -> Tensor:
    """Factors again, with more damping, what failed; returns the damping used [stack]."""
    used = torch.full((len(factored.failed),), damping)
    for index in factored.failed.nonzero().flatten().tolist():
        part = slice(index, index + 1)
        grams = factored.grams.of(part)
        for _ in range(DAMPING_STEPS - 1):
            used[index] *= 10
            made = _factor(grams, factored.order[part], float(used[index]) * grams.mean)
            if not bool(made.failed):
                factored.upper[part], factored.corner[part] = made.upper[0], made.corner
                break
        else:
            used[index] = torch.nan
            factored.upper[index] = torch.eye(factored.upper.shape[1])
            factored.corner[index] = torch.eye(BLOCK)
    return used


def _grid(scheme: IntScheme) -> dict[str, int]:
    return {"LOW": scheme.code_min, "HIGH": scheme.code_max}


def _kernels() -> ModuleType:
    """Triton is imported on use: it is not needed on a CPU."""
    from calibrate.kernels import rounding

    return rounding


def _factor_kernels() -> ModuleType:
    from calibrate.kernels import factors

    return factors
