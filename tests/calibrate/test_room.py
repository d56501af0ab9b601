"""Out of device memory a run goes on with less at once, and says so; nothing is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from calibrate import candidates, run, shares, states
from calibrate.evaluate import evaluate
from glm5q import pipeline
from glm5q.checkpoint import open_checkpoint
from glm5q.errors import OutputError, UserError
from glm5q.layer import Codes, Layer
from tests import small
from tests.calibrate.test_run import LENGTH, Texts, options


def files(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in output.glob("*.safetensors")}


def test_a_forward_without_room_runs_in_smaller_chunks(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run that took such chunks from the start, but for what the record says."""
    original = states.decoder_layer
    most = 3 * LENGTH
    monkeypatch.setattr(states, "FEWEST_CHUNKS", 1)  # or as small as this from the start

    def decoder_layer(config, weights, hidden, *rest):  # type: ignore[no-untyped-def]
        if hidden.shape[0] > most:
            raise torch.OutOfMemoryError("planted")
        return original(config, weights, hidden, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(states, "CHUNK_TOKENS", most)
        pipeline.calibrate(options(glm52, tmp_path / "small", texts))
    with monkeypatch.context() as patch:
        patch.setattr(states, "CHUNK_TOKENS", 4 * most)
        patch.setattr(states, "decoder_layer", decoder_layer)
        finished = pipeline.calibrate(options(glm52, tmp_path / "out", texts))[0]
    said = [f for layer in finished.run.layers for f in layer.fallbacks if "memory" in f.reason]
    assert [(f.layer, f.action) for f in said] == [
        (0, f"chunks of {2 * most} tokens"),
        (0, f"chunks of {most} tokens"),
    ]
    assert files(tmp_path / "out") == files(tmp_path / "small")


def test_one_window_without_room_is_the_users_to_mend(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoder_layer(*_arguments):  # type: ignore[no-untyped-def]
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(states, "decoder_layer", decoder_layer)
    with pytest.raises(UserError, match="smaller --sequence-length"):
        pipeline.calibrate(options(glm52, tmp_path / "out", texts))
    assert not list((tmp_path / "out").glob("*.json"))


def test_rounding_without_room_takes_fewer_matrices(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = candidates._try

    def one_or_two(weight, *rest):  # type: ignore[no-untyped-def]
        if len(weight) > 2:
            raise torch.OutOfMemoryError("planted")
        return original(weight, *rest)

    pipeline.calibrate(options(glm52, tmp_path / "all", texts))
    monkeypatch.setattr(candidates, "_try", one_or_two)
    finished = pipeline.calibrate(options(glm52, tmp_path / "out", texts))[0]
    said = [f for layer in finished.run.layers for f in layer.fallbacks if "memory" in f.reason]
    assert {f.action for f in said} == {"4 matrices rounded at once", "2 matrices rounded at once"}
    assert files(tmp_path / "out") == files(tmp_path / "all")


@pytest.mark.parametrize("recipe", ["h200", "h200-sglang", "atlas-800t-a3"])
def test_what_a_gpu_moves_on_with_is_what_was_written(
    recipe: str, glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's run does not read its layers back; here both are at hand."""
    original = run._write_layer
    compared = 0

    def write_layer(source, quantized: Layer, job, place):  # type: ignore[no-untyped-def]
        nonlocal compared
        written, landing = original(source, quantized, job, place)
        for path, matrix in quantized.matrices.items():
            other = written.matrices[path]
            if isinstance(matrix, Codes):
                assert isinstance(other, Codes)
                assert torch.equal(matrix.codes, other.codes)
                assert torch.equal(matrix.scale, other.scale)
                assert matrix.activation() == other.activation()
                compared += 1
            else:
                assert isinstance(other, torch.Tensor)
                assert torch.equal(matrix.float(), other.float())
        return written, landing

    monkeypatch.setattr(run, "_write_layer", write_layer)
    asked = options(glm52, tmp_path / "out", texts)
    pipeline.calibrate(pipeline.CalibrateOptions(**{**vars(asked), "recipes": (recipe,)}))
    assert compared > 5


def test_hidden_states_past_the_limit_lie_in_files(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes are written, no file is left, and the record says where they lay."""
    original, files_made = shares.Store.file, []

    def file(store, shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        made = original(store, shape, dtype)
        files_made.append(made.nbytes)
        assert not [p for p in store.folder.iterdir() if p.stat().st_size >= made.nbytes]
        return made

    monkeypatch.setattr(shares.Store, "file", file)
    asked = vars(options(glm52, tmp_path / "memory", texts))
    whole = pipeline.calibrate(pipeline.CalibrateOptions(**asked))[0]
    assert not files_made
    asked |= {"output": tmp_path / "out", "hidden_gb": 1e-6}
    finished = pipeline.calibrate(pipeline.CalibrateOptions(**asked))[0]
    layers = len(finished.run.layers)
    assert len(files_made) >= layers
    assert files(tmp_path / "out") == files(tmp_path / "memory")
    assert "hidden states lay in files" in finished.run.notes[-1]
    assert whole.run.notes == []


def test_no_space_for_hidden_states_is_the_users_to_mend(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    asked = vars(options(glm52, tmp_path / "out", texts)) | {"hidden_gb": 1e-6}
    with pytest.raises(OutputError, match="no space left"):
        pipeline.calibrate(pipeline.CalibrateOptions(**asked))


def test_halved_states_keep_their_indices() -> None:
    """Ten windows of four tokens in chunks of three become chunks of two, then of one."""
    indices = torch.arange(10 * 4 * 2).view(-1, 2)
    whole = run.States(torch.zeros(10, 4, 8), indices.split(3 * 4), chunk_tokens=3 * 4)
    halved = whole.halved()
    assert halved.windows_at_once == 2
    halved = halved.halved()
    assert halved.windows_at_once == 1
    assert halved.indices is not None
    for number, windows in run.chunks(halved):
        rows = slice(windows.start * 4, windows.stop * 4)
        assert torch.equal(halved.indices[number], indices[rows])


def test_evaluating_without_room_runs_in_smaller_chunks(
    glm52: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a layer too: the stream that had moved on is not moved twice."""
    source = open_checkpoint(glm52)
    other = open_checkpoint(small.write_checkpoint(tmp_path / "other", small.GLM52, seed=1))
    tokens = torch.randint(0, 256, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    original = states.decoder_layer
    calls = 0

    def decoder_layer(config, weights, hidden, *rest):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += hidden.shape[0] == 8 * LENGTH
        if hidden.shape[0] == 8 * LENGTH and calls == 4:  # layer 1, the second stream
            raise torch.OutOfMemoryError("planted")
        return original(config, weights, hidden, *rest)

    monkeypatch.setattr(states, "CHUNK_TOKENS", 8 * LENGTH)
    whole = evaluate(source, other, tokens)
    monkeypatch.setattr(states, "decoder_layer", decoder_layer)
    found = evaluate(source, other, tokens)
    assert calls == 4
    assert torch.allclose(found.token_kl, whole.token_kl, rtol=1e-3, atol=1e-5)
    assert len(found.layers) == len(whole.layers)
    for mine, theirs in zip(found.layers, whole.layers, strict=True):
        assert mine.hidden_error == pytest.approx(theirs.hidden_error, rel=1e-4)
        agreed = theirs.router_agreement or 0.0  # None without experts
        assert (mine.router_agreement or 0.0) == pytest.approx(agreed, rel=1e-3)
