"""Launches of the shared Triton kernels as Ascend takes them, apart from what runs them.

On an NPU triton-ascend runs a launch; anywhere else it can be lowered, or executed from its IR
(targets/ascend). GPU-sized tiles overflow an Ascend core, so tiles are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

Argument = Tensor | int | float
Constant = int | bool | str


@dataclass(frozen=True)
class Launch:
    """A kernel of `module` and its arguments by name.

    `constants` are its constexprs. Tensors are written in place; nothing is returned.
    """

    module: str
    kernel: str
    grid: tuple[int, ...]
    args: Mapping[str, Argument]
    constants: Mapping[str, Constant]


Runner = Callable[[Launch], None]


def on_npu(launch: Launch) -> None:
    """Runs a launch with the triton that is installed, which must be triton-ascend."""
    kernels: Any = import_module(launch.module)
    getattr(kernels, launch.kernel)[launch.grid](**launch.args, **launch.constants)


def unavailable() -> str | None:
    """Returns why these launches cannot run on this machine, or None."""
    from fused_ops.npu_support import no_npu

    if find_spec("triton") is None or find_spec("triton.backends.ascend") is None:
        return "needs triton-ascend in place of triton (pip install triton-ascend), and an NPU"
    return no_npu()
