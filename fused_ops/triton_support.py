"""Whether Triton kernels run here, and what their launches share.

Kernels keep to what Triton 3.0 to 3.2 has, so that the same source lowers for other chips, and to
these rules of the Ascend route: no fp8 inside, no interleave before a dot, int4 stored as signed
bytes in halves.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

GLUON = "3.6"
HOPPER = (9, 0)


def unavailable() -> str | None:
    """Returns why Triton kernels cannot run here, or None."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install glm5q[triton])"
    if torch.cuda.is_available() or interpreted():
        return None
    return "needs a CUDA device"


def no_gluon() -> str | None:
    """Returns why kernels in Gluon, Triton's language of layouts, cannot run here, or None.

    Ours are for Hopper's matrix unit, and the language changes from one release to the next.
    """
    if find_spec("triton") is None:
        return "triton is not installed (pip install glm5q[triton])"
    if not (found := _version()).startswith(f"{GLUON}."):
        return f"is written for triton {GLUON}, found {found}"
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    if (here := torch.cuda.get_device_capability()) != HOPPER:
        return f"needs sm_90, this GPU is sm_{here[0]}{here[1]}"
    return None


def _version() -> str:
    """Triton's; builds under another distribution's name tell it only when imported."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return str(import_module("triton").__version__)


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, as its own TRITON_INTERPRET says.

    There a dot of bfloat16 multiplies bit patterns (3.6.0 and 3.9.0), so kernels widen first.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def power_of_two(x: int, least: int = 16) -> int:
    """Returns the least power of two that is no less than x and `least`."""
    return max(least, 1 << (x - 1).bit_length() if x > 1 else 1)


def processors(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU; 4 under the interpreter, so that tests split work."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability(device: torch.device) -> int:
    """Returns a GPU's major compute capability; 9, the largest tiles, under the interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def native_fp8(device: torch.device) -> bool:
    """Whether the GPU multiplies float8 (sm_89 on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
