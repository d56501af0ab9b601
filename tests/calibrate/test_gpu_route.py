"""A GPU's route through the loop: bfloat16 matrices, no reading back, shards written on a thread.

Walked on this CPU; what only a GPU has (its copies, its kernels) is stood in for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calibrate import run
from calibrate.job import Place
from glm5q import pipeline
from glm5q.checkpoint import Checkpoint
from glm5q.errors import OutputError
from glm5q.layer import Layer
from glm5q.writer import Writer
from tests.calibrate.test_run import Texts, options


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Checkpoint.layer

    def layer(self: Checkpoint, number: int, pin: bool = False) -> Layer:  # noqa: ARG001
        return original(self, number)

    monkeypatch.setattr(Place, "on_gpu", property(lambda _place: True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Checkpoint, "layer", layer)


def files(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in output.glob("*.safetensors")}


def stop_before(number: int, asked: pipeline.CalibrateOptions) -> None:
    """Runs until layer `number`, and is interrupted there."""
    original = run.one_layer

    def one_layer(source, layer: Layer, *rest):  # type: ignore[no-untyped-def]
        if layer.number == number:
            raise KeyboardInterrupt
        original(source, layer, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "one_layer", one_layer)
        with pytest.raises(KeyboardInterrupt):
            pipeline.calibrate(asked)


@pytest.fixture
def whole(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pipeline.Finished:
    with monkeypatch.context() as patch:
        patch.setattr(run, "read_back", None)  # nothing is read while all is at hand
        return pipeline.calibrate(options(glm52, tmp_path / "whole", texts))[0]


def test_a_resumed_run_reads_back_what_the_other_had_at_hand(
    whole: pipeline.Finished,
    glm52: Path,
    texts: Texts,
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    stop_before(3, options(glm52, output, texts))
    resumed = pipeline.calibrate(options(glm52, output, texts))[0]
    assert resumed.run.resumed_layers == 3
    assert files(output) == files(whole.checkpoint)
    assert [layer.error for layer in resumed.run.layers] == [
        layer.error for layer in whole.run.layers
    ]


def test_a_failed_write_ends_the_run_and_finished_layers_stay(
    whole: pipeline.Finished,
    glm52: Path,
    texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, output = Writer.write, tmp_path / "out"

    def write(self: Writer, number: int, tensors):  # type: ignore[no-untyped-def]
        if number == 3:
            raise OutputError("planted: no space left")
        return original(self, number, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", write)
        with pytest.raises(OutputError, match="planted"):
            pipeline.calibrate(options(glm52, output, texts))
    assert len(files(output)) == 3
    resumed = pipeline.calibrate(options(glm52, output, texts))[0]
    assert resumed.run.resumed_layers == 2
    assert files(output) == files(whole.checkpoint)
