"""`--budget-gb` and `--budget-bits`: the bytes held, the choice in the files, the errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from torch import nn

from calibrate import mixtures
from glm5q import names, pipeline
from glm5q.checkpoint import open_checkpoint
from glm5q.config import parse_config
from glm5q.errors import RecipeError, UserError
from glm5q.formats.base import module_names
from glm5q.formats.ct_config import check_claims, quantization_config
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes
from glm5q.pipeline import budget as budgets
from glm5q.pipeline.budget import BudgetOptions
from glm5q.pipeline.budget_space import Space, space
from glm5q.pipeline.subject import elements_of
from glm5q.types import Role
from glm5q.verify import engines, verify
from glm5q.verify.layouts import Held
from glm5q.verify.model import Model
from recipes import files, schema
from reports import html
from reports.budget import Budget
from tests import small

Texts = tuple[Path, Path]


LAYOUTS = {4: "pack-quantized", 8: "int-quantized"}


HOLDINGS = {
    "model.layers.1.mlp.experts.0.up_proj": Held("int4", None, packed=True),
    "model.layers.3.mlp.experts.0.up_proj": Held("int8"),
}


class StoppedError(Exception):
    """Where a run was cut."""


def run(source: Path, output: Path, texts: Texts, budget: BudgetOptions) -> pipeline.Finished:
    asked = pipeline.CalibrateOptions(
        source, ("h200",), output, *texts, 12, 48, evaluation_windows=3, budget=budget
    )
    return pipeline.calibrate(asked)[0]


def sizes(source: Path) -> tuple[Space, int, int]:
    """The choices of the h200 recipe here, the least bytes and the most."""
    checkpoint = open_checkpoint(source)
    found = space(files.load("h200"), checkpoint.config, elements_of(checkpoint))
    return found, found.least, found.rest + sum(max(each) for each in found.nbytes.values())


@pytest.fixture(scope="module")
def asked(glm52: Path) -> int:
    """Room for one layer's experts in eight bits, and not for two."""
    found, least, _ = sizes(glm52)
    four, eight, _ = next(n for (_, r), n in found.nbytes.items() if r is Role.ROUTED_EXPERT)
    return least + (eight - four) * 3 // 2


@pytest.fixture(scope="module")
def finished(
    glm52: Path, texts: Texts, asked: int, tmp_path_factory: pytest.TempPathFactory
) -> pipeline.Finished:
    output = tmp_path_factory.mktemp("budget") / "out"
    return run(glm52, output, texts, BudgetOptions(gb=asked / 1e9, check=True))


@pytest.fixture(scope="module")
def budget(finished: pipeline.Finished) -> Budget:
    assert finished.run.budget is not None
    return finished.run.budget


def test_what_is_written_has_the_bytes_that_were_planned(
    finished: pipeline.Finished, budget: Budget, asked: int
) -> None:
    assert finished.run.size is not None
    assert finished.run.size.quantized_bytes == budget.nbytes
    assert 0.98 * asked < budget.nbytes <= asked
    weights, taken = 0, 0
    quantized = open_any(finished.checkpoint)
    for unit in budget.units:
        for module in names.layer_modules(quantized.config, unit.layer):
            weights += torch.Size(module.shape).numel() if module.role == unit.role else 0
        taken += unit.choices[unit.chosen].nbytes
    assert budget.bits == pytest.approx(8 * taken / weights)


def test_experts_of_one_layer_have_eight_bits_and_it_is_the_worst(
    finished: pipeline.Finished, budget: Budget
) -> None:
    quantized = open_any(finished.checkpoint)
    bits = {}
    for number in range(quantized.config.num_hidden_layers):
        matrix = quantized.layer(number).matrices.get(names.GATE_UP)
        if isinstance(matrix, Codes):
            bits[number] = matrix.codes.abs().max().item()
    wide = [number for number, largest in bits.items() if largest > 8]
    assert len(wide) == 1
    gains = {
        u.layer: u.choices[0].kl - u.choices[1].kl
        for u in budget.units
        if u.role == "routed_expert"
    }
    assert wide[0] == max(gains, key=gains.__getitem__)


def test_compressed_tensors_reads_each_layers_own_scheme(finished: pipeline.Finished) -> None:
    """Its own matching of targets, on a model whose modules are named as engines name them."""
    raw = json.loads((finished.checkpoint / "config.json").read_text())["quantization_config"]
    assert raw["format"] == "mixed-precision"
    quantized = open_any(finished.checkpoint)
    model = nn.Module()
    wanted: dict[str, object] = {}
    for number in range(quantized.config.num_hidden_layers):
        layer = quantized.layer(number)
        for module in names.layer_modules(quantized.config, number):
            matrix = layer.matrices[module.path]
            for name in module_names(number, module):
                _place(model, name)
                wanted[name] = matrix.scheme if isinstance(matrix, Codes) else None
    apply_quantization_config(model, QuantizationConfig.model_validate(raw))
    for name, scheme in wanted.items():
        found = getattr(model.get_submodule(name), "quantization_scheme", None)
        theirs = found and (found.weights.num_bits, found.weights.group_size, found.format)
        mine = scheme and (scheme.bits, scheme.group_size, LAYOUTS[scheme.bits])
        assert theirs == mine, name
    assert len({s.bits for n, s in wanted.items() if s is not None and ".experts." in n}) == 2


def _place(model: nn.Module, name: str) -> None:
    *folders, last = name.split(".")
    for folder in folders:
        if not hasattr(model, folder):
            model.add_module(folder, nn.Module())
        model = model.get_submodule(folder)
    model.add_module(last, nn.Linear(128, 8, bias=False, device="meta"))


def test_the_engines_rules_hold(finished: pipeline.Finished, glm52: Path) -> None:
    report = verify(finished.checkpoint, glm52)
    assert report.ok, [row for row in report.rows if row.status == "fail"]
    assert "sglang" not in (finished.checkpoint / "README.md").read_text().lower()


def test_the_record_and_its_page(finished: pipeline.Finished, budget: Budget) -> None:
    recipe = finished.run.recipe
    assert recipe is not None
    assert recipe.edited
    changed = {(o["role"], layer) for o in recipe.content["overrides"] for layer in o["layers"]}
    assert changed == {(u.role, u.layer) for u in budget.units if u.chosen}
    assert budget.kl == pytest.approx(sum(u.choices[u.chosen].kl for u in budget.units))
    assert [p.kl for p in budget.curve] == sorted((p.kl for p in budget.curve), reverse=True)
    assert budget.nbytes in [point.nbytes for point in budget.curve]
    assert all(point.kl_measured is not None for point in budget.curve)
    assert budget.curve[-1].kl == budget.curve[-1].kl_measured == 0  # everything is kept
    assert budget.rank_correlation is not None
    page = html.render(finished.run)
    assert page.count("▲ int8 channel") == sum(
        u.choices[u.chosen].scheme == "int8 channel + int8" and u.chosen > 0 for u in budget.units
    )
    assert 'id="budget-curve"' in page


def test_an_interrupted_run_does_not_choose_again(
    glm52: Path, texts: Texts, asked: int, finished: pipeline.Finished, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    budget = BudgetOptions(gb=asked / 1e9)  # checked or not, the choice is the same

    def stop(*_: object, **__: object) -> None:
        raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr("calibrate.run.calibrate", stop)
        with pytest.raises(StoppedError):
            run(glm52, tmp_path / "out", texts, budget)
    monkeypatch.setattr(budgets, "measure", stop)
    again = run(glm52, tmp_path / "out", texts, budget)
    for file in finished.checkpoint.glob("*.safetensors"):
        assert file.read_bytes() == (again.checkpoint / file.name).read_bytes()
    with pytest.raises(StoppedError):
        run(glm52, tmp_path / "other", texts, replace(budget, gb=1.01 * asked / 1e9))


def test_bits_and_bytes_say_the_same(glm52: Path) -> None:
    found, least, most = sizes(glm52)
    for nbytes in (least, (least + most) // 2, most):
        asked = BudgetOptions(bits=found.bits(nbytes))
        assert abs(asked.nbytes(found) - nbytes) <= 1


def test_too_small_a_budget_says_what_is_needed(glm52: Path, texts: Texts, tmp_path: Path) -> None:
    """And leaves no folder behind; the figures it gives are enough."""
    _, least, _ = sizes(glm52)
    with pytest.raises(UserError, match="needs") as raised:
        run(glm52, tmp_path / "out", texts, BudgetOptions(gb=(least - 1000) / 1e9))
    assert not (tmp_path / "out").exists()
    gb, bits = re.findall(r"--budget-\w+ ([\d.]+)", str(raised.value))
    checkpoint = open_checkpoint(glm52)
    for enough in (BudgetOptions(gb=float(gb)), BudgetOptions(bits=float(bits))):
        budgets.check_budget(files.load("h200"), checkpoint, enough)


def test_a_format_with_one_layout_leaves_no_choice(glm52: Path) -> None:
    checkpoint = open_checkpoint(glm52)
    with pytest.raises(RecipeError, match="in one way only"):
        space(files.load("h200-sglang"), checkpoint.config, elements_of(checkpoint))


def test_a_users_own_override_is_left_alone(glm52: Path) -> None:
    recipe = files.load("h200")
    plan = recipe.weights[Role.ATTENTION].model_copy(update={"scale_dtype": "float32"})
    own = schema.Override(role=Role.ATTENTION, layers=(0, 2), plan=plan)
    checkpoint = open_checkpoint(glm52)
    found = space(
        recipe.model_copy(update={"overrides": (own,)}), checkpoint.config, elements_of(checkpoint)
    )
    layers: list[mixtures.Unit] = [unit for unit in found.options if unit[1] is Role.ATTENTION]
    assert [number for number, _ in layers] == [1, 3, 4]


@pytest.mark.parametrize(("recipe", "engine"), [("h200", "SGLang"), ("a100", "transformers")])
def test_experts_that_differ_by_layer_are_for_vllm_alone(recipe: str, engine: str) -> None:
    config, loaded = parse_config(small.GLM52), files.load(recipe)
    states = {}
    for layers in ((3,), (1, 2, 3, 4)):
        plan = loaded.weights[Role.ATTENTION]
        other = schema.Override(role=Role.ROUTED_EXPERT, layers=layers, plan=plan)
        changed = loaded.model_copy(update={"overrides": (other,)})
        assignments = [changed.assignment(n, config) for n in range(config.num_layers)]
        raw = quantization_config(assignments, config, changed.options())
        check_claims(raw, assignments, config)
        rows = engines.compressed_tensors(
            raw, Model(small.GLM52), HOLDINGS if len(layers) == 1 else {}
        )
        states[len(layers)] = raw["format"], [r.status for r in rows if engine in r.check]
    assert states[1] == ("mixed-precision", ["skip"])
    assert states[4][0] == "int-quantized"


@pytest.mark.parametrize(
    ("given", "said"),
    [((0.1, 4.5, False), "two budgets"), ((None, None, True), "no budget")],
)
def test_half_a_budget(given: tuple[float | None, float | None, bool], said: str) -> None:
    with pytest.raises(UserError, match=said):
        BudgetOptions.asked(*given)
    assert BudgetOptions.asked(None, None, False) is None
