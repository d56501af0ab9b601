"""Rows of a sequence in a cache: packed one after another, or scattered over pages."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def spans(offsets: Tensor) -> list[tuple[int, int]]:
    """Returns (start, end) of each packed sequence from `offsets` [sequences + 1]."""
    bounds = [int(bound) for bound in offsets.tolist()]
    return list(pairwise(bounds))


def sequence_rows(
    cache: Tensor, sequence: int, span: tuple[int, int], pages: Tensor | None
) -> Tensor:
    """Returns one sequence's rows [span, ...]: cache[span], or gathered where `pages` is given.

    `pages` [sequences, pages a sequence] names pages of `cache` [pages, page size, ...]; position p
    of a sequence is row p % page size of its page p // page size. Then only span's length counts.
    """
    start, end = span
    if pages is None:
        return cache[start:end]
    size = cache.shape[1]
    position = torch.arange(end - start, device=cache.device)
    return cache[pages[sequence].long()[position // size], position % size]
