"""Whether Triton kernels run here, and what their launches share.

Kernels keep to what Triton 3.0 to 3.2 has, so that the same source lowers for other chips, and to
these rules of the Ascend route: no fp8 inside, no interleave before a dot, int4 stored as signed
bytes in halves.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from fused_ops.paging import spans


def unavailable() -> str | None:
    """Returns why Triton kernels cannot run here, or None."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install glm5q[triton])"
    if torch.cuda.is_available() or interpreted():
        return None
    return "needs a CUDA device"


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, as its own TRITON_INTERPRET says.

    There a dot of bfloat16 multiplies bit patterns (3.6.0 and 3.9.0), so kernels widen first.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def power_of_two(x: int, least: int = 16) -> int:
    """Returns the least power of two that is no less than x and `least`."""
    return max(least, 1 << (x - 1).bit_length() if x > 1 else 1)


def block_table(
    offsets: Tensor, key_offsets: Tensor | None, tokens: int, device: torch.device
) -> Tensor:
    """Returns int32 [blocks, 6], blocks of at most `tokens` queries of one sequence.

    Columns: sequence, row of its first key, its keys, the block's first token, the keys that token
    sees, the token after the block's last.
    """
    queries = spans(offsets)
    keys = queries if key_offsets is None else spans(key_offsets)
    rows = []
    for sequence, ((start, end), (first, last)) in enumerate(zip(queries, keys, strict=True)):
        past = last - first - (end - start)
        for token in range(start, end, tokens):
            sees, after = past + token - start + 1, min(token + tokens, end)
            rows.append((sequence, first, last - first, token, sees, after))
    table = torch.tensor(rows, dtype=torch.int32).reshape(-1, 6)
    return table.to(device)
