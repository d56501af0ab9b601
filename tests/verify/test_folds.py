"""Which folded columns of a rounded matrix are not their source's."""

from __future__ import annotations

import torch

from glm5q.verify.folds import unlike


def test_a_column_rounded_away_is_its_sources_and_one_without_its_fold_is_not() -> None:
    exact = torch.randn((64, 256), generator=torch.Generator().manual_seed(0))
    step = torch.full((64, 2), 0.4)
    exact[:, 3] = 0.19 * exact[:, 3].sign()  # all of it within half a step: nothing is left
    rounded = (exact / 0.4).round() * 0.4
    assert not rounded[:, 3].any()
    columns = torch.zeros(256, dtype=torch.int32)
    columns[[3, 5]] = 1
    assert unlike(rounded, exact, step, columns) == []
    rounded[:, 5] = (exact[:, 5] / 2 / 0.4).round() * 0.4
    assert unlike(rounded, exact, step, columns) == [5]
