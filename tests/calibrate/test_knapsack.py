"""The table over bytes against every combination there is."""

from __future__ import annotations

import itertools
import random

import pytest

from calibrate import knapsack
from calibrate.knapsack import Option, Table

Items = list[list[Option]]


def items(seed: int, step: int, odd: int = 0) -> Items:
    """Up to six items; some choices are larger and worse, some smaller than the first."""
    rng = random.Random(seed)
    return [
        [
            Option(step * rng.randint(1, 40) + rng.randint(0, odd), rng.choice((0.0, rng.random())))
            for _ in range(rng.randint(1, 3))
        ]
        for _ in range(rng.randint(1, 6))
    ]


def total(made: Items, picks: list[int]) -> tuple[int, float]:
    taken = [item[index] for item, index in zip(made, picks, strict=True)]
    return sum(option.nbytes for option in taken), sum(option.loss for option in taken)


def best_of_all(made: Items, budget: int) -> float | None:
    every = (total(made, list(p)) for p in itertools.product(*(range(len(i)) for i in made)))
    return min((loss for size, loss in every if size <= budget), default=None)


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_the_pick_is_the_best_of_all(step: int) -> None:
    for seed in range(40):
        made = items(seed, step)
        table = Table(made)
        for budget in range(0, table.most + 2 * step, max(1, table.most // 13)):
            picks, wanted = table.pick(budget), best_of_all(made, budget)
            assert (picks is None) == (wanted is None)
            if picks is not None:
                size, loss = total(made, picks)
                assert size <= budget
                assert loss == pytest.approx(wanted, abs=1e-12)


def test_a_coarse_table_never_passes_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "STEPS", 16)
    for seed in range(60):
        made = items(seed, 997, 99)
        table = Table(made)
        for budget in range(table.least, table.most, max(1, table.most // 17)):
            picks = table.pick(budget)
            assert picks is not None
            size, loss = total(made, picks)
            assert size <= budget
            coarse = len(made) * -(-(table.most - table.least) // 16)  # what rounding up can cost
            if (sure := best_of_all(made, budget - coarse)) is not None:
                assert loss <= sure + 1e-12
        for budget in (table.most, 2 * table.most):
            picks = table.pick(budget)
            assert picks is not None
            assert total(made, picks)[1] == sum(min(o.loss for o in item) for item in made)


def test_rounding_up_does_not_cost_what_just_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "STEPS", 16)
    table = Table([[Option(0, 1.0), Option(1007, 0.0)], [Option(0, 0.1), Option(50, 0.0)]])
    assert table.pick(1007) == [1, 0]
    assert table.pick(1006) == [0, 1]
    assert table.pick(1057) == table.pick(5000) == [1, 1]
