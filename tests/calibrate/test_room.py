"""Out of device memory a run goes on with less at once, and says so; nothing is lost."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calibrate import candidates, guidance, run, shelf, states, store
from calibrate.block import LayerOutput
from calibrate.evaluate import evaluate
from calibrate.states import States, chunks
from glm5q import pipeline
from glm5q.checkpoint import open_checkpoint
from glm5q.errors import OutputError, UserError
from glm5q.layer import Codes, Layer, runnable
from tests import small
from tests.calibrate.test_run import LENGTH, Texts, options
from tests.runs import edit_recipe


def files(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in output.glob("*.safetensors")}


def room_for(most: int) -> Callable[..., LayerOutput]:
    """One layer's forward on a device whose memory holds `most` tokens at once."""
    original = states.decoder_layer

    def decoder_layer(config, weights, hidden, *rest):  # type: ignore[no-untyped-def]
        if hidden.shape[0] > most:
            raise torch.OutOfMemoryError("planted")
        return original(config, weights, hidden, *rest)

    return decoder_layer


def test_a_forward_without_room_runs_in_smaller_chunks(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run that took such chunks from the start, but for what the record says."""
    most = 3 * LENGTH
    monkeypatch.setattr(states, "FEWEST_CHUNKS", 1)  # or as small as this from the start
    with monkeypatch.context() as patch:
        patch.setattr(states, "CHUNK_TOKENS", most)
        pipeline.calibrate(options(glm52, tmp_path / "small", texts))
    with monkeypatch.context() as patch:
        patch.setattr(states, "CHUNK_TOKENS", 4 * most)
        patch.setattr(states, "decoder_layer", room_for(most))
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
    monkeypatch.setattr(states, "decoder_layer", room_for(0))
    with pytest.raises(UserError, match="smaller --sequence-length"):
        pipeline.calibrate(options(glm52, tmp_path / "out", texts))
    assert not list((tmp_path / "out").glob("*.json"))


def test_one_window_of_evaluation_without_room_is_the_users_to_mend(
    glm52: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "decoder_layer", room_for(0))
    source = open_checkpoint(glm52)
    with pytest.raises(UserError, match=r"layer 0: .*memory is too small for 32 tokens"):
        evaluate(source, source, torch.zeros(4, 32, dtype=torch.int64))


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
    original, files_made = store.Store.file, []

    def file(asked, shape, dtype=torch.float32):  # type: ignore[no-untyped-def]
        made = original(asked, shape, dtype)
        files_made.append(made.nbytes)
        assert not [p for p in asked.folder.iterdir() if p.stat().st_size >= made.nbytes]
        return made

    monkeypatch.setattr(store.Store, "file", file)
    wanted = vars(options(glm52, tmp_path / "memory", texts))
    whole = pipeline.calibrate(pipeline.CalibrateOptions(**wanted))[0]
    assert not files_made
    wanted |= {"output": tmp_path / "out", "hidden_gb": 1e-6}
    finished = pipeline.calibrate(pipeline.CalibrateOptions(**wanted))[0]
    layers = len(finished.run.layers)
    assert len(files_made) >= layers
    assert files(tmp_path / "out") == files(tmp_path / "memory")
    assert "hidden states lay in files" in finished.run.notes[-1]
    assert whole.run.notes == []


@pytest.mark.parametrize(("layers", "in_files"), [(2.5, True), (7, True), (20, False)])
def test_all_streams_keep_to_the_limit_together(
    layers: float,
    in_files: bool,
    glm52: Path,
    texts: Texts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The quantized stream's states, the source's own, and guidance's, its inputs, its gradient."""
    held, most, filed = 0, 0, 0
    original = states.room

    def gone(size: int) -> None:
        nonlocal held
        held -= size

    def room(shape, device, asked=store.IN_MEMORY, *rest):  # type: ignore[no-untyped-def]
        nonlocal held, most, filed
        made = original(shape, device, asked, *rest)
        if not asked.takes(made.nbytes):
            filed += 1
            return made
        held += made.nbytes
        most = max(most, held)
        weakref.finalize(made, gone, made.nbytes)
        return made

    for module in (states, guidance, shelf):
        monkeypatch.setattr(module, "room", room)
    one = 24 * LENGTH * small.GLM52["hidden_size"] * 4
    asked = vars(asking(glm52, tmp_path / "out", texts, correction=True, guidance=True))
    asked |= {"hidden_gb": layers * one / 1e9}
    pipeline.calibrate(pipeline.CalibrateOptions(**asked))
    assert most <= layers * one
    assert (filed > 0) == in_files


def test_guidance_without_room_runs_in_smaller_chunks(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 3 * LENGTH
    monkeypatch.setattr(states, "FEWEST_CHUNKS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(states, "CHUNK_TOKENS", most)
        pipeline.calibrate(asking(glm52, tmp_path / "small", texts, guidance=True))
    monkeypatch.setattr(states, "CHUNK_TOKENS", 4 * most)
    monkeypatch.setattr(states, "decoder_layer", room_for(most))
    asked = asking(glm52, tmp_path / "out", texts, guidance=True)
    finished = pipeline.calibrate(replace(asked, evaluation_windows=8))[0]
    assert files(tmp_path / "out") == files(tmp_path / "small")
    said = [f for f in finished.run.fallbacks if "memory" in f.reason]
    assert [(f.layer, f.module) for f in said] == [(0, "guidance")] * 2 + [(0, "forward")] * 2
    notes = [note for note in finished.run.notes if note.startswith("evaluation, layer 0")]
    assert notes
    assert f"device out of memory, chunks of {2 * LENGTH} tokens" in notes[-1]


def asking(source: Path, output: Path, texts: Texts, **steps: bool) -> pipeline.CalibrateOptions:
    """`h200` whose effort `fast` has these steps too."""
    found = options(source, output, texts)
    edit_recipe(found.recipes[0], lambda raw: raw["efforts"]["fast"].update(descent=1, **steps))
    return found


def test_a_layer_that_shares_its_choices_hands_on_those_there_are(glm52: Path) -> None:
    """On a GPU each would be copied to the host again: 8.6 GB for a million tokens."""
    source = open_checkpoint(glm52)
    sharing = source.config.full_indexer.index(False)
    tokens = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    found = [states.embed(source, tokens)]
    for number in range(sharing + 1):
        weights = runnable(source.layer(number))
        found.append(states.advance(source.config, number, weights, found[-1]))
    before, after = found[-2:]
    assert before.indices is not None
    kept = source.config.full_indexer[sharing + 1 : sharing + 2] == (False,)
    assert after.indices is (before.indices if kept else None)


def test_no_space_for_hidden_states_is_the_users_to_mend(
    glm52: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    asked = vars(options(glm52, tmp_path / "out", texts)) | {"hidden_gb": 1e-6}
    with pytest.raises(OutputError, match="no space left"):
        pipeline.calibrate(pipeline.CalibrateOptions(**asked))


def test_inputs_that_a_disk_has_no_room_for_are_refused_at_once(tmp_path: Path) -> None:
    """Guidance's, a thousand layers of which are more than any disk has."""
    layer = states.States(torch.zeros(1).expand(1 << 30, 64, 8), store=store.Store(0, tmp_path))
    inputs = shelf.Shelf(1000, store.Store(2 * layer.hidden.nbytes, tmp_path))
    with pytest.raises(OutputError, match=r"GB free, and 2\.2e\+06 GB of hidden states would lie"):
        inputs.put(layer)


def test_halved_states_keep_their_indices() -> None:
    """Ten windows of four tokens in chunks of three become chunks of two, then of one."""
    indices = torch.arange(10 * 4 * 2).view(-1, 2)
    whole = States(torch.zeros(10, 4, 8), indices.split(3 * 4), chunk_tokens=3 * 4)
    halved = whole.halved()
    assert halved.windows_at_once == 2
    halved = halved.halved()
    assert halved.windows_at_once == 1
    assert halved.indices is not None
    for number, windows in chunks(halved):
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
    assert [(f.layer, f.action) for f in found.fallbacks] == [(1, f"chunks of {4 * LENGTH} tokens")]
    assert torch.allclose(found.token_kl, whole.token_kl, rtol=1e-3, atol=1e-5)
    assert len(found.layers) == len(whole.layers)
    for mine, theirs in zip(found.layers, whole.layers, strict=True):
        assert mine.hidden_error == pytest.approx(theirs.hidden_error, rel=1e-4)
        agreed = theirs.router_agreement or 0.0  # None without experts
        assert (mine.router_agreement or 0.0) == pytest.approx(agreed, rel=1e-3)
