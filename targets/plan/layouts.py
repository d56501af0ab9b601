"""Which ways of splitting a model over devices are legal for its shape, scheme and engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from glm5q.config import ModelConfig
from glm5q.types import IntScheme, Role
from glm5q.verify import parallel
from recipes.schema import Recipe
from targets.plan.memory import Layout
from targets.plan.weights import Share, matrices

A_MACHINE = 8  # accelerators in the usual server
MACHINES = {"cpu": 1, "ascend-910c": 16}  # target -> devices of one machine where it is not 8


@dataclass(frozen=True)
class Legal:
    """A layout, and why an engine refuses it; None if it does not."""

    layout: Layout
    why_not: str | None


def machine(target: str) -> int:
    """Returns how many devices one machine of this chip has."""
    return MACHINES.get(target, A_MACHINE)


def candidates(devices: int) -> Iterator[Layout]:
    """Yields every split into groups of equal size, experts split or dealt out whole."""
    for tensor in range(devices, 0, -1):
        if devices % tensor == 0:
            if tensor == devices:
                yield Layout(devices, tensor, "split")
            if devices > 1:
                yield Layout(devices, tensor, "whole")


def share(layout: Layout) -> Share:
    return Share(layout.tensor, layout.devices if layout.experts == "whole" else None)


def legal(config: ModelConfig, recipe: Recipe, devices: int) -> list[Legal]:
    """Returns every candidate with the engine's reason against it, if it has one."""
    return [Legal(layout, refusal(config, recipe, layout)) for layout in candidates(devices)]


def refusal(config: ModelConfig, recipe: Recipe, layout: Layout) -> str | None:
    """Returns why an engine does not run the layout, or None.

    Heads, widths and the engine's own limits as `glm5q verify` has them; a group of columns that
    share a scale must not be cut; experts must not be fewer than the devices they go over.
    """
    whole = layout.experts == "whole"
    rule = rules(recipe)
    raw = asdict(config)
    if why := parallel.refusal(rule, raw, layout.tensor, whole):
        return why
    if whole and config.n_routed_experts % layout.devices:
        return f"{config.n_routed_experts} experts do not divide by {layout.devices}"
    return _cut_group(config, recipe, layout)


def rules(recipe: Recipe) -> str:
    """Returns the engine whose rules of glm5q.verify.parallel hold for a recipe's output."""
    if recipe.format == "modelslim":
        return "vllm-ascend" if recipe.engine == "vllm-ascend" else "none"
    if recipe.format in ("sglang-w4afp8", "source-fp8"):
        return recipe.format
    experts = recipe.weights[Role.ROUTED_EXPERT].scheme()
    if isinstance(experts, IntScheme) and (experts.bits, experts.activation) == (4, "fp8"):
        return "sglang" if recipe.engine == "sglang" else "vllm"
    return "none"


def _cut_group(config: ModelConfig, recipe: Recipe, layout: Layout) -> str | None:
    """Returns the first matrix whose columns a device are no whole number of groups."""
    for layer in range(config.num_layers):
        for matrix in matrices(config, recipe, layer, share(layout)):
            group = matrix.scheme.group_size if isinstance(matrix.scheme, IntScheme) else None
            if group and matrix.columns % group:
                return f"{matrix.path}: {matrix.columns} columns a device cut a group of {group}"
    return None
