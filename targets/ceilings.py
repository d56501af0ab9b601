"""What this machine reaches, measured: the ceilings that floors are drawn from.

Peaks are what torch's own products reach, so that another kernel may be above them. Each is the
best of a few calls: what the chip does in a burst, before heat or a power limit slow it down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from targets.base import Figure, Target
from targets.clock import timed

ROUNDS = 5
FP8_FROM = (8, 9)  # the compute capability from which tensor cores take float8


@dataclass(frozen=True)
class Sizes:
    """`side` of the square products, bytes of the copy."""

    side: int
    copy_bytes: int


CPU = Sizes(1024, 256 << 20)
CUDA = Sizes(8192, 4 << 30)  # far past any L2; products that fill every processor


def measured(chip: Target) -> Target:
    """Returns `chip` with the bandwidth and peaks of the device it is, here and now.

    A CPU's at torch's present thread count; a dtype that nothing here multiplies keeps its figure.
    """
    if chip.kind == "cuda":
        found = measure(chip, "cuda", CUDA, "in a burst, measured in this run")
        torch.cuda.empty_cache()  # what is timed next has the memory
        return found
    threads = f"{torch.get_num_threads()} threads, measured in this run"
    return measure(replace(chip, peak_ops_s={}), "cpu", CPU, threads)


def measure(chip: Target, device: str, sizes: Sizes, how: str) -> Target:
    """Returns `chip` with what `device` reaches at `sizes`; `how` ends each figure's source."""
    side = sizes.side
    named = f"{side} x {side} x {side}, {how}"
    peaks = {
        dtype: Figure(2 * side**3 / _best(call, device), "measured", f"{name} {named}")
        for dtype, (name, call) in _products(device, side).items()
    }
    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    seconds = _best(lambda: copy.copy_(source), device)
    words = f"a copy of {sizes.copy_bytes >> 20} MiB, read + write, {how}"
    return replace(
        chip,
        bandwidth_bytes_s=Figure(2 * sizes.copy_bytes / seconds, "measured", words),
        peak_ops_s={**chip.peak_ops_s, **peaks},
    )


def _products(device: str, side: int) -> Mapping[str, tuple[str, Callable[[], Tensor]]]:
    """dtype -> (its name in torch, the product of two [side, side] matrices of it).

    Random numbers: of constant ones fewer wires switch, and a GPU's clock stays higher than any
    real matrix lets it. int8 and fp8 want the second matrix column by column.
    """
    half = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    codes = torch.randint(-128, 128, (side, side), device=device, dtype=torch.int8)
    found: dict[str, tuple[str, Callable[[], Tensor]]] = {
        "bf16": ("torch.matmul", lambda: half @ half),
        "int8": ("torch._int_mm", lambda: torch._int_mm(codes, codes.t())),
    }
    if device == "cuda" and torch.cuda.get_device_capability() >= FP8_FROM:
        small, one = half.to(torch.float8_e4m3fn), torch.ones((), device=device)
        found["fp8"] = (
            "torch._scaled_mm",
            lambda: torch._scaled_mm(
                small, small.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
        )
    return found


def _best(call: Callable[[], Any], device: str) -> float:
    """The least seconds of some calls, the first left out: libraries choose their kernel in it.

    On a GPU by its events; of one CPU thread its process's time, which waits for nobody.
    """
    alone = device == "cpu" and torch.get_num_threads() == 1
    timed(call, device)
    return min(timed(call, device)[1][alone] for _ in range(ROUNDS))
