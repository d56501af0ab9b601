"""Smoothing: the same function, every reader of a divided input or none, by held-out tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from calibrate import run, smoothing
from calibrate.block import decoder_layer
from calibrate.candidates import Candidates
from calibrate.folds import as_folded
from calibrate.job import Job, Place
from calibrate.methods import gram_paths, plan_layer
from calibrate.observe import HeldOutErrors, Statistics
from calibrate.states import embed, forward
from glm5q import names, pipeline
from glm5q.checkpoint import open_checkpoint
from glm5q.config import parse_config
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes, Fold, Layer, powers_of_two, runnable
from glm5q.types import IntScheme
from glm5q.verify import verify
from recipes import files, schema
from tests import outputs, small
from tests.calibrate.one_layer import quantize_one
from tests.runs import contents
from tests.verify.breaking import edit_tensor

LENGTH, OUTLIERS = 64, (3, 21)
READERS = {
    "input_layernorm": ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj"),
    "self_attn.q_a_layernorm": ("q_b_proj", "indexer.wq_b"),
    "post_attention_layernorm": ("gate", "gate_proj", "up_proj"),
}
Texts = tuple[Path, Path]


def recipe(name: str, alphas: list[float]) -> schema.Recipe:
    raw = yaml.safe_load(files.text(name))
    raw["efforts"]["fast"]["smooth"] = alphas
    return files.validated(raw, name)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GLM-5.2 in which two channels of every site are 32 times the others'."""
    config = parse_config(small.GLM52)
    tensors = small.random_tensors(config)
    head = config.qk_nope_head_dim + config.v_head_dim
    values = [config.qk_nope_head_dim + 5, head + config.qk_nope_head_dim + 1]
    for name, tensor in tensors.items():
        path = name.split(".", 3)[-1].removesuffix(".weight")
        if path in READERS:
            tensor[list(OUTLIERS)] *= 32
        if any(path.endswith("." + reader) for readers in READERS.values() for reader in readers):
            tensor[:, list(OUTLIERS)] /= 32
        if path == "self_attn.kv_b_proj":
            tensor[values] *= 32
        elif path == "self_attn.o_proj":
            tensor[:, [5, config.v_head_dim + 1]] /= 32
        elif path in ("mlp.up_proj", "mlp.shared_experts.up_proj"):
            tensor[list(OUTLIERS)] *= 32
        elif path in ("mlp.down_proj", "mlp.shared_experts.down_proj"):
            tensor[:, list(OUTLIERS)] /= 32
    root = tmp_path_factory.mktemp("uneven")
    return small.write_checkpoint(root, small.GLM52, tensors)


@lru_cache(maxsize=8)
def quantized(root: Path, name: str, number: int, alphas: tuple[float, ...]) -> tuple[Layer, float]:
    """One layer quantized in memory: (it, its eight-bit matrices' summed relative error)."""
    asked = recipe(name, list(alphas))
    found, methods, errors = quantize_one(root, asked, number, 16, 12, LENGTH)
    paths = [path for path in methods if "experts." not in path]
    return found, sum(float(errors.squared[p, methods[p][0]] / errors.reference[p]) for p in paths)


def output(root: Path, layer: Layer) -> tuple[Tensor, Tensor]:
    """What a layer makes of fixed hidden states in float32, and which positions it attends."""
    config = open_checkpoint(root).config
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(96, config.hidden_size, generator=generator)
    offsets = torch.tensor([0, 40, 96])
    indices = None
    if not config.full_indexer[layer.number]:
        first = decoder_layer(
            config, runnable(open_checkpoint(root).layer(0)), hidden, offsets, None
        )
        indices = first.indices
    made = decoder_layer(config, runnable(layer), hidden, offsets, indices)
    return made.hidden, made.indices


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_smoothed_layer_is_the_same_function(number: int, uneven: Path) -> None:
    """Bit for bit in float32: dense, with experts, and with an indexer shared from before."""
    layer = quantized(uneven, "atlas-800t-a3", number, (0.5,))[0]
    source = open_checkpoint(uneven).layer(number)
    mlp = "mlp." if number == 0 else "mlp.shared_experts."
    wanted = {f"self_attn.{reader}" for readers in READERS.values() for reader in readers}
    wanted |= {"self_attn.kv_b_proj", "self_attn.o_proj", "mlp.gate", names.GATE_UP}
    wanted |= {f"{mlp}{projection}_proj" for projection in ("gate", "up", "down")}
    assert set(layer.folds) == wanted & set(source.matrices)
    hidden, indices = output(uneven, source)
    folded = as_folded(source, layer)
    again, chosen = output(uneven, folded)
    assert torch.equal(again, hidden)
    assert torch.equal(chosen, indices)
    for forgotten in layer.folds:
        one = folded.with_matrices({forgotten: source.matrices[forgotten]})
        other, others = output(uneven, one)
        assert not torch.equal(other, hidden) or not torch.equal(others, indices), forgotten


def test_kept_readers_stay_exact(uneven: Path) -> None:
    """The indexer's key and weights are bfloat16 still, their columns times 2^k."""
    layer = quantized(uneven, "atlas-800t-a3", 1, (0.5,))[0]
    source = open_checkpoint(uneven).layer(1)
    norm = "input_layernorm.weight"
    power = source.vectors[norm].float() / layer.vectors[norm].float()
    assert float(power[list(OUTLIERS)].min()) >= 8
    for path in ("self_attn.indexer.wk", "self_attn.indexer.weights_proj"):
        mine, theirs = layer.matrices[path], source.matrices[path]
        assert isinstance(mine, Tensor)
        assert isinstance(theirs, Tensor)
        assert mine.dtype is torch.bfloat16
        assert torch.equal(mine.float(), theirs.float() * power)
    rows = layer.folds["self_attn.kv_b_proj"].rows
    assert rows is not None
    config = open_checkpoint(uneven).config
    keys = rows.view(config.num_attention_heads, -1)[:, : config.qk_nope_head_dim]
    assert not keys.any()


def test_outliers_gain_and_even_inputs_lose_nothing(uneven: Path, glm52: Path) -> None:
    without, with_it = (quantized(uneven, "h200", 1, alphas)[1] for alphas in ((), (0.5,)))
    assert with_it < 0.3 * without
    without, with_it = (quantized(glm52, "h200", 1, alphas)[1] for alphas in ((), (0.5,)))
    assert with_it <= without


def test_not_where_a_reader_could_not_follow(uneven: Path) -> None:
    """A float16 matrix has no room for powers of two; weights-only inputs are not rounded."""
    raw = yaml.safe_load(files.text("h200"))
    raw["efforts"]["fast"]["smooth"] = [0.5]
    raw["weights"]["indexer_key"] = {"method": "keep", "dtype": "float16"}
    raw["weights"]["shared_expert"] = raw["weights"]["shared_expert"] | {"activation": None}
    source = open_checkpoint(uneven)
    config, asked = source.config, files.validated(raw, "h200")
    states = embed(source, torch.arange(2 * LENGTH).view(2, LENGTH))
    layer = source.layer(1)
    weights = runnable(layer)
    statistics = Statistics(gram_paths(asked, 1, config))
    forward(config, weights, states, statistics)
    statistics.complete()
    plan = plan_layer(layer, weights, statistics, asked, config)
    folded = {path for path, found in plan.candidates.items() if found.folds}
    assert folded == {"self_attn.q_b_proj", "self_attn.indexer.wq_b", "self_attn.o_proj"}


@pytest.mark.parametrize(
    ("other", "taken"), [(1.2, "smooth 0.5"), (1.85, "rtn"), (5.0, "rtn")], ids=str
)
def test_readers_take_a_fold_together_or_not_at_all(other: float, taken: str) -> None:
    """By the sum over both, which has to stay a tenth under: 1.3, 1.95, 5.1 against 2."""
    scheme = IntScheme(8, None, "bfloat16", "int8")
    codes, scale = torch.zeros(1, 4, 8, dtype=torch.int8), torch.ones(1, 4, 1)
    fold = {"smooth 0.5": torch.ones(1, 8, dtype=torch.int8)}
    both = {"rtn": codes, "smooth 0.5": codes}, {"rtn": scale, "smooth 0.5": scale}
    paths = ("self_attn.q_b_proj", "self_attn.indexer.wq_b")
    candidates = {path: Candidates(scheme, *both, folds=fold) for path in paths}
    errors = HeldOutErrors({}, {})
    for path, loss in zip(paths, (0.1, other), strict=True):
        errors.reference[path] = torch.tensor([10.0])
        errors.squared[path, "rtn"] = torch.tensor([10.0])
        errors.squared[path, "smooth 0.5"] = torch.tensor([10.0 * loss])
    assert smoothing.allowed(candidates, errors) == {path: [taken] for path in paths}


def test_exponents_balance_inputs_and_columns() -> None:
    large, own = torch.ones(16), torch.ones(16)
    large[2], large[3], own[4] = 256.0, 0.0, 0.0
    found = smoothing.exponents(large, own, 0.5)
    assert int(found[2]) == 4
    assert found.count_nonzero() == 1
    assert not smoothing.exponents(torch.zeros(4), own[:4], 0.5).any()
    assert torch.equal(powers_of_two(found), 2.0 ** found.float())


def options(source: Path, output: Path, texts: Texts, name: str) -> pipeline.CalibrateOptions:
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe(name, [0.5]).model_dump(mode="json")))
    return pipeline.CalibrateOptions(
        source=source, recipes=(str(file),), output=output, data=texts[0],
        evaluation_data=texts[1], windows=24, sequence_length=LENGTH, evaluation_windows=2,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["h200", "atlas-800t-a3", "cpu"])
def written(
    request: pytest.FixtureRequest,
    uneven: Path,
    texts: Texts,
    tmp_path_factory: pytest.TempPathFactory,
) -> pipeline.CalibrateOptions:
    asked = options(uneven, tmp_path_factory.mktemp("written") / "out", texts, request.param)
    finished = pipeline.calibrate(asked)[0]
    taken = {m.module for m in finished.run.layers[1].matrices if m.method == "smooth 0.5"}
    assert {"self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.o_proj"} <= taken
    return asked


def failed(folder: Path, source: Path) -> dict[str, str]:
    return {row.check: row.detail for row in verify(folder, source).rows if row.status == "fail"}


def test_files_verify_against_the_source(written: pipeline.CalibrateOptions) -> None:
    assert failed(written.output, written.source) == {}


def halved(tensor: Tensor) -> Tensor:
    tensor[list(OUTLIERS)] /= 2
    return tensor


@pytest.mark.parametrize(
    ("divided", "readers"),
    [
        ("input_layernorm.weight", ("self_attn.q_a_proj", "self_attn.indexer.wk")),
        ("self_attn.q_a_layernorm.weight", ("self_attn.q_b_proj", "self_attn.indexer.wq_b")),
        ("post_attention_layernorm.weight", ("mlp.gate", "mlp.experts.0.up_proj")),
        ("mlp.shared_experts.up_proj.weight_scale", ("mlp.shared_experts.down_proj",)),
    ],
)
def test_verify_sees_what_its_readers_lack(
    divided: str, readers: tuple[str, ...], written: pipeline.CalibrateOptions, tmp_path: Path
) -> None:
    folder = outputs.copy(written.output, tmp_path)
    edit_tensor(folder, f"model.layers.1.{divided}", halved)
    said = " ".join(row for found in verify(folder, written.source).rows for row in found.problems)
    for reader in readers:
        assert f"model.layers.1.{reader}" in said


def test_a_resumed_run_is_byte_equal(
    written: pipeline.CalibrateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(written, output=tmp_path / "out")
    original = run.quantize

    def stops(source: run.Source, layer: Layer, job: Job, place: Place) -> object:
        if layer.number == 2:
            raise KeyboardInterrupt
        return original(source, layer, job, place)

    monkeypatch.setattr(run, "quantize", stops)
    with pytest.raises(KeyboardInterrupt):
        pipeline.calibrate(asked)
    monkeypatch.undo()
    assert pipeline.calibrate(asked)[0].run.resumed_layers == 2
    assert contents(asked.output) == contents(written.output)


def test_read_back_has_the_fold(written: pipeline.CalibrateOptions) -> None:
    layer, source = open_any(written.output).layer(1), open_checkpoint(written.source).layer(1)
    norm = "self_attn.q_a_layernorm.weight"
    power = (source.vectors[norm].float() / layer.vectors[norm].float()).log2().round()
    coded = layer.matrices["self_attn.q_b_proj"]
    assert isinstance(coded, Codes)
    original = source.matrices["self_attn.q_b_proj"]
    assert isinstance(original, Tensor)
    exact = Fold(columns=power.to(torch.int8)).of(original.float())
    rounded = runnable(layer).matrices["self_attn.q_b_proj"]
    assert float((rounded - exact).norm() / exact.norm()) < 0.02
