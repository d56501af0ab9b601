"""How time is taken on a device."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

CACHE_BYTES = 256 << 20  # written before a call on a GPU: four times the largest L2 in the table
CPU_CACHE_BYTES = 128 << 20  # four times the L3 of a core complex


def timed(
    call: Callable[[], Any], device: str, cold: bool = False
) -> tuple[Any, tuple[float, float]]:
    """Returns the call's result and its (wall, process CPU) seconds.

    On a GPU: between two events after the caches were overwritten, so nothing of the last call is
    left in L2; launches are included where the GPU waits for them. On a CPU so if `cold`.
    """
    if device == "cuda":
        return _timed_cuda(call)
    if cold:
        _room().fill_(1)
    start, cpu_start = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - start, time.process_time() - cpu_start)


def describe(device: str) -> str:
    """Returns what the device is, for people."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


@cache
def _room() -> torch.Tensor:
    return torch.empty(CPU_CACHE_BYTES, dtype=torch.uint8)


def _timed_cuda(call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda").zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cpu_start = time.process_time()
    start.record()
    result = call()
    end.record()
    torch.cuda.synchronize()
    return result, (start.elapsed_time(end) / 1e3, time.process_time() - cpu_start)
