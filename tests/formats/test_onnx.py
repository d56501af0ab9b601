"""The ONNX export: checked, run in ONNX Runtime, and equal to the quantized stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx", reason="not run: the onnx extra is not installed")
runtime = pytest.importorskip("onnxruntime", reason="not run: onnxruntime is not installed")

from calibrate.block import LayerOutput  # noqa: E402
from calibrate.states import States, advance, embed, forward  # noqa: E402
from glm5q.formats import onnx_graph  # noqa: E402
from glm5q.formats.export import open_ours  # noqa: E402
from glm5q.formats.quantized import QuantizedCheckpoint  # noqa: E402
from glm5q.layer import runnable  # noqa: E402
from glm5q.verify import verify  # noqa: E402
from tests import outputs  # noqa: E402
from tests.commands import refused, run  # noqa: E402

TOKENS = 48
RECIPES = ("cpu", "atlas-800t-a3", "h200")


def export(recipe: str, output: Path, *arguments: str) -> Path:
    folder = outputs.quantized(recipe)
    result = run("export", folder, "--format", "onnx", "--output", output, *arguments)
    assert result.exit_code == 0, result.exception or result.output
    return output


def session(folder: Path) -> Any:
    path = str(folder / "model.onnx")
    return runtime.InferenceSession(path, providers=["CPUExecutionProvider"])


def tokens() -> Tensor:
    return torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def stream(checkpoint: QuantizedCheckpoint, layers: int) -> States:
    """Returns our stream's states before layer `layers`."""
    states = embed(checkpoint, tokens())
    for number in range(layers):
        weights = runnable(checkpoint.layer(number))
        states = advance(checkpoint.config, number, weights, states)
    return states


def mask(indices: Tensor) -> Tensor:
    """Chosen positions int32 [queries, topk], -1 for none, as bool [queries, keys]."""
    chosen = torch.zeros(TOKENS, TOKENS + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(indices < 0, TOKENS, indices).long(), True)
    return chosen[:, :TOKENS]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_equals_the_stream(recipe: str, number: int, tmp_path: Path) -> None:
    """Dense and mixture, to float32's noise.

    A rare activation on a rounding boundary goes the other way, and so do the tokens that attend to
    it: by one int8 step, in a few rows.
    """
    checkpoint = open_ours(outputs.quantized(recipe))
    states = stream(checkpoint, number)
    found: list[LayerOutput] = []
    weights = runnable(checkpoint.layer(number))
    forward(checkpoint.config, weights, states, each=lambda _, out: found.append(out))
    folder = export(recipe, tmp_path / "onnx", "--layers", str(number))
    hidden, selected = session(folder).run(
        ["hidden_out", f"selected_{number}"], {"hidden": states.hidden[0].numpy()}
    )
    assert torch.equal(torch.from_numpy(selected), mask(found[0].indices))
    difference = (torch.from_numpy(hidden) - found[0].hidden).abs().amax(-1)
    assert float((difference < 1e-4).float().mean()) > 0.75
    assert float(difference.median()) < 1e-5
    assert float(difference.max()) < 0.2


def test_the_whole_model_follows_the_stream(tmp_path: Path) -> None:
    """Random weights amplify a flipped rounding layer by layer: the median tells, not the max."""
    checkpoint = open_ours(outputs.quantized("atlas-800t-a3"))
    config = checkpoint.config
    hidden = stream(checkpoint, config.num_hidden_layers).hidden[0]
    norm = checkpoint.top_tensor("model.norm.weight").float()
    normed = torch.nn.functional.rms_norm(hidden, norm.shape, norm, config.rms_norm_eps)
    wanted = normed @ checkpoint.top_tensor("lm_head.weight").float().t()
    folder = export("atlas-800t-a3", tmp_path / "onnx")
    logits = torch.from_numpy(
        session(folder).run(["logits"], {"input_ids": tokens()[0].numpy()})[0]
    )
    assert float((logits - wanted).abs().amax(-1).median()) < 1e-3
    assert float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.9


@pytest.mark.parametrize("recipe", RECIPES)
def test_verifies(recipe: str, tmp_path: Path) -> None:
    report = verify(export(recipe, tmp_path / "onnx"), outputs.source())
    assert {row.check: row.detail for row in report.rows if row.status != "ok"} == {}
    assert report.format == "onnx"


def test_shared_indexer_takes_its_layer_along(tmp_path: Path) -> None:
    folder = export("cpu", tmp_path / "onnx", "--layers", "1-2")
    names = [output.name for output in session(folder).get_outputs()]
    assert names == ["selected_1", "hidden_out"]
    assert json.loads((folder / "config.json").read_text())["glm5q_onnx_layers"] == [1, 2]
    out = tmp_path / "alone"
    common = ("export", outputs.quantized("cpu"), "--format", "onnx", "--output", out, "--layers")
    refused(*common, "2", says=("layer 1's indexer", "add 1"))
    refused(*common, "7", says=("not all are decoder layers",))
    refused(*common, "x", says=("not layer numbers",))


def failed(folder: Path) -> set[str]:
    return {row.check for row in verify(folder, outputs.source()).rows if row.status == "fail"}


def test_shortened_data_and_a_changed_weight_are_found(tmp_path: Path) -> None:
    folder = export("cpu", tmp_path / "onnx")
    data = folder / onnx_graph.DATA
    raw = bytearray(data.read_bytes())
    middle = len(raw) // 2
    raw[middle : middle + 20000] = bytes(20000)
    data.write_bytes(raw)
    assert failed(folder) & {"weights", "kept", "codes", "scales"}
    data.write_bytes(raw[:-5000])
    assert failed(folder) & {"data", "graph"}


def test_without_the_extra_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(onnx_graph, "import_module", missing)
    command = ("export", outputs.quantized("cpu"), "--format", "onnx", "--output", tmp_path / "o")
    refused(*command, says=("onnx is not installed", "pip install 'glm5q[onnx]'"))
