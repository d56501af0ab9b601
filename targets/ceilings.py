"""What this machine's CPU reaches, measured: the ceilings that floors are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from targets.base import Figure, Target
from targets.clock import timed

SIDE = 1024  # of the square products
COPY_BYTES = 256 << 20
ROUNDS = 5


def measured(chip: Target) -> Target:
    """Returns `chip` with this CPU's bandwidth and peaks, at torch's present thread count.

    Peaks are what torch's own products reach, so that another kernel may be above them.
    """
    threads = f"{torch.get_num_threads()} threads, measured in this run"
    source, copy = (
        torch.ones(COPY_BYTES, dtype=torch.uint8),
        torch.empty(COPY_BYTES, dtype=torch.uint8),
    )
    half = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)
    codes = torch.ones(SIDE, SIDE, dtype=torch.int8)
    flop = 2 * SIDE**3
    bandwidth = 2 * COPY_BYTES / _best(lambda: copy.copy_(source))
    peaks = {
        "bf16": Figure(flop / _best(lambda: half @ half), "measured", f"torch.matmul, {threads}"),
        "int8": Figure(
            flop / _best(lambda: torch._int_mm(codes, codes)),
            "measured",
            f"torch._int_mm, {threads}",
        ),
    }
    return replace(
        chip,
        bandwidth_bytes_s=Figure(bandwidth, "measured", f"a copy of 256 MiB, {threads}"),
        peak_ops_s=peaks,
    )


def _best(call: Callable[[], Any]) -> float:
    """The least seconds of some calls; of one thread its CPU time, which waits for nobody."""
    alone = torch.get_num_threads() == 1
    return min(timed(call, "cpu")[1][alone] for _ in range(ROUNDS))
