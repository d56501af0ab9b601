"""`--budget-gb` and `--budget-bits`: which layers' weights deserve more bytes, from measured KLs.

A unit is one role in one layer. Its choices are the recipe's own plan, the recipe's eight bits if
that has four, and being kept, as far as the format and the chip take them; the KL of each alone is
measured, and a table over bytes picks the least sum. What comes out is the recipe with overrides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from calibrate.job import Place
from calibrate.knapsack import Option, Table
from calibrate.mixtures import Mixture, Texts, Unit, measure
from calibrate.states import Progress, silent
from glm5q.checkpoint import Checkpoint
from glm5q.errors import UserError
from glm5q.pipeline.budget_space import Space, space, with_plans
from glm5q.pipeline.subject import elements_of
from glm5q.types import Role
from recipes import files
from recipes.schema import Keep, Plan, Recipe
from reports.budget import Budget, BudgetChoice, BudgetPoint, BudgetUnit
from reports.html import write_text

STATISTICS_TOKENS = 1 << 14  # to round by while choosing
JUDGED_TOKENS = 1 << 13  # of held-out windows, a forward of them for each choice
CURVE_POINTS = 9


@dataclass(frozen=True)
class BudgetOptions:
    """What was asked for: all weights' 1e9 bytes, or mean bits of those that the recipe quantizes.

    `check` measures each choice, and the curve, on evaluation windows too.
    """

    gb: float | None = None
    bits: float | None = None
    check: bool = False

    @staticmethod
    def asked(gb: float | None, bits: float | None, check: bool) -> BudgetOptions | None:
        """Returns the options, None if there is no budget. Raises UserError for half of one."""
        if gb is not None and bits is not None:
            raise UserError("--budget-gb and --budget-bits: two budgets", "give one")
        if gb is None and bits is None:
            if check:
                raise UserError("--budget-check: no budget", "give --budget-gb or --budget-bits")
            return None
        return BudgetOptions(gb, bits, check)

    def nbytes(self, space: Space) -> int:
        """Returns the bytes of all weights that are asked for."""
        if self.gb is not None:
            return int(self.gb * 1e9)
        assert self.bits is not None
        return space.bytes_of(self.bits)


def check_budget(recipe: Recipe, source: Checkpoint, asked: BudgetOptions) -> None:
    """Raises UserError for a budget below the smallest choices; RecipeError if there are none."""
    found = space(recipe, source.config, elements_of(source))
    budget, least = asked.nbytes(found), found.least
    if budget < least:
        gb, bits = _up(least / 1e9), _up(found.bits(least))
        raise UserError(
            f"the budget is {budget / 1e9:.6g} GB, {recipe.name} needs {gb}",
            f"give --budget-gb {gb} or --budget-bits {bits} or more",
        )


def _up(value: float) -> str:
    """Six significant digits, not below the value."""
    step = 10.0 ** (math.floor(math.log10(value)) - 5)
    return f"{math.ceil(value / step - 1e-9) * step:.6g}"


def budgeted(
    recipe: Recipe,
    source: Checkpoint,
    asked: BudgetOptions,
    texts: tuple[Tensor, int, Tensor],
    progress: Progress = silent,
    device: str = "cpu",
) -> Budget:
    """Returns what is chosen under the budget. `texts`: calibration windows, how many of them are
    held out, evaluation windows.
    """
    started = time.perf_counter()
    found = space(recipe, source.config, elements_of(source))
    budget = asked.nbytes(found)
    split = _texts(*texts)
    alone = {
        _name(unit, index): {unit: index}
        for unit, plans in found.options.items()
        for index, plan in enumerate(plans)
        if not isinstance(plan, Keep)
    }
    kls = measure(source, recipe, found.options, alone, split, progress, device)
    losses = {name: float(windows.mean()) for name, windows in kls.items()}
    chooser = _Chooser(found, losses)
    chosen, curve = chooser.mixture(budget), chooser.curve(budget)
    judged: dict[str, Tensor] = {}
    if asked.check:
        every = alone | {str(at): mixture for at, mixture in enumerate(curve)}
        judging = Texts(split.statistics, texts[2])
        judged = measure(source, recipe, found.options, every, judging, progress, device)
    ranks = _correlations(found, losses, judged)
    nbytes = chooser.nbytes(chosen)
    return Budget(
        asked=budget,
        nbytes=nbytes,
        bits=found.bits(nbytes),
        kl=chooser.kl(chosen),
        statistics_windows=len(split.statistics),
        windows=len(split.judged),
        sequence_length=split.judged.shape[1],
        units=[_unit(found, unit, losses, judged, chosen[unit]) for unit in found.options],
        curve=[_point(chooser, mixture, judged.get(str(at))) for at, mixture in enumerate(curve)],
        rank_correlation=ranks[0],
        rank_correlation_experts=ranks[1],
        time_s=time.perf_counter() - started,
    )


class Spent(NamedTuple):
    """A recipe as it is applied, what a budget chose in it, and how long choosing took here."""

    recipe: Recipe
    budget: Budget | None = None
    time_s: float = 0.0

    def times_s(self) -> dict[str, float]:
        return {} if self.budget is None else {"budget": self.time_s}


def spend(
    recipe: Recipe,
    source: Checkpoint,
    asked: BudgetOptions | None,
    texts: tuple[Tensor, int, Tensor],
    place: Place,
    progress: Progress,
    state: Path,
) -> Spent:
    """Returns the recipe with what the budget chose as overrides; as it is without a budget.

    Of several processes the first chooses for all. What an unfinished run chose is kept in its
    folder `state`, so that one that goes on does not choose again.
    """
    if asked is None:
        return Spent(recipe)
    started = time.perf_counter()
    found: list[Budget] = []
    if place.ranks.first:
        file = state / "budget.json"
        if not file.exists():
            chosen = budgeted(recipe, source, asked, texts, progress, place.device)
            write_text(file, chosen.model_dump_json(indent=1))
        found.append(Budget.model_validate_json(file.read_text(encoding="utf-8")))
    said = [one.model_dump(mode="json") for one in found]
    budget = Budget.model_validate(place.ranks.all_of(said, place.device)[0])
    took = time.perf_counter() - started
    return Spent(_applied(recipe, budget, source), budget, took)


def _applied(recipe: Recipe, budget: Budget, source: Checkpoint) -> Recipe:
    options = space(recipe, source.config, elements_of(source)).options
    plans: dict[Unit, Plan] = {}
    for unit in budget.units:
        at = (unit.layer, Role(unit.role))
        if unit.chosen:
            plans[at] = options[at][unit.chosen]
    return files.unverified(with_plans(recipe, plans))


def _texts(calibration: Tensor, held_out: int, _evaluation: Tensor) -> Texts:
    length = calibration.shape[1]
    first = len(calibration) - held_out
    statistics = calibration[: min(first, max(2, STATISTICS_TOKENS // length))]
    return Texts(statistics, calibration[first:][: max(2, JUDGED_TOKENS // length)])


def _name(unit: Unit, index: int) -> str:
    return f"{unit[0]} {unit[1].value} {index}"


@dataclass(frozen=True)
class _Chooser:
    """Picks mixtures: the loss of each choice alone is in `losses`, 0 for what is kept."""

    space: Space
    losses: Mapping[str, float]

    def loss(self, unit: Unit, index: int) -> float:
        return self.losses.get(_name(unit, index), 0.0)

    def table(self) -> Table:
        return Table(
            [
                [Option(size, self.loss(unit, i)) for i, size in enumerate(sizes)]
                for unit, sizes in self.space.nbytes.items()
            ]
        )

    def mixture(self, budget: int, table: Table | None = None) -> Mixture:
        picks = (table or self.table()).pick(budget - self.space.rest)
        assert picks is not None
        return dict(zip(self.space.options, picks, strict=True))

    def curve(self, budget: int) -> list[Mixture]:
        """Returns the best mixtures by size, the chosen one among them."""
        table, rest = self.table(), self.space.rest
        step = (table.most - table.least) / (CURVE_POINTS - 1)
        sizes = {rest + table.least + round(step * at) for at in range(CURVE_POINTS)}
        found = [self.mixture(size, table) for size in sorted(sizes | {budget})]
        return [one for at, one in enumerate(found) if one not in found[:at]]

    def nbytes(self, mixture: Mixture) -> int:
        return self.space.rest + sum(self.space.nbytes[unit][i] for unit, i in mixture.items())

    def kl(self, mixture: Mixture) -> float:
        return sum(self.loss(unit, index) for unit, index in mixture.items())


def _unit(
    found: Space, unit: Unit, losses: Mapping[str, float], judged: Mapping[str, Tensor], chosen: int
) -> BudgetUnit:
    choices = []
    for index, plan in enumerate(found.options[unit]):
        name = _name(unit, index)
        measured = float(judged[name].mean()) if name in judged else None
        choices.append(
            BudgetChoice(
                scheme=plan.scheme().label(),
                nbytes=found.nbytes[unit][index],
                kl=losses.get(name, 0.0),
                kl_measured=0.0 if judged and isinstance(plan, Keep) else measured,
            )
        )
    return BudgetUnit(layer=unit[0], role=unit[1].value, choices=choices, chosen=chosen)


def _point(chooser: _Chooser, mixture: Mixture, judged: Tensor | None) -> BudgetPoint:
    nbytes = chooser.nbytes(mixture)
    measured = error = None
    if judged is not None:
        measured = float(judged.mean())
        error = float(judged.std() / len(judged) ** 0.5) if len(judged) > 1 else None
    return BudgetPoint(
        nbytes=nbytes,
        bits=chooser.space.bits(nbytes),
        kl=chooser.kl(mixture),
        kl_measured=measured,
        kl_error=error,
    )


def _correlations(
    found: Space, losses: Mapping[str, float], judged: Mapping[str, Tensor]
) -> tuple[float | None, float | None]:
    """Returns Spearman's rank correlations over all choices and over routed experts'."""
    if not judged:
        return None, None
    experts = {
        _name(unit, index)
        for unit, plans in found.options.items()
        for index in range(len(plans))
        if unit[1] is Role.ROUTED_EXPERT
    }
    both = {name: (losses[name], float(judged[name].mean())) for name in losses}
    return (
        rank_correlation(list(both.values())),
        rank_correlation([pair for name, pair in both.items() if name in experts]),
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Returns Spearman's correlation of pairs without ties, None for fewer than three."""
    if len(pairs) < 3:
        return None
    values = torch.tensor(pairs, dtype=torch.float64)
    ranks = values.argsort(0).argsort(0).double()
    return float(torch.corrcoef(ranks.T)[0, 1])
