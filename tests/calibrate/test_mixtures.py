"""A mixture's KL against evaluate's, of a model that holds just those matrices rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calibrate import mixtures
from calibrate.evaluate import evaluate
from calibrate.mixtures import Held, Mixture, Options, Texts, measure, rounded
from calibrate.states import advance, embed
from glm5q import quant
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.config import ModelConfig
from glm5q.layer import Codes, Layer, runnable
from glm5q.types import IntScheme, Role
from recipes import files
from recipes.schema import Keep, Plan, Recipe

EXPERTS, ATTENTION = (2, Role.ROUTED_EXPERT), (0, Role.ATTENTION)


@dataclass(frozen=True)
class Rounded:
    """A checkpoint of which some layers hold other matrices."""

    source: Checkpoint
    held: Mapping[int, Held]

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    def top_tensor(self, name: str) -> Tensor:
        return self.source.top_tensor(name)

    def layer(self, number: int) -> Layer:
        return self.source.layer(number).with_matrices(self.held.get(number, {}))


@pytest.fixture(scope="module")
def source(glm52: Path) -> Checkpoint:
    return open_checkpoint(glm52)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return files.load("h200")


@pytest.fixture(scope="module")
def texts() -> Texts:
    tokens = torch.randint(0, 256, (6, 48), generator=torch.Generator().manual_seed(3))
    return Texts(tokens[:4], tokens[4:])


@pytest.fixture(scope="module")
def options(recipe: Recipe) -> Options:
    eight, kept = recipe.weights[Role.ATTENTION], Keep(method="keep")
    plans: dict[mixtures.Unit, list[Plan]] = {
        EXPERTS: [recipe.weights[Role.ROUTED_EXPERT], eight, kept],
        ATTENTION: [eight, kept],
    }
    return plans


@pytest.fixture(scope="module")
def held(
    source: Checkpoint, recipe: Recipe, texts: Texts, options: Options
) -> dict[tuple[mixtures.Unit, int], Held]:
    """What each unit holds by each of its plans, from the source's own inputs."""
    found: dict[tuple[mixtures.Unit, int], Held] = {}
    states = embed(source, texts.statistics)
    for number in range(source.config.num_hidden_layers):
        layer = source.layer(number)
        weights = runnable(layer)
        counts: dict[mixtures.Unit, int] = {}
        for unit, matrices in rounded(layer, weights, states, recipe, options, source.config):
            counts[unit] = counts.get(unit, -1) + 1
            found[unit, counts[unit]] = matrices
        states = advance(source.config, number, weights, states)
    return found


MIXTURES: dict[str, Mixture] = {
    "experts, four bits": {EXPERTS: 0},
    "experts, eight bits": {EXPERTS: 1},
    "experts kept": {EXPERTS: 2},
    "attention": {ATTENTION: 0},
    "both": {ATTENTION: 0, EXPERTS: 1},
}


def test_a_mixture_is_the_model_that_holds_it(
    source: Checkpoint,
    recipe: Recipe,
    texts: Texts,
    options: Options,
    held: dict[tuple[mixtures.Unit, int], Held],
) -> None:
    found = measure(source, recipe, options, MIXTURES, texts)
    for name, mixture in MIXTURES.items():
        layers = {unit[0]: held[unit, index] for unit, index in mixture.items()}
        wanted = evaluate(source, Rounded(source, layers), texts.judged).token_kl.double().mean(1)
        assert torch.allclose(found[name], wanted, rtol=1e-4, atol=1e-9), name
    means = {name: float(kl.mean()) for name, kl in found.items()}
    assert means["experts kept"] < 1e-9
    assert means["experts, eight bits"] < 0.2 * means["experts, four bits"]
    assert means["attention"] > 0


def test_rounding_is_the_methods_and_not_to_nearest(
    source: Checkpoint, held: dict[tuple[mixtures.Unit, int], Held]
) -> None:
    matrix = held[EXPERTS, 0]["mlp.experts.gate_up_proj"]
    weight = source.layer(EXPERTS[0]).matrices["mlp.experts.gate_up_proj"]
    assert isinstance(matrix, Codes)
    assert isinstance(weight, Tensor)
    assert isinstance(matrix.scheme, IntScheme)
    nearest = quant.quantize(weight, matrix.scale, matrix.scheme)
    assert 0.02 < float((matrix.codes != nearest).float().mean()) < 0.6


def test_plans_come_in_order_and_hold_their_own_scheme(
    held: dict[tuple[mixtures.Unit, int], Held], options: Options
) -> None:
    assert sorted(held) == sorted((u, i) for u, plans in options.items() for i in range(len(plans)))
    for (unit, index), matrices in held.items():
        plan = options[unit][index]
        assert bool(matrices) != isinstance(plan, Keep)
        for matrix in matrices.values():
            assert not isinstance(matrix, Tensor)
            assert matrix.scheme == plan.scheme()
