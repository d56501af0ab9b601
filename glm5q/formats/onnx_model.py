"""A quantized checkpoint as an ONNX graph: the whole small model, or chosen layers of a big one.

`model.onnx` and its weights in `model.onnx.data`, written a layer at a time. It takes one sequence
and attends to all keys under the indexer's mask: a check of the weights in other hands, no server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.errors import OutputError, UserError
from glm5q.formats.onnx_graph import BOOL, DATA, FLOAT, INT64, Graph, onnx
from glm5q.formats.onnx_layer import LayerGraph, Rotary
from glm5q.formats.onnx_product import rms_norm
from glm5q.formats.quantized import QuantizedCheckpoint
from glm5q.types import Fp8Scheme
from glm5q.writer import COPIED, write_error

NAME = "onnx"
MODEL = "model.onnx"
WHOLE_LIMIT = 16  # layers in one graph: a big model's nodes would pass protobuf's 2 GB
Progress = Callable[[str, float, float], None]


def export(
    checkpoint: QuantizedCheckpoint,
    output: Path,
    layers: str | None,
    verification: str,
    progress: Progress,
) -> None:
    """Writes MODEL, DATA, config.json, tokenizer and README to `output`.

    `layers` as `0,3-5` takes hidden states in and out instead of token ids and logits. Raises
    UserError for layers that cannot stand alone, FP8 weights, or a missing onnx package.
    """
    onnx()
    config = checkpoint.config
    chosen = _chosen(layers, config)
    _check(checkpoint, chosen, layers is None)
    if output.exists() and any(output.iterdir()):
        raise OutputError(f"{output}: not empty", "give an empty or new folder with --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        with Graph(output) as graph:
            _build(graph, checkpoint, chosen, layers is None, progress)
            graph.save(output / MODEL)
        for pattern in COPIED:
            for file in sorted(checkpoint.root.glob(pattern)):
                shutil.copyfile(file, output / file.name)
        raw = {k: v for k, v in checkpoint.raw_config.items() if k != "quantization_config"}
        raw["glm5q_onnx_layers"] = chosen
        (output / "config.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        text = _readme(config, chosen, layers is None, verification)
        (output / "README.md").write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(output, error) from error


def _chosen(layers: str | None, config: ModelConfig) -> list[int]:
    """Parses `0,3-5`; None is every decoder layer."""
    if layers is None:
        return list(range(config.num_hidden_layers))
    chosen: set[int] = set()
    for part in layers.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise UserError(f"--layers {layers}: not layer numbers", "give them as 0,3-5")
        chosen |= set(range(int(first), int(last or first) + 1))
    if not chosen or max(chosen) >= config.num_hidden_layers:
        raise UserError(
            f"--layers {layers}: not all are decoder layers",
            f"give numbers from 0 to {config.num_hidden_layers - 1}",
        )
    return sorted(chosen)


def _check(checkpoint: QuantizedCheckpoint, chosen: list[int], whole: bool) -> None:
    config = checkpoint.config
    if whole and len(chosen) > WHOLE_LIMIT:
        raise OutputError(
            f"{checkpoint.root}: {len(chosen)} layers are too many for one graph",
            "choose some, as --layers 0-3",
        )
    for number in chosen:
        full = max(n for n in range(number + 1) if config.full_indexer[n])
        if full not in chosen:
            raise UserError(
                f"layer {number} takes the choice of layer {full}'s indexer",
                f"add {full} to --layers",
            )
        if any(isinstance(scheme, Fp8Scheme) for scheme in checkpoint.schemes(number).values()):
            raise OutputError(
                f"{checkpoint.root}: cannot become onnx: layer {number} has FP8 blocks",
                "export a checkpoint with integer weights",
            )


def _build(
    graph: Graph,
    checkpoint: QuantizedCheckpoint,
    chosen: list[int],
    whole: bool,
    progress: Progress,
) -> None:
    config = checkpoint.config
    if whole:
        ids = graph.input("input_ids", INT64, ["sequence"])
        table = graph.weight(names.EMBEDDING, checkpoint.top_tensor(names.EMBEDDING))
        hidden = graph.op("Cast", graph.op("Gather", table, ids, axis=0), to=FLOAT)
    else:
        hidden = graph.input("hidden", FLOAT, ["sequence", config.hidden_size])
    rotary, causal = _positions(graph, config, hidden)
    selected = None
    for index, number in enumerate(chosen):
        progress(NAME, index, len(chosen))
        layer = LayerGraph(graph, config, checkpoint.layer(number), rotary)
        hidden, selected = layer.forward(hidden, causal, selected)
        if config.full_indexer[number]:
            graph.output(selected, f"selected_{number}", BOOL, ["sequence", "sequence"])
    if not whole:
        graph.output(hidden, "hidden_out", FLOAT, ["sequence", config.hidden_size])
        return
    norm = graph.floats(names.FINAL_NORM, checkpoint.top_tensor(names.FINAL_NORM))
    normed = rms_norm(graph, hidden, norm, config.rms_norm_eps)
    if config.tie_word_embeddings:
        head = graph.op("Cast", table, to=FLOAT)
    else:
        head = graph.floats(names.LM_HEAD, checkpoint.top_tensor(names.LM_HEAD))
    logits = graph.op("MatMul", normed, graph.op("Transpose", head, perm=[1, 0]))
    graph.output(logits, "logits", FLOAT, ["sequence", config.vocab_size])


def _positions(graph: Graph, config: ModelConfig, hidden: str) -> tuple[Rotary, str]:
    """Returns rotary tables [sequence, 1, rope / 2] and the causal mask, for positions from 0."""
    zero, one = (graph.constant(value, torch.int64) for value in (0, 1))
    length = graph.op("Squeeze", graph.op("Shape", hidden, start=0, end=1))
    positions = graph.op("Range", zero, length, one)
    dim = config.qk_rope_head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = graph.constant((1.0 / config.rope_theta**exponent).view(1, 1, -1))
    shape = graph.constant([-1, 1, 1], torch.int64)
    steps = graph.op("Reshape", graph.op("Cast", positions, to=FLOAT), shape)
    angles = graph.op("Mul", steps, frequencies)
    rows = graph.op("Unsqueeze", positions, graph.constant([1], torch.int64))
    causal = graph.op("LessOrEqual", positions, rows)
    return Rotary(graph.op("Cos", angles), graph.op("Sin", angles)), causal


def _readme(config: ModelConfig, chosen: list[int], whole: bool, verification: str) -> str:
    feed = '{"input_ids": ids}' if whole else '{"hidden": hidden}'
    what = "the whole model" if whole else f"layers {', '.join(map(str, chosen))}"
    shape = "`input_ids` int64 [sequence]" if whole else "`hidden` float32 [sequence, hidden]"
    result = "logits" if whole else "hidden_out"
    return f"""# {config.variant()}, quantized by glm5q, as ONNX

`{MODEL}` holds {what}, without MTP layers; weights are in `{DATA}`. Input {shape}, one sequence;
output `{result}`, and each indexer's choice as a mask.

## Running

ONNX Runtime 1.22 or newer, CPU:

```python
import onnxruntime
session = onnxruntime.InferenceSession("{MODEL}")
result = session.run(["{result}"], {feed})
```

int8 activations are multiplied as integers (MatMulInteger, a scale a token); int4 weights with fp8
activations go through MatMulNBits at accuracy level 0 on activations rounded through e4m3.

## What was verified

Of the codes: {verification}. `glm5q verify .` reads the weights again.
"""
