"""Grams of inputs rounded to float8, which Hopper multiplies twice as fast as bfloat16.

What is lost: an element of x is off by 2.7 % (root mean square), below 2^-15 of the largest by
more; deployment's float8 activations are as rough. Roundings of different elements know nothing of
each other: over n rows an element of the Gram is off by 0.037 / sqrt(n) of its diagonal, where
which rows were drawn moves it by 1 / sqrt(n). The diagonal is off by 0.001 of itself. Of 2048 rows
and 512 independent columns the Gram plus the methods' ridge, 0.3 of the mean diagonal, moves by 4 %
in norm, of 8192 rows by 1.6 %. The tensor cores' own sums, cut to about 14 bits, lose 0.0006.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from calibrate.rows import column_absmax
from fused_ops.triton_support import no_gluon, power_of_two, processors
from glm5q.quant import FP8

TALL, WIDE = 256, 128  # Gram rows and columns of a tile: two warpgroups' sums fill the registers
DEEP = 128  # rows of a block of codes, which is a step
GROUP = 8  # tiles below one another that run together
SPAN = 128  # columns of a block that a program turns
STAGES = 4  # steps in shared memory, with sums on their way out all of it
REGISTERS = 240  # of a multiplying thread


def takes(x: Tensor, grams: Tensor) -> bool:
    """Whether x [rows, columns] can be added to `grams` [experts, columns, columns] here."""
    experts, columns = grams.shape[:2]
    return (
        no_gluon() is None
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and grams.dtype == torch.float32
        and x.stride(1) == 1
        and grams.is_contiguous()
        and columns % WIDE == 0
        and max(x.shape[0], experts * columns) < 2**31
    )


@dataclass
class HeldRows:
    """Rows of up to `calls` calls as float8 codes, a byte an element, until their Grams are added.

    524,288 rows of 6144 columns in 256 experts, one call on an H200: 25.7 ms, bfloat16 38.1; of 170
    to 16,000 rows an expert 32.8 and 43.7. The product alone took 23.5 and 28.5 ms, 15.0 and 17.6
    where nothing was written: the rest is the Grams' way from memory and back. Rows of four calls,
    13.7 GB, share that way. All this is of the kernel before it took several calls; a layer's
    statistics ran with it, but neither its time nor its error against float64 has been measured.
    """

    calls: int
    _codes: Tensor | None = None  # e4m3 [blocks, columns, DEEP]
    _used: int = 0  # blocks
    _bounds: list[Tensor] = field(default_factory=list)  # of a call: int32 [experts + 1], in blocks
    _absmax: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, offsets: Tensor, grams: Tensor, absmax: Tensor | None = None) -> None:
        """Takes in x bfloat16 [rows, columns], sorted by expert; flushes first if there is no room.

        `offsets` int64 [experts + 1] on the device bounds each expert's rows. `absmax` float32 [],
        if known, is no less than any |x|: a pass over x less, 1.7 ms of 25.7.
        """
        if len(x) == 0:
            return
        absmax = column_absmax(x).amax() if absmax is None else absmax.float()
        blocks = min(len(x), len(x) // DEEP + len(grams))  # no more, however the rows lie
        codes = self._room(blocks, x, grams)
        self._bounds.append(_turn(x, offsets, absmax, codes) + self._used)
        self._absmax.append(absmax)
        self._used += blocks

    def flush(self, grams: Tensor) -> None:
        """Adds the Grams of what is held to `grams`, and holds nothing."""
        if self._codes is not None and self._absmax:
            _add(self._codes, torch.stack(self._bounds), torch.stack(self._absmax), grams)
        self._used, self._bounds, self._absmax = 0, [], []

    def _room(self, blocks: int, x: Tensor, grams: Tensor) -> Tensor:
        """Returns where the next `blocks` blocks go."""
        if self._codes is None or self._used + blocks > len(self._codes):
            self.flush(grams)
        if self._codes is None or blocks > len(self._codes):
            self._codes = None  # before the larger one is there
            shape = (self.calls * blocks, x.shape[1], DEEP)
            self._codes = torch.empty(shape, dtype=FP8, device=x.device)
        return self._codes[self._used : self._used + blocks]


def _kernels() -> ModuleType:
    """Imported on use: Triton is not needed on a CPU, and the language changes with its version."""
    from calibrate.kernels import grams

    return grams


def _turn(x: Tensor, offsets: Tensor, absmax: Tensor, codes: Tensor) -> Tensor:
    """Writes codes [blocks, columns, DEEP]; returns int32 [experts + 1], which are whose."""
    from fused_ops.expert_gemm.triton_kernel import list_tiles

    experts, (blocks, columns) = len(offsets) - 1, codes.shape[:2]
    listed = torch.full((blocks, 3), -1, dtype=torch.int32, device=x.device)
    list_tiles[(1,)](offsets, listed, experts, E=power_of_two(experts, 1), ROWS=DEEP, num_warps=4)
    _kernels().turn_codes[(blocks, columns // SPAN)](
        x, absmax, listed, codes.view(torch.int32), x.stride(0), columns, DEEP=DEEP, SPAN=SPAN,
        num_warps=8,
    )  # fmt: skip
    bounds = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
    torch.cumsum((offsets.diff() + (DEEP - 1)) // DEEP, 0, out=bounds[1:])
    return bounds


def _add(codes: Tensor, bounds: Tensor, absmax: Tensor, grams: Tensor) -> None:
    """Adds the Grams of codes [blocks, columns, DEEP] of calls: bounds [calls, experts + 1]."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    def described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
        layout = NVMMASharedLayout(128, 8 * x.element_size(), 2)
        return TensorDescriptor.from_tensor(x.flatten(0, 1), [rows, columns], layout)

    kernels, tiles = _kernels(), _tiles(grams.shape[1], grams.device)
    places = len(grams) * len(tiles)
    kernels.add_grams[(min(processors(grams.device), places),)](
        described(codes, TALL, DEEP), described(codes, WIDE, DEEP),
        described(grams, kernels.PART.value, kernels.PIECE.value), absmax, tiles, bounds, places,
        len(bounds), len(tiles), len(grams), grams.shape[1],
        STAGES=STAGES, REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip


@lru_cache
def _tiles(columns: int, device: torch.device) -> Tensor:
    """Returns int32 [tiles, 2]: which hold something on or below a Gram's diagonal, by row, column.

    In the order in which they run: GROUP below one another, then the next column's.
    """
    found = [
        (row, column)
        for row in range(-(-columns // TALL))
        for column in range(min((row + 1) * TALL, columns) // WIDE)
    ]
    found.sort(key=lambda at: (at[0] // GROUP, at[1], at[0]))
    return torch.tensor(found, dtype=torch.int32, device=device)
