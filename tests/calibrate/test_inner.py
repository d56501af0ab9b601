"""down_proj fitted to what the rounded gate and up leave of its input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate import inner, run
from calibrate.block import Observer
from calibrate.candidates import LayerPlan, find_candidates
from calibrate.data import load_windows
from calibrate.inner import Sums
from calibrate.job import Place
from calibrate.observe import Statistics
from calibrate.products import Stack
from calibrate.states import States, advance, embed, forward
from glm5q import names, pipeline, quant
from glm5q.checkpoint import open_checkpoint
from glm5q.config import ModelConfig
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes, runnable
from glm5q.pipeline import CalibrateOptions
from glm5q.types import IntScheme
from glm5q.verify import verify
from recipes import files
from recipes.schema import Gptq
from tests.calibrate.test_ranks import shards

LENGTH, WINDOWS, HELD_OUT = 64, 24, 2
EXPERTS, WIDTH, OUT = 3, 32, 16
Texts = tuple[Path, Path]


def recipe(**steps: Any) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(files.text("a100"))
    wanted = {"descent": 1, "guidance": False} | steps
    raw |= {"name": "small", "mtp": "quantize", "efforts": {"fast": wanted, "best": wanted}}
    return raw


def plan(**changes: Any) -> Gptq:
    raw = recipe()
    raw["weights"]["routed_expert"] |= {"group_size": None, "scale_dtype": "float32"} | changes
    found = files.validated(raw, "x").weights
    return next(p for p in found.values() if isinstance(p, Gptq))


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sums(left: Tensor, inner_rows: Tensor, counts: tuple[int, ...]) -> Sums:
    """Sums of one chunk, as an observer is given it."""
    none = Codes(torch.zeros(0), torch.zeros(0), IntScheme(4, None, "float32", None))
    found = Sums(Stack(none), None)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    found.both(left, inner_rows, offsets, left[:0], None)
    return found


def test_nothing_lost_is_the_rounding_there_was() -> None:
    """h = g: the stack is rounded as it would have been by its own Gram."""
    left, stack = rows(0, 600, WIDTH), rows(1, EXPERTS, OUT, WIDTH)
    counts, wanted = (200, 300, 100), plan()
    found = inner._rounded(3, stack, sums(left, left, counts), wanted, LayerPlan(2), Place())
    statistics = Statistics({names.DOWN})
    offsets = torch.tensor([0, *counts]).cumsum(0)
    statistics.experts(names.DOWN, left, offsets, left[:0], torch.arange(600))
    statistics.complete()
    moments = statistics.of(names.DOWN)
    as_it_was = find_candidates(3, names.DOWN, stack, moments, wanted, LayerPlan(2))
    assert torch.equal(found[0], as_it_was.codes["descent"])
    assert torch.equal(found[1], as_it_was.scales["descent"])


def test_a_planted_linear_loss_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """h = g (I + M) for each expert's own M: W' g is W h but for the rounding."""
    monkeypatch.setattr(inner, "SHARE", 1.0)
    left, stack = rows(0, 1500, WIDTH), rows(1, EXPERTS, OUT, WIDTH)
    planted = 0.15 * rows(2, EXPERTS, WIDTH, WIDTH)
    counts = (500, 400, 600)
    whole = torch.cat(
        [part + part @ m for part, m in zip(left.split(counts), planted, strict=True)]
    )
    made = sums(left, whole, counts)
    codes, scale = inner._rounded(
        3, stack, made, plan(ridge=0.0, pooling=0.0, damping=1e-6), LayerPlan(2), Place()
    )
    fitted = stack + stack @ planted.transpose(1, 2)
    plain = (fitted - stack).norm()
    assert float((quant.dequantize(codes, scale) - fitted).norm()) < 0.3 * float(plain)


def test_few_tokens_move_nothing_far() -> None:
    """Eight tokens and inputs of very unlike size, an expert of zeros: without a ridge, too."""
    few = rows(0, 8, WIDTH).repeat(75, 1) * torch.logspace(-4, 1, WIDTH)
    few[300:] = 0
    lost_of_it = 0.05 * rows(1, 600, WIDTH)
    lost_of_it[300:] = 0
    stack = rows(2, EXPERTS, OUT, WIDTH)
    made, wanted = sums(few, few + lost_of_it, (200, 100, 300)), plan(ridge=0.0, pooling=0.0)
    codes, scale = inner._rounded(3, stack, made, wanted, LayerPlan(2), Place())
    assert float((quant.dequantize(codes, scale) - stack).norm()) < 0.4 * float(stack.norm())


def codes(seed: int, *shape: int) -> Codes:
    drawn = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed))
    return Codes(
        drawn.to(torch.int8), torch.full((*shape[:2], 1), 0.05), IntScheme(4, None, "float32", None)
    )


def test_rows_count_as_often_as_guidance_says() -> None:
    """A row that weighs four adds what four of it do; tokens are numbered through the stream."""

    class Weighs:
        def rows(self, path: str, tokens: Tensor, _offsets: Tensor) -> Tensor:
            assert path == names.DOWN
            return torch.where(tokens < 103, 4.0, 1.0)

    gate_up, down = (Stack(codes(n, EXPERTS, *shape)) for n, shape in enumerate(
        ((2 * WIDTH, OUT), (OUT, WIDTH))
    ))  # fmt: skip
    tokens, counts = torch.tensor([0, 1, 4, 2, 3, 5]), (3, 2, 1)
    often = torch.where(tokens < 3, 4, 1)
    found: list[list[Tensor]] = []
    for guided in (True, False):
        copies = torch.ones_like(tokens) if guided else often
        offsets = torch.stack([part.sum() for part in copies.split(counts)]).cumsum(0)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), offsets))
        x, h, y = (
            rows(n, 6, width).repeat_interleave(copies, 0)
            for n, width in enumerate((OUT, WIDTH, OUT))
        )
        guidance = Weighs() if guided else None
        summed = Sums(gate_up, guidance)
        errors = inner.Errors(gate_up, guidance, tried=(down,))
        errors.squares = torch.zeros(2, EXPERTS, dtype=torch.float64)
        for one in (summed, errors):
            one.first_token = 100
            here = tokens.repeat_interleave(copies)
            one.experts(names.GATE_UP, x, offsets, y[:0], here)
            one.experts(names.DOWN, h, offsets, y, here)
        assert summed.gram is not None
        assert summed.cross is not None
        found.append([summed.gram, summed.cross, errors.squares])
    for mine, counted in zip(*found, strict=True):
        torch.testing.assert_close(mine, counted, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def finished(
    glm52: Path, texts: Texts, tmp_path_factory: pytest.TempPathFactory
) -> pipeline.Finished:
    output = tmp_path_factory.mktemp("inner") / "out"
    return pipeline.calibrate(asked(glm52, output, texts, inner=True))[0]


@pytest.fixture(scope="module")
def plain(glm52: Path, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> pipeline.Finished:
    output = tmp_path_factory.mktemp("plain") / "out"
    return pipeline.calibrate(asked(glm52, output, texts))[0]


def asked(source: Path, output: Path, texts: Texts, **steps: Any) -> CalibrateOptions:
    file = output.with_name(f"{output.name}.yaml")
    file.write_text(yaml.safe_dump(recipe(**steps)))
    return CalibrateOptions(
        source, (str(file),), output, data=texts[0], evaluation_data=texts[1], windows=WINDOWS,
        sequence_length=LENGTH, evaluation_windows=2,
    )  # fmt: skip


def lost(source: Path, written: Path, states: States) -> Tensor:
    """|W' g - W h|^2 / |W h|^2 of layer 1's experts on held-out windows, from the files."""
    config: ModelConfig = open_checkpoint(source).config
    weights, made = runnable(open_checkpoint(source).layer(1)), runnable(open_any(written).layer(1))
    squares = torch.zeros(2, config.n_routed_experts, dtype=torch.float64)

    class Measures(Observer):
        def experts(
            self, path: str, x: Tensor, offsets: Tensor, y: Tensor, _tokens: Tensor
        ) -> None:
            bounds = offsets.tolist()
            parts = range(config.n_routed_experts)
            if path == names.GATE_UP:
                matrices = made.matrices[path]
                both = [x[bounds[i] : bounds[i + 1]] @ matrices[i].T for i in parts]
                self.left = [F.silu(b.chunk(2, -1)[0]) * b.chunk(2, -1)[1] for b in both]
                return
            for i in parts:
                wanted = y[bounds[i] : bounds[i + 1]]
                got = self.left[i] @ made.matrices[path][i].T
                squares[0, i] += (got - wanted).double().square().sum()
                squares[1, i] += wanted.double().square().sum()

    forward(config, weights, states, Measures(), range(WINDOWS - HELD_OUT, WINDOWS))
    return squares[0] / squares[1].clamp(min=1e-30)


def test_no_expert_loses_and_some_gain(
    finished: pipeline.Finished, plain: pipeline.Finished, glm52: Path, texts: Texts
) -> None:
    """After both products, against the run without; the first layers of both are equal."""
    source = open_checkpoint(glm52)
    text = load_windows(texts[0], glm52, source.config.vocab_size, LENGTH, WINDOWS, 0).tokens
    states = embed(source, text)
    first = runnable(open_any(plain.checkpoint).layer(0))
    states = advance(source.config, 0, first, states)
    after, before = (lost(glm52, f.checkpoint, states) for f in (finished, plain))
    assert bool((after <= before * 1.0001).all())
    record = finished.run.layers[1].experts
    assert record is not None
    fitted = torch.tensor([method.endswith(inner.METHOD) for method in record.method])
    seen = after > 0  # an expert that no held-out token reached follows the sum
    assert torch.equal((after < before * 0.9999)[seen], fitted[seen])
    fitted &= seen
    assert bool(fitted.any())
    for index in fitted.nonzero().flatten().tolist():
        assert record.error[index] ** 2 == pytest.approx(float(after[index]), rel=1e-3)
    assert float(after.sum()) < 0.99 * float(before.sum())


def test_what_was_written_verifies(finished: pipeline.Finished, glm52: Path) -> None:
    assert [r for r in verify(finished.checkpoint, glm52).rows if r.status == "fail"] == []


def test_an_expert_that_would_lose_keeps_what_it_had(
    plain: pipeline.Finished, glm52: Path, texts: Texts, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Turned the wrong way: no expert takes it, and the files are those of a run without."""
    monkeypatch.setattr(inner, "SHARE", -20.0)
    wrong = pipeline.calibrate(asked(glm52, tmp_path / "out", texts, inner=True))[0]
    assert shards(wrong.checkpoint) == shards(plain.checkpoint)


def test_an_expert_without_held_out_tokens_keeps_what_it_had(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the others gain: half of the experts are made to look unseen."""
    original = inner._taken
    fitted: list[Tensor] = []

    def taken(*given: Any) -> Any:
        fitted.append(given[4])
        return original(*given)

    monkeypatch.setattr(inner, "_taken", taken)
    add = inner.Errors.both

    def blind(self: inner.Errors, *given: Any) -> None:
        add(self, *given)
        self.squares[:, ::2] = 0

    monkeypatch.setattr(inner.Errors, "both", blind)
    pipeline.calibrate(asked(glm52, tmp_path / "out", texts, inner=True))
    assert any(bool(one[1::2].any()) for one in fitted)
    assert not any(bool(one[::2].any()) for one in fitted)


@pytest.mark.parametrize("steps", [{"inner": True}, {"inner": True, "correction": True}])
def test_a_resumed_run_is_byte_equal(
    steps: dict[str, bool],
    finished: pipeline.Finished,
    glm52: Path,
    texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = finished
    if "correction" in steps:
        whole = pipeline.calibrate(asked(glm52, tmp_path / "whole", texts, **steps))[0]
    wanted = asked(glm52, tmp_path / "out", texts, **steps)
    original: Callable[..., object] = run.quantize

    def stops(source: object, layer: Any, *others: object) -> object:
        if layer.number == 3:
            raise KeyboardInterrupt
        return original(source, layer, *others)

    monkeypatch.setattr(run, "quantize", stops)
    with pytest.raises(KeyboardInterrupt):
        pipeline.calibrate(wanted)
    monkeypatch.undo()
    assert pipeline.calibrate(wanted)[0].run.resumed_layers == 3
    assert shards(wanted.output) == shards(whole.checkpoint)
