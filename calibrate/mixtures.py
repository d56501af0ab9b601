"""The KL of models that hold each layer's roles in one way or another, measured in one pass.

A mixture says which of its plans each unit follows; units it does not name stay as the source has
them, so a mixture of one unit gives what that one costs alone. Every mixture has a stream of its
own from the first layer where it differs, and all streams meet a layer while that is in memory:
weights are read once, and the work is a forward of the judged tokens a mixture.

A gradient's estimate was tried first and left: half the mean of (g . d)^2, d the change of the
layer's output, is right in the last layer and too small before, 25 times for int8 attention in the
first of five, because small errors flip choices of later routers and indexers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from calibrate.logits import Head, compare_predictions
from calibrate.methods import gram_paths, plan_layer
from calibrate.observe import Statistics
from calibrate.states import (
    FLOAT32_CHUNK_TOKENS,
    Progress,
    States,
    advance,
    embed,
    forward,
    silent,
)
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Codes, Layer, Weights, runnable
from glm5q.stream import LayerSource, layers
from glm5q.types import Role
from recipes.schema import Keep, Override, Plan, Recipe

Unit = tuple[int, Role]  # a layer's matrices of one role: what has one scheme in an engine
Options = Mapping[Unit, Sequence[Plan]]
Mixture = Mapping[Unit, int]  # which of its plans a unit follows
Held = dict[str, Tensor | Codes]  # by path; empty where a unit is kept


@dataclass(frozen=True)
class Texts:
    """int64 [windows, length] each: what gives statistics to round by, and what is judged on."""

    statistics: Tensor
    judged: Tensor


def measure(
    source: LayerSource,
    recipe: Recipe,
    options: Options,
    mixtures: Mapping[str, Mixture],
    texts: Texts,
    progress: Progress = silent,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Returns each mixture's KL against the source, nats a token: each judged window's mean.

    Rounding is the recipe's own, by statistics of the source's inputs.
    """
    config, count = source.config, source.config.num_hidden_layers
    seen = embed(source, texts.statistics, device, FLOAT32_CHUNK_TOKENS)
    judged = _in_host_memory(embed(source, texts.judged, device, FLOAT32_CHUNK_TOKENS))
    streams: dict[str, States] = {}
    for layer in layers(source.layer, range(count)):
        progress(f"measuring choices, layer {layer.number}", layer.number, count + 1)
        weights = runnable(layer, device=device)
        held: dict[Unit, list[Held]] = {}
        for unit, matrices in rounded(layer, weights, seen, recipe, options, config):
            held.setdefault(unit, []).append(matrices)
        for name, mixture in mixtures.items():
            changed = _changed(layer.number, mixture, held)
            if name in streams or changed:
                mixed = _with(layer, weights, changed, device)
                start = streams.get(name, judged)
                streams[name] = advance(config, layer.number, mixed, start)
        seen = advance(config, layer.number, weights, seen)
        judged = advance(config, layer.number, weights, judged)
    progress("measuring choices, logits", count, count + 1)
    head, found = Head(source, device), {}
    for name in mixtures:
        both = judged.hidden, streams.get(name, judged).hidden
        found[name] = compare_predictions((head, head), both, texts.judged).kl.double().mean(1)
    progress("measuring choices, logits", count + 1, count + 1)
    return found


def rounded(
    layer: Layer,
    weights: Weights,
    states: States,
    recipe: Recipe,
    options: Options,
    config: ModelConfig,
) -> Iterator[tuple[Unit, Held]]:
    """Yields each unit of a layer with its matrices by each of its plans, in order.

    Of several roundings that a method tries, the last is taken: the held-out choice is not run.
    """
    number = layer.number
    mine = {role: plans for (at, role), plans in options.items() if at == number}
    for index in range(max(map(len, mine.values()), default=0)):
        plans = {role: each[index] for role, each in mine.items() if index < len(each)}
        variant = _only(recipe, number, plans)
        statistics = Statistics(gram_paths(variant, number, config))
        if any(not isinstance(plan, Keep) for plan in plans.values()):
            forward(config, weights, states, statistics)
            statistics.complete()
        found = plan_layer(layer, weights, statistics, variant, config)
        for role in plans:
            matrices: Held = {}
            for module in names.layer_modules(config, number):
                tried = found.candidates.get(module.path)
                if module.role is role and tried is not None:
                    method = tried.unfolded[-1]
                    codes, scale = tried.codes[method], tried.scales[method]
                    part = slice(None) if module.stacked else 0
                    matrices[module.path] = tried.taken(codes[part], scale[part])
            yield (number, role), matrices


def _only(recipe: Recipe, layer: int, plans: Mapping[Role, Plan]) -> Recipe:
    """Returns the recipe with these plans in one layer, and everything else kept."""
    overrides = (Override(role=role, layers=(layer,), plan=plan) for role, plan in plans.items())
    kept = dict.fromkeys(Role, Keep(method="keep"))
    return recipe.model_copy(update={"weights": kept, "overrides": tuple(overrides)})


def _changed(number: int, mixture: Mixture, held: Mapping[Unit, Sequence[Held]]) -> Held:
    """Returns the matrices of a layer that a mixture holds otherwise than the source."""
    changed: Held = {}
    for unit, index in mixture.items():
        if unit[0] == number:
            changed |= held[unit][index]
    return changed


def _with(layer: Layer, weights: Weights, changed: Held, device: str) -> Weights:
    """Returns the layer's weights with some matrices changed."""
    if not changed:
        return weights
    other = runnable(replace(layer, vectors={}, matrices=changed), device=device)
    return Weights(
        weights.vectors,
        weights.matrices | other.matrices,
        weights.activation | other.activation,
    )


def _in_host_memory(states: States) -> States:
    """The states there, for streams that fork: hundreds of them would fill a GPU."""
    return replace(states, hidden=states.hidden.cpu(), spare=None)
