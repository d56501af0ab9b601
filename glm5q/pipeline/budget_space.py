"""What a size budget can choose from: the plans of every role and layer, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from calibrate.mixtures import Options, Unit
from glm5q import formats, names
from glm5q.config import ModelConfig
from glm5q.errors import RecipeError
from glm5q.types import Role
from recipes.schema import Gptq, Keep, Override, Plan, Recipe, Rtn
from targets.base import check_recipe_dtypes
from targets.plan import weights
from targets.plan.weights import Elements


@dataclass(frozen=True)
class Space:
    """All choices under one recipe: their plans and bytes, and the bytes of everything else."""

    recipe: Recipe
    options: Options
    nbytes: Mapping[Unit, Sequence[int]]
    weights: int  # how many of them have a choice
    rest: int  # bytes of what has none

    def bits(self, nbytes: int) -> float:
        """Returns the mean bits of weights with a choice, in a checkpoint of `nbytes`."""
        return 8 * (nbytes - self.rest) / self.weights

    def bytes_of(self, bits: float) -> int:
        """Returns the bytes of a checkpoint whose weights with a choice have these mean bits."""
        return self.rest + int(bits * self.weights / 8)

    @property
    def least(self) -> int:
        """The bytes of the smallest checkpoint."""
        return self.rest + sum(min(sizes) for sizes in self.nbytes.values())


def space(recipe: Recipe, config: ModelConfig, elements: Elements) -> Space:
    """Returns the choices of every unit that the recipe quantizes outside its overrides and MTP.

    Raises RecipeError where the format leaves none.
    """
    options: dict[Unit, list[Plan]] = {}
    nbytes: dict[Unit, list[int]] = {}
    count = 0
    decided = {(layer, o.role) for o in recipe.overrides for layer in o.layers}
    for number in range(config.num_hidden_layers):
        modules = list(names.layer_modules(config, number))
        for role in dict.fromkeys(module.role for module in modules):
            unit = (number, role)
            plan = recipe.plan(role, number, config)
            if isinstance(plan, Keep) or unit in decided:
                continue
            plans = [plan, *_others(recipe, plan, unit, config)]
            if len(plans) > 1:
                options[unit] = plans
                nbytes[unit] = [
                    _bytes(with_plans(recipe, {unit: p}), unit, config, elements) for p in plans
                ]
                count += sum(torch.Size(m.shape).numel() for m in modules if m.role is role)
    if not options:
        raise RecipeError(
            f"{recipe.name}: format {recipe.format} holds its weights in one way only",
            "leave the budget out, or give another recipe",
        )
    whole = weights.weights(config, recipe, elements=elements).total
    return Space(recipe, options, nbytes, count, whole - sum(n[0] for n in nbytes.values()))


def _others(recipe: Recipe, plan: Plan, unit: Unit, config: ModelConfig) -> Iterator[Plan]:
    """Yields what else a unit can be: the recipe's eight bits, kept; where the engine takes it."""
    wider: list[Plan] = []
    if isinstance(plan, Rtn | Gptq) and plan.bits == 4:
        eight = [p for p in recipe.weights.values() if isinstance(p, Rtn | Gptq) and p.bits == 8]
        wider += eight[:1]
    for other in (*wider, Keep(method="keep")):
        changed = with_plans(recipe, {unit: other})
        assignments = [changed.assignment(n, config) for n in range(config.num_layers)]
        taken = formats.get(recipe.format).problems(assignments, config, recipe.options())
        if not [*taken, *check_recipe_dtypes(recipe.target, changed.activations())]:
            yield other


def with_plans(recipe: Recipe, plans: Mapping[Unit, Plan]) -> Recipe:
    """Returns the recipe with other plans for some units, as overrides; equal ones together."""
    layers: dict[tuple[Role, str], list[int]] = {}
    known: dict[tuple[Role, str], Plan] = {}
    for (layer, role), plan in plans.items():
        key = (role, plan.model_dump_json())
        layers.setdefault(key, []).append(layer)
        known[key] = plan
    added = [
        Override(role=key[0], layers=tuple(numbers), plan=known[key])
        for key, numbers in layers.items()
    ]
    return recipe.model_copy(update={"overrides": (*recipe.overrides, *added)})


def _bytes(recipe: Recipe, unit: Unit, config: ModelConfig, elements: Elements) -> int:
    matrices = weights.matrices(config, recipe, unit[0])
    return sum(
        matrix.count * weights.matrix_bytes(matrix, recipe, elements)
        for matrix in matrices
        if matrix.role is unit[1]
    )
