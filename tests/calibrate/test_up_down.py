"""Folding between up_proj and down_proj: exact, taken only where held-out tokens gain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from calibrate import run, up_down
from calibrate.block import decoder_layer
from calibrate.folds import as_folded
from calibrate.mixtures import rounded
from calibrate.observe import Folded, HeldOutErrors
from calibrate.states import embed
from glm5q import names, pipeline, quant
from glm5q.checkpoint import open_checkpoint
from glm5q.config import parse_config
from glm5q.errors import RecipeError
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes, Fold, Layer, powers_of_two, runnable
from glm5q.pipeline.ablate import VARIANTS, _variant
from glm5q.types import Role
from glm5q.verify import verify
from recipes import files, schema
from tests import outputs, small
from tests.calibrate.one_layer import quantize_one
from tests.calibrate.test_ranks import TORCHRUN, python, shards
from tests.runs import contents
from tests.verify.breaking import edit_tensor

LAYER, LENGTH, OUTLIERS = 1, 64, (3, 70)
READERS = tuple(
    f"{name}.weight"
    for name in ("q_a_proj", "with_mqa", "wk", "weights_proj", ".gate", "gate_proj", "up_proj")
)
ALPHAS = [0.25, 0.5, 1.0]
Texts = tuple[Path, Path]


def recipe(name: str, alphas: list[float], smooth: tuple[float, ...] = ()) -> schema.Recipe:
    raw = yaml.safe_load(files.text(name))
    raw["efforts"]["fast"] |= {"up_down": alphas, "smooth": list(smooth)}
    return files.validated(raw, name)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GLM-5 whose experts have two inner features 32 times the others', attention too."""
    tensors = small.random_tensors(parse_config(small.GLM5))
    for name in tensors:
        if ".experts." in name and name.endswith(("up_proj.weight", "down_proj.weight")):
            for feature in OUTLIERS:
                if name.endswith("up_proj.weight"):
                    tensors[name][feature] *= 32
                else:
                    tensors[name][:, feature] /= 32
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensors[name][list(OUTLIERS)] *= 32
        if name.endswith(READERS):
            tensors[name][:, list(OUTLIERS)] /= 32
    return small.write_checkpoint(tmp_path_factory.mktemp("uneven"), tensors=tensors)


@lru_cache(maxsize=4)
def quantized(
    root: Path, name: str, alphas: tuple[float, ...], smooth: tuple[float, ...] = ()
) -> tuple[Layer, dict[str, list[str]], float]:
    """One layer quantized in memory: (it, methods, down_proj's squared error)."""
    asked = recipe(name, list(alphas), smooth)
    found, methods, errors = quantize_one(root, asked, LAYER, 40, 32, LENGTH)
    taken = [errors.squared[names.DOWN, m][e] for e, m in enumerate(methods[names.DOWN])]
    return found, methods, float(torch.stack(taken).sum())


def output(root: Path, layer: Layer) -> Tensor:
    """What a layer makes of fixed hidden states, in float32."""
    config = open_checkpoint(root).config
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(96, config.hidden_size, generator=generator)
    offsets = torch.tensor([0, 40, 96])
    return decoder_layer(config, runnable(layer), hidden, offsets, None).hidden


def test_a_folded_layer_is_the_same_function(uneven: Path) -> None:
    """Bit for bit, in float32, of bfloat16 weights: powers of two commute with every rounding."""
    layer = quantized(uneven, "atlas-800t-a3", tuple(ALPHAS))[0]
    exponents = layer.folds[names.DOWN].columns
    assert exponents is not None
    assert int(exponents[:, list(OUTLIERS)].min()) >= 2
    source = open_checkpoint(uneven).layer(LAYER)
    original = output(uneven, source)
    assert torch.equal(output(uneven, as_folded(source, layer)), original)
    for forgotten in layer.folds:
        folds = {path: fold for path, fold in layer.folds.items() if path != forgotten}
        other = output(uneven, as_folded(source, replace(layer, folds=folds)))
        assert not torch.allclose(other, original, rtol=0.1)


def test_both_kinds_of_folds_meet_in_up_proj(uneven: Path) -> None:
    """Its columns times what the norm was divided by, its rows over what down_proj has."""
    layer = quantized(uneven, "atlas-800t-a3", tuple(ALPHAS), (0.5,))[0]
    fold = layer.folds[names.GATE_UP]
    assert fold.rows is not None
    assert fold.columns is not None
    assert fold.rows[:, fold.rows.shape[1] // 2 :].any()
    assert int(fold.columns[:, list(OUTLIERS)].min()) >= 2
    folded = as_folded(open_checkpoint(uneven).layer(LAYER), layer)
    original = output(uneven, open_checkpoint(uneven).layer(LAYER))
    assert torch.equal(output(uneven, folded), original)
    both, exact = layer.matrices[names.GATE_UP], folded.matrices[names.GATE_UP]
    assert isinstance(both, Codes)
    assert isinstance(exact, Tensor)
    coded = quant.dequantize(both.codes, both.scale)
    assert float((coded - exact).norm() / exact.float().norm()) < 0.25


def test_the_budget_search_tries_no_fold(uneven: Path) -> None:
    """It puts single matrices beside the source's others, which make up for nothing."""
    source = open_checkpoint(uneven)
    config, layer = source.config, source.layer(LAYER)
    states = embed(source, torch.arange(2 * LENGTH).view(2, LENGTH))
    found = []
    for asked in (recipe("h200", []), recipe("h200", ALPHAS, (0.5,))):
        plans = {Role.ROUTED_EXPERT: (asked.weights[Role.ROUTED_EXPERT],)}
        options = {(LAYER, role): each for role, each in plans.items()}
        held = dict(rounded(layer, runnable(layer), states, asked, options, config))
        found.append(held[LAYER, Role.ROUTED_EXPERT])
    for path in (names.GATE_UP, names.DOWN):
        one, other = (each[path] for each in found)
        assert isinstance(one, Codes)
        assert isinstance(other, Codes)
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scale, other.scale)


def test_up_keeps_its_codes(uneven: Path) -> None:
    """Only its scales change, by powers of two; gate's do not."""
    plain = quantized(uneven, "h200", ())[0].matrices[names.GATE_UP]
    layer = quantized(uneven, "h200", tuple(ALPHAS))[0]
    folded, fold = layer.matrices[names.GATE_UP], layer.folds[names.GATE_UP]
    assert isinstance(plain, Codes)
    assert isinstance(folded, Codes)
    assert fold.rows is not None
    assert torch.equal(folded.codes, plain.codes)
    assert torch.equal(folded.scale, plain.scale * powers_of_two(fold.rows).unsqueeze(-1))
    width = fold.rows.shape[1] // 2
    assert not fold.rows[:, :width].any()
    assert torch.equal(folded.scale, folded.scale.bfloat16().float())


@pytest.mark.parametrize("name", ["atlas-800t-a3", "h200"])
def test_outliers_gain_and_even_inputs_lose_nothing(name: str, uneven: Path, glm5: Path) -> None:
    without, with_it = (quantized(uneven, name, alphas)[2] for alphas in ((), tuple(ALPHAS)))
    assert with_it < 0.8 * without
    without, with_it = (quantized(glm5, name, alphas)[2] for alphas in ((), tuple(ALPHAS)))
    assert with_it <= without


def test_exponents_follow_the_inputs() -> None:
    square = torch.ones(3, 64)
    square[0, 5], square[1, 7], square[2] = 64.0**2, 0.0, 0.0
    found = up_down.exponents(square, 0.5)
    assert found[0, 5] == 3
    assert found[0].count_nonzero() == 1
    assert found[1, 7] == -5  # counts as a thousandth of the mean
    assert not found[2].any()
    assert torch.equal(powers_of_two(found), 2.0 ** found.float())


def options(source: Path, output: Path, texts: Texts, name: str) -> pipeline.CalibrateOptions:
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe(name, ALPHAS).model_dump(mode="json")))
    return pipeline.CalibrateOptions(
        source=source, recipes=(str(file),), output=output, data=texts[0],
        evaluation_data=texts[1], windows=24, sequence_length=LENGTH, evaluation_windows=2,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["h200", "atlas-800t-a3"])
def written(
    request: pytest.FixtureRequest,
    uneven: Path,
    texts: Texts,
    tmp_path_factory: pytest.TempPathFactory,
) -> pipeline.CalibrateOptions:
    asked = options(uneven, tmp_path_factory.mktemp("written") / "out", texts, request.param)
    finished = pipeline.calibrate(asked)[0]
    experts = finished.run.layers[LAYER].experts
    assert experts is not None
    assert sum("up_down" in method for method in experts.method) >= 4
    return asked


def test_files_verify_against_the_source_and_say_what_was_taken(
    written: pipeline.CalibrateOptions,
) -> None:
    rows = verify(written.output, written.source).rows
    assert [row for row in rows if row.status == "fail"] == []


def halved(tensor: Tensor) -> Tensor:
    tensor[list(OUTLIERS)] /= 2
    return tensor


def test_verify_sees_a_fold_that_down_proj_does_not_have(
    written: pipeline.CalibrateOptions, tmp_path: Path
) -> None:
    folder = outputs.copy(written.output, tmp_path)
    layers = json.loads((folder / "report.json").read_text())["layers"]
    expert = next(e for e, m in enumerate(layers[LAYER]["experts"]["method"]) if "up_down" in m)
    up = f"model.layers.{LAYER}.mlp.experts.{expert}.up_proj.weight_scale"
    edit_tensor(folder, up, halved)
    failed = {
        row.check: row.detail for row in verify(folder, written.source).rows if row.status == "fail"
    }
    assert f"experts.{expert}.down_proj: column 3 lacks 2^" in failed.pop("weights")
    assert set(failed) <= {"record", "codes"}


def test_a_resumed_run_is_byte_equal(
    written: pipeline.CalibrateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(written, output=tmp_path / "out")
    original: Callable[..., object] = run.quantize

    def stops(source: object, layer: Layer, *others: object) -> object:
        if layer.number == 2:
            raise KeyboardInterrupt
        return original(source, layer, *others)

    monkeypatch.setattr(run, "quantize", stops)
    with pytest.raises(KeyboardInterrupt):
        pipeline.calibrate(asked)
    monkeypatch.undo()
    assert pipeline.calibrate(asked)[0].run.resumed_layers == 2
    assert contents(asked.output) == contents(written.output)


def test_measured_as_deployment_rounds_it() -> None:
    """A folded candidate meets its input over 2^fold, rounded on the activations' grid."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 32, generator=generator) * torch.tensor([40.0] + [1.0] * 31)
    weight = torch.randn(2, 5, 32, generator=generator)
    fold = torch.zeros(2, 32, dtype=torch.int8)
    fold[:, 0] = torch.tensor([5, 0])
    moved = Folded(Fold(columns=fold).of(weight), fold)
    errors = HeldOutErrors({names.DOWN: {"plain": weight, "moved": moved}}, {names.DOWN: "int8"})
    offsets = torch.tensor([0, 3, 7])
    y = torch.cat((x[:3] @ weight[0].T, x[3:] @ weight[1].T))
    errors.experts(names.DOWN, x, offsets, y, torch.arange(7))
    plain, moved_error = (errors.squared[names.DOWN, m] for m in ("plain", "moved"))
    assert moved_error[0] < 0.1 * plain[0]
    assert torch.equal(moved_error[1], plain[1])
    divided = x[:3] / torch.tensor([32.0] + [1.0] * 31)
    exact = quant.quantize_activation(divided, "int8") @ Fold(columns=fold).of(weight)[0].T
    assert moved_error[0] == pytest.approx(float((exact - y[:3]).double().square().sum()), rel=1e-5)


def test_refused_where_a_static_scale_is_of_other_inputs() -> None:
    with pytest.raises(RecipeError, match=r"efforts\.fast\.up_down: a static activation scale"):
        recipe("h200-sglang", [0.5])
    with pytest.raises(RecipeError, match=r"up_down"):
        recipe("h200", [1.5])


@pytest.mark.parametrize("step", ["up_down", "smooth"])
def test_an_alpha_given_twice_is_refused(step: str) -> None:
    raw = yaml.safe_load(files.text("h200"))
    raw["efforts"]["fast"][step] = [0.5, 0.50000001]
    with pytest.raises(RecipeError, match=rf"efforts\.fast\.{step}: an alpha twice"):
        files.validated(raw, "x")


@pytest.mark.parametrize("name", ["h200", "atlas-800t-a3", "h200-sglang"])
def test_every_variant_of_the_ablation_is_a_recipe(name: str, tmp_path: Path) -> None:
    steps = {v: files.load(_variant(name, v, tmp_path)).steps for v in VARIANTS}
    assert bool(steps["up-down"].up_down) == (name != "h200-sglang")
    assert steps["smooth"].smooth
    assert not steps["fast"].smooth


def test_read_back_has_what_was_quantized(written: pipeline.CalibrateOptions) -> None:
    layer = open_any(written.output).layer(LAYER)
    both, source = layer.matrices[names.GATE_UP], open_checkpoint(written.source).layer(LAYER)
    original = source.matrices[names.GATE_UP]
    assert isinstance(both, Codes)
    assert isinstance(original, Tensor)
    coded = quant.dequantize(both.codes, both.scale)
    width = coded.shape[1] // 2
    ratio = coded[:, width:].norm(dim=2) / original[:, width:].float().norm(dim=2)
    assert int((ratio[:, list(OUTLIERS)].amax(1) < 0.3).sum()) >= 4
    assert coded[:, :width].norm() == pytest.approx(float(original[:, :width].norm()), rel=0.05)


def test_two_ranks_fold_as_one_does(uneven: Path, texts: Texts, tmp_path: Path) -> None:
    """Each rank knows the inputs of its own experts alone; smoothing's are all of everybody's."""
    raw = yaml.safe_load(files.text("h200"))
    raw["efforts"]["fast"] |= {"up_down": ALPHAS, "smooth": [0.5]}
    file = tmp_path / "folded.yaml"
    file.write_text(yaml.safe_dump(raw | {"name": "folded"}))
    asked = (
        "-m", "glm5q", "calibrate", uneven, "--recipe", file, "--data", texts[0],
        "--eval-data", texts[1], "--windows", 24, "--sequence-length", LENGTH, "--eval-windows", 2,
    )  # fmt: skip
    for name, before in (("one", ()), ("two", (*TORCHRUN, 2))):
        ended = python(*before, *asked, "--output", tmp_path / name)
        assert ended.returncode == 0, ended.stderr
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    assert [row for row in verify(tmp_path / "one", uneven).rows if row.status == "fail"] == []
    layers = json.loads((tmp_path / "one" / "report.json").read_text())["layers"]
    assert any("up_down" in method for method in layers[LAYER]["experts"]["method"])
    assert any(matrix["method"].startswith("smooth") for matrix in layers[LAYER]["matrices"])


def test_inner_fits_what_was_folded(uneven: Path, texts: Texts, tmp_path: Path) -> None:
    """calibrate.inner runs the layer again: on the inputs that its folded gate and up meet."""
    errors = {}
    for inner in (False, True):
        raw = yaml.safe_load(files.text("h200"))
        raw["efforts"]["fast"] |= {"up_down": ALPHAS, "smooth": [0.5], "inner": inner}
        asked = options(uneven, tmp_path / str(inner), texts, "h200")
        Path(asked.recipes[0]).write_text(yaml.safe_dump(raw | {"name": "folded"}))
        layer = pipeline.calibrate(asked)[0].run.layers[LAYER]
        down = next(matrix for matrix in layer.matrices if matrix.module == names.DOWN)
        assert ("inner" in down.method) == inner
        errors[inner] = layer.error
        rows = verify(asked.output, asked.source).rows
        assert [row for row in rows if row.status == "fail"] == []
    assert errors[True] < errors[False]


@pytest.mark.gpu
def test_on_a_gpu_folds_are_taken_and_verify(uneven: Path, texts: Texts, tmp_path: Path) -> None:
    """Both kinds, beside bfloat16 products: near what a CPU makes of the same text."""
    raw = yaml.safe_load(files.text("h200"))
    raw["efforts"]["fast"] |= {"up_down": ALPHAS, "smooth": [0.5]}
    found = {}
    for device in ("cuda", "cpu"):
        asked = replace(options(uneven, tmp_path / device, texts, "h200"), device=device)
        Path(asked.recipes[0]).write_text(yaml.safe_dump(raw | {"name": "folded"}))
        found[device] = pipeline.calibrate(asked)[0].run
        layer = found[device].layers[LAYER]
        assert layer.experts is not None
        assert sum("up_down" in method for method in layer.experts.method) >= 4
        assert any(matrix.method == "smooth 0.5" for matrix in layer.matrices)
        rows = verify(asked.output, asked.source).rows
        assert [row for row in rows if row.status == "fail"] == []
    kl = [one.accuracy.kl_mean for one in found.values()]  # type: ignore[union-attr]
    assert kl[0] < 1.1 * kl[1]
