"""More text out of short text: copies of it with some of their tokens exchanged.

An expert's Gram from few tokens knows those tokens: rounding then fits them and fails others. Any
sequence will do to see more of what an input can be, since the target is what the source itself
makes of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.schema import TopUp

SEED = 0


def topped_up(tokens: Tensor, held_out: int, wanted: TopUp | None, vocabulary: int) -> Tensor:
    """Returns `tokens` int64 [windows, length] with copies of them, the held-out windows last.

    As many copies of those not held out as come to `wanted.tokens` with them, rounded down. Drawn
    with a fixed seed, so that a resumed run has the same.
    """
    seen, rest = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
    copies = 0 if wanted is None else max(0, wanted.tokens // seen.numel() - 1)
    if wanted is None or not copies:
        return tokens
    generator = torch.Generator().manual_seed(SEED)
    made = seen.repeat(copies, 1)
    exchanged = torch.rand(made.shape, generator=generator) < wanted.exchanged
    drawn = torch.randint(vocabulary, made.shape, generator=generator)
    return torch.cat((seen, torch.where(exchanged, drawn, made), rest))
