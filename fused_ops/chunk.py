"""How many rows a reference works on at once: bounded memory, and on a CPU what its cache holds."""

from __future__ import annotations

import torch

CPU_ELEMENTS = 1 << 21  # 8 MB of float32; 64 MB and more took twice as long
DEVICE_ELEMENTS = 1 << 27  # 512 MB: few launches


def rows_at_once(elements_a_row: int, device: torch.device) -> int:
    """Returns how many rows of `elements_a_row` intermediate values to hold at once, at least 1."""
    limit = CPU_ELEMENTS if device.type == "cpu" else DEVICE_ELEMENTS
    return max(1, limit // max(1, elements_a_row))
