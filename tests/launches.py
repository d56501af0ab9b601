"""Kernels that are noted where they would be launched, and what ptxas says of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from targets import lower_cuda


def noted(
    monkeypatch: pytest.MonkeyPatch, places: Mapping[str, Any]
) -> dict[str, lower_cuda.Launch]:
    """Returns what is launched from here on, by name, and is not; `places` hold its kernels."""
    found: dict[str, lower_cuda.Launch] = {}

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def note(*args: Any, **kwargs: Any) -> None:
                name = self.kernel.__name__
                found[name] = lower_cuda.Launch(self.kernel, grid, args, kwargs)

            return note

    for name, place in places.items():
        monkeypatch.setattr(place, name, Noted(getattr(place, name)))
    return found


def assembled(ptx: str, folder: Path) -> str:
    """Returns what ptxas says of a kernel's registers and spills on Hopper."""
    from triton import knobs

    (folder / "kernel.ptx").write_text(ptx)
    command = [knobs.nvidia.ptxas.path, "-v", "--gpu-name", "sm_90a", folder / "kernel.ptx"]
    command += ["-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
