"""The checkpoint that comes with the package, quantized for real: judged, verified, compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from calibrate.data import load_windows
from calibrate.logits import Head
from calibrate.states import advance, embed
from glm5q import names, pipeline
from glm5q.formats.quantized import open_any
from glm5q.layer import runnable
from glm5q.pipeline.ablate import VARIANTS
from glm5q.verify import verify
from recipes import files
from reports import comparison

ROOT = pipeline.embedded_checkpoint()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[pipeline.Finished]:
    """`h200` and plain rounding on its scales, from the same little text."""
    folder = tmp_path_factory.mktemp("embedded")
    raw = yaml.safe_load(files.text("h200"))
    plan = raw["weights"]["routed_expert"]
    VARIANTS["rtn"](plan, raw["efforts"]["fast"], raw["efforts"]["best"])
    rounding = folder / "rtn.yaml"
    rounding.write_text(yaml.safe_dump(raw | {"name": "rtn"}))
    options = pipeline.CalibrateOptions(
        source=ROOT,
        recipes=("h200", str(rounding)),
        output=folder / "out",
        windows=10,
        sequence_length=512,
        evaluation_windows=4,
    )
    return pipeline.calibrate(options)


def test_gptq_beats_rounding(finished: list[pipeline.Finished]) -> None:
    compared = comparison.compare([one.run for one in finished], ["h200", "rtn"])
    kl = next(metric for metric in compared.metrics if metric.key == "kl_mean").cells[1]
    assert kl.verdict == "worse"
    assert kl.low is not None
    assert kl.low > 0
    assert finished[0].run.accuracy is not None
    assert 0.005 < finished[0].run.accuracy.kl_mean < 0.08


def test_number_of_experts(finished: list[pipeline.Finished]) -> None:
    coded = [
        matrix
        for layer in finished[0].run.layers
        for matrix in layer.matrices
        if matrix.role == "routed_expert" and matrix.bits < 5
    ]
    assert sum(matrix.matrices for matrix in coded) == 4 * 16 * 3


def test_verify_is_all_green(finished: list[pipeline.Finished]) -> None:
    report = verify(finished[0].checkpoint, ROOT)
    assert report.ok
    assert not [row for row in report.rows if row.status != "ok"]


def test_transformers_loads_the_same_weights_and_logits(finished: list[pipeline.Finished]) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        finished[0].checkpoint,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    quantized = open_any(finished[0].checkpoint, latent_norm_eps=1e-6)
    config = quantized.config
    tokens = load_windows(ROOT / "heldout.jsonl", ROOT, config.vocab_size, 512, 4, 0).tokens[:1]
    states, held = embed(quantized, tokens), model.state_dict()
    for number in range(config.num_hidden_layers):
        layer = quantized.layer(number)
        weights = runnable(layer, stored_dtype=torch.bfloat16, quantize_activations=False)
        for path, matrix in weights.matrices.items():
            name = names.layer_prefix(number) + path
            loaded = held[name if name in held else name + ".weight"]
            assert torch.equal(loaded.float(), matrix), name
        states = advance(config, number, weights, states)
    mine = Head(quantized, "cpu").log_probabilities(states.hidden[0])
    with torch.no_grad():
        theirs = model.float()(tokens).logits[0].log_softmax(-1)
    assert float((mine - theirs).abs().max()) < 1e-4


def test_card_and_page_name_the_run(finished: list[pipeline.Finished], tmp_path: Path) -> None:
    card = pipeline.model_card(finished[0].record)
    assert "h200" in card
    _, page = pipeline.render(finished[0].record, tmp_path / "page.html")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
