"""What the loop promises: which windows go where, the best candidate, the deployed stream."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from calibrate.data import load_windows
from calibrate.observe import HeldOutErrors, Statistics
from calibrate.states import States, advance, embed, forward
from glm5q import names, pipeline, quant
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.formats.quantized import open_any
from glm5q.layer import Codes, runnable
from recipes import files
from tests.runs import edit_recipe

LENGTH, WINDOWS, HELD_OUT = 64, 24, 2
Texts = tuple[Path, Path]


def options(
    source: Path, output: Path, texts: Texts, effort: str = "fast"
) -> pipeline.CalibrateOptions:
    """`h200` on text as it is: nothing is topped up, so `best` has its guidance."""
    raw = yaml.safe_load(files.text("h200"))
    raw["efforts"]["best"].pop("top_up")
    recipe = output.with_name(f"{output.name}.yaml")
    recipe.write_text(yaml.safe_dump(raw))
    return pipeline.CalibrateOptions(
        source=source,
        recipes=(str(recipe),),
        output=output,
        data=texts[0],
        evaluation_data=texts[1],
        windows=WINDOWS,
        sequence_length=LENGTH,
        evaluation_windows=2,
        effort=effort,  # type: ignore[arg-type]
    )


def test_windows_for_statistics_and_for_choice_are_apart(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {"statistics": set(), "errors": set()}
    for kind, watcher in (("statistics", Statistics), ("errors", HeldOutErrors)):
        original = watcher.linear

        def linear(self, path, x, y, kind=kind, original=original):  # type: ignore[no-untyped-def]
            rows = range(self.first_token, self.first_token + x.shape[0])
            whole = x.shape[0] % LENGTH == 0  # the MTP layer's windows are one token shorter
            if path.endswith("q_a_proj") and whole:
                seen[kind] |= {row // LENGTH for row in rows}
            original(self, path, x, y)

        monkeypatch.setattr(watcher, "linear", linear)
    pipeline.calibrate(options(glm52, tmp_path / "out", texts))
    split = WINDOWS - HELD_OUT
    assert seen["statistics"] == set(range(split))
    assert seen["errors"] == set(range(split, WINDOWS))


@pytest.fixture(scope="module", params=["fast", "best"])
def finished(
    request: pytest.FixtureRequest,
    glm52: Path,
    texts: Texts,
    tmp_path_factory: pytest.TempPathFactory,
) -> pipeline.Finished:
    output = tmp_path_factory.mktemp("loop") / "out"
    return pipeline.calibrate(options(glm52, output, texts, request.param))[0]


def embedded(source: Checkpoint, texts: Texts) -> States:
    """What the run's first layer was given."""
    vocabulary = source.config.vocab_size
    windows = load_windows(texts[0], source.root, vocabulary, LENGTH, WINDOWS, 0)
    return embed(source, windows.tokens)


def test_record_is_of_the_stream_that_was_written(
    finished: pipeline.Finished, glm52: Path, texts: Texts
) -> None:
    """Each layer's update error and each matrix's output error, walked again from the files."""
    source, written = open_checkpoint(glm52), open_any(finished.checkpoint)
    config, states = source.config, embedded(source, texts)
    for number in range(config.num_hidden_layers):
        before = states.hidden[-HELD_OUT:]
        exact = advance(config, number, runnable(source.layer(number)), states)
        states = advance(config, number, runnable(written.layer(number)), states)
        reference = exact.hidden[-HELD_OUT:]
        error = (states.hidden[-HELD_OUT:] - reference).norm() / (reference - before).norm()
        assert finished.run.layers[number].error == pytest.approx(float(error), rel=1e-3)


def test_choice_is_at_least_as_good_as_rounding(
    finished: pipeline.Finished, glm52: Path, texts: Texts
) -> None:
    """On the held-out tokens, the written gate and up projections lose less than plain rounding."""
    source, written = open_checkpoint(glm52), open_any(finished.checkpoint)
    config, states = source.config, embedded(source, texts)
    states = advance(config, 0, runnable(written.layer(0)), states)
    exact, coded = source.layer(1), written.layer(1).matrices[names.GATE_UP]
    weights = runnable(exact)
    assert isinstance(coded, Codes)
    original = weights.matrices[names.GATE_UP]
    scale = quant.round_scale(quant.absmax_scale(original, coded.scheme), coded.scheme)
    plain = quant.dequantize(quant.quantize(original, scale, coded.scheme), scale)
    chosen = quant.dequantize(coded.codes, coded.scale)
    errors = HeldOutErrors(
        {names.GATE_UP: {"plain": plain, "chosen": chosen}}, {names.GATE_UP: "fp8"}
    )
    held = range(WINDOWS - HELD_OUT, WINDOWS)
    forward(config, weights, states, errors, held)
    total = {k: float(v.sum()) for (_, k), v in errors.squared.items()}
    assert total["chosen"] < 0.95 * total["plain"]
    recorded = next(m for m in finished.run.layers[1].matrices if m.module == names.GATE_UP)
    found = (total["chosen"] / float(errors.reference[names.GATE_UP].sum())) ** 0.5
    assert recorded.error == pytest.approx(found, rel=0.1)  # guidance weighs its tokens


def test_guidance_reaches_the_statistics(
    glm5: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come with the stream's own token numbers, over several windows and chunks."""
    monkeypatch.setattr("calibrate.states.CHUNK_TOKENS", 3 * LENGTH)
    from calibrate.guidance import Guidance

    asked: list[Tensor] = []
    original = Guidance.rows

    def rows(self: Guidance, path: str, tokens: Tensor, offsets: Tensor) -> Tensor:
        asked.append(tokens)
        return original(self, path, tokens, offsets)

    monkeypatch.setattr(Guidance, "rows", rows)
    wanted = options(glm5, tmp_path / "best", texts, "best")
    edit_recipe(  # nothing else differs
        wanted.recipes[0],
        lambda raw: raw["efforts"].update(best=raw["efforts"]["fast"] | {"guidance": True}),
    )
    best = pipeline.calibrate(wanted)[0]
    monkeypatch.undo()
    fast = pipeline.calibrate(options(glm5, tmp_path / "fast", texts))[0]
    assert set(torch.cat(asked).tolist()) == set(range(WINDOWS * LENGTH))
    mine, theirs = (open_any(one.checkpoint).layer(1).matrices[names.DOWN] for one in (best, fast))
    assert isinstance(mine, Codes)
    assert isinstance(theirs, Codes)
    assert not torch.equal(mine.codes, theirs.codes)
