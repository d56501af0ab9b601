"""Experts corrected for what earlier layers' rounding made of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from torch import Tensor

from calibrate import correction, run
from calibrate.block import Observer
from calibrate.correction import Inputs, Streams, corrected, least_squares, with_change
from calibrate.data import load_windows
from calibrate.job import Job, Place
from calibrate.ranks import ALONE
from calibrate.states import States, advance, embed, forward
from glm5q import names, pipeline
from glm5q.checkpoint import open_checkpoint
from glm5q.config import ModelConfig
from glm5q.errors import RecipeError
from glm5q.formats.quantized import open_any
from glm5q.layer import Layer, Weights, runnable
from glm5q.pipeline import CalibrateOptions
from glm5q.verify import verify
from recipes import files
from tests.calibrate.test_ranks import shards

WIDTH, OUT, EXPERTS, LENGTH = 24, 16, 5, 64
Texts = tuple[Path, Path]


def rows(seed: int, count: int = 400) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def sums(x: Tensor, y: Tensor) -> Inputs:
    """In two parts, as chunks come."""
    found = Inputs.none(WIDTH, "cpu")
    for part in (slice(0, 150), slice(150, None)):
        found.add(x[part], y[part])
    return found.of_all(ALONE)


def recipe(**steps: Any) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(files.text("a100"))
    wanted = {"descent": 1, "guidance": False} | steps
    raw |= {"name": "small", "mtp": "quantize", "efforts": {"fast": wanted, "best": wanted}}
    return raw


def job() -> Job:
    """One that has a recipe and nothing to write."""
    wanted = files.validated(recipe(correction=True), "x")
    return Job(wanted, cast(Any, None), cast(Any, None), cast(Any, None))


def layer() -> tuple[Layer, Tensor]:
    generator = torch.Generator().manual_seed(9)
    stack = torch.randn(EXPERTS, OUT, WIDTH, generator=generator)
    return Layer(3, {}, {names.GATE_UP: stack}), stack


def test_streams_that_are_equal_change_nothing() -> None:
    x = rows(0)
    before, _ = layer()
    after, taken = corrected(before, Streams(sums(x, x), sums(x, x)), job(), Place())
    assert after is before
    assert taken is None


def test_a_planted_linear_loss_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """y = x (I + M) exactly: W' x is then W y, whatever the tokens."""
    monkeypatch.setattr(correction, "RIDGE", 0.0)
    planted = 0.1 * rows(1, WIDTH)
    x, held, other = rows(2), rows(3, 60), rows(4, 40)
    lost = Streams(sums(x, x + x @ planted), sums(held, held + held @ planted))
    before, stack = layer()
    owner = job()
    after, taken = corrected(before, lost, owner, Place())
    weight = after.matrices[names.GATE_UP]
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(
        torch.einsum("ti,eoi->eto", other, weight),
        torch.einsum("ti,eoi->eto", other + other @ planted, stack),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    assert taken == pytest.approx(1, abs=1e-5)
    assert not owner.fallbacks


@pytest.mark.parametrize(("size", "wanted"), [(0.5, 0.5), (0.2, 0.2), (3.0, 1.0)])
def test_held_out_windows_say_how_much(
    size: float, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lost `size` times what the others did; never more than all is made up for."""
    monkeypatch.setattr(correction, "RIDGE", 0.0)
    planted, x = 0.1 * rows(1, WIDTH), rows(2)
    lost = Streams(sums(x, x + x @ planted), sums(x, x + size * x @ planted))
    before, stack = layer()
    after, taken = corrected(before, lost, job(), Place())
    expected = stack + wanted * stack @ planted.T
    torch.testing.assert_close(after.matrices[names.GATE_UP], expected, rtol=1e-4, atol=1e-4)
    assert taken == pytest.approx(1 - ((size - wanted) / size) ** 2, abs=1e-5)


def test_what_does_not_help_held_out_windows_is_left_out_and_said() -> None:
    planted, x, held = 0.1 * rows(1, WIDTH), rows(2), rows(3)
    lost = Streams(sums(x, x + x @ planted), sums(held, held - held @ planted))
    before, _ = layer()
    owner = job()
    after, taken = corrected(before, lost, owner, Place())
    assert after is before
    assert taken is None
    assert [(f.layer, f.module, f.reason) for f in owner.fallbacks] == [
        (3, names.GATE_UP, correction.REASON)
    ]


def test_noise_is_damped() -> None:
    """y and noise of the same size in every direction: x y'/(x'x) is a half."""
    y, noise = rows(5, 40000), rows(6, 40000)
    found = least_squares(sums(y + noise, y))
    assert float(found.diagonal().mean()) == pytest.approx(-0.5 / (1 + correction.RIDGE), abs=0.02)


def test_what_is_taken_is_what_the_rows_say() -> None:
    """And no other share takes more."""
    x, y = rows(7), rows(7) + 0.3 * rows(8)
    change = 2 * least_squares(sums(x, y))
    share, taken = sums(x, y).best_share(change)
    tried = [(y - x - s * x @ change).square().sum() for s in (share, share - 0.05, share + 0.05)]
    assert tried[0] == min(tried)
    assert taken == pytest.approx(1 - float(tried[0] / (y - x).square().sum()), rel=1e-4)


def test_a_stack_is_changed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correction, "AT_ONCE", 2)
    _, stack = layer()
    change = 0.1 * rows(1, WIDTH)
    made = with_change(stack, change, torch.bfloat16)
    assert made.dtype == torch.bfloat16
    expected = stack + stack @ change.T
    torch.testing.assert_close(made.float(), expected, rtol=1e-2, atol=1e-2)


def test_a_number_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"efforts\.fast\.correction"):
        files.validated(recipe(correction=0.5), "x")


def asked(source: Path, output: Path, texts: Texts, **steps: Any) -> CalibrateOptions:
    file = output.with_name(f"{output.name}.yaml")
    file.write_text(yaml.safe_dump(recipe(**steps)))
    return CalibrateOptions(
        source, (str(file),), output, data=texts[0], evaluation_data=texts[1], windows=24,
        sequence_length=LENGTH, evaluation_windows=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(
    glm52: Path, texts: Texts, tmp_path_factory: pytest.TempPathFactory
) -> pipeline.Finished:
    output = tmp_path_factory.mktemp("corrected") / "out"
    return pipeline.calibrate(asked(glm52, output, texts, correction=True))[0]


def test_the_record_says_how_much_was_taken_back(
    finished: pipeline.Finished, glm52: Path, texts: Texts
) -> None:
    """Both streams walked again, the source's and what was written."""
    source, written = open_checkpoint(glm52), open_any(finished.checkpoint)
    text = run_text(glm52, texts)
    streams = [embed(source, text), embed(source, text)]
    found = [layer.correction for layer in finished.run.layers]
    compared = 0
    kinds = [layer.kind for layer in finished.run.layers]
    assert kinds == ["dense", "moe", "moe", "moe", "moe", "mtp"]
    assert found[0] is None
    for layer in finished.run.layers:
        methods = {matrix.module: matrix.method.split("+") for matrix in layer.matrices}
        said = {module for module, each in methods.items() if "correction" in each}
        assert said == ({names.GATE_UP} if layer.correction is not None else set())
    for number in range(1, source.config.num_hidden_layers):
        before = number - 1
        weights = runnable(source.layer(before)), runnable(written.layer(before))
        streams = [
            advance(source.config, before, w, s) for w, s in zip(weights, streams, strict=True)
        ]
        y, x = (
            routed(source.config, runnable(source.layer(number)), s).view(len(text), LENGTH, -1)
            for s in streams
        )
        change = least(x[:-2].flatten(0, 1), y[:-2].flatten(0, 1))
        held, missing = x[-2:].flatten(0, 1), (y - x)[-2:].flatten(0, 1)
        step = (held @ change).flatten()
        share = float(missing.flatten() @ step / step.square().sum())
        left = (missing - min(1, share) * held @ change).square().sum()
        expected = 1 - float(left / missing.square().sum())
        compared += share > 0
        if share > 0:
            assert found[number] == pytest.approx(expected, rel=0.02)
    assert compared


def least(x: Tensor, y: Tensor) -> Tensor:
    """Ridge regression by another routine, in float64."""
    x, y = x.double(), y.double()
    ridge = (correction.RIDGE * x.square().sum() / x.shape[1]).sqrt()
    rows_added = ridge * torch.eye(x.shape[1], dtype=torch.float64)
    stacked = torch.cat((x, rows_added)), torch.cat((y - x, torch.zeros_like(rows_added)))
    solution: Tensor = torch.linalg.lstsq(*stacked).solution
    return solution.float()


def routed(config: ModelConfig, weights: Weights, states: States) -> Tensor:
    """What the router reads in a whole forward [tokens, hidden]."""
    seen: list[Tensor] = []

    class Reads(Observer):
        def linear(self, path: str, x: Tensor, _y: Tensor) -> None:
            if path == "mlp.gate":
                seen.append(x)

    forward(config, weights, states, Reads())
    return torch.cat(seen)


def run_text(glm52: Path, texts: Texts) -> Tensor:
    vocabulary = open_checkpoint(glm52).config.vocab_size
    return load_windows(texts[0], glm52, vocabulary, LENGTH, 24, 0).tokens


def test_what_was_written_verifies(finished: pipeline.Finished, glm52: Path) -> None:
    """Its weight errors too, which are from the source and not from what was corrected."""
    assert [r for r in verify(finished.checkpoint, glm52).rows if r.status == "fail"] == []


def test_codes_differ_from_those_without(
    finished: pipeline.Finished, glm52: Path, texts: Texts, tmp_path: Path
) -> None:
    plain = pipeline.calibrate(asked(glm52, tmp_path / "out", texts))[0]
    assert all(layer.correction is None for layer in plain.run.layers)
    one, two = (open_any(f.checkpoint).layer(2).matrices for f in (finished, plain))
    assert not torch.equal(codes(one[names.GATE_UP]), codes(two[names.GATE_UP]))
    assert torch.equal(one["mlp.gate"], two["mlp.gate"])  # type: ignore[arg-type]


def codes(matrix: Any) -> Tensor:
    found: Tensor = matrix.codes
    return found


def test_a_resumed_run_is_byte_equal(
    finished: pipeline.Finished,
    glm52: Path,
    texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped in the fourth layer: the source's stream has gone through the others too."""
    wanted = asked(glm52, tmp_path / "out", texts, correction=True)
    original: Callable[..., object] = run.quantize

    def stops(source: object, layer: Layer, *others: object) -> object:
        if layer.number == 3:
            raise KeyboardInterrupt
        return original(source, layer, *others)

    monkeypatch.setattr(run, "quantize", stops)
    with pytest.raises(KeyboardInterrupt):
        pipeline.calibrate(wanted)
    monkeypatch.undo()
    resumed = pipeline.calibrate(wanted)[0].run
    assert resumed.resumed_layers == 3
    assert [one.correction for one in resumed.layers] == [
        one.correction for one in finished.run.layers
    ]
    assert shards(wanted.output) == shards(finished.checkpoint)
