"""Peak memory belongs to one layer's width, not to how many layers there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from glm5q.checkpoint import open_checkpoint
from glm5q.config import parse_config
from recipes import files
from tests import small
from tests.commands import Tensors
from tests.warm import Ended, Warm

MB = 1e6
WIDE = small.GLM5 | {
    "hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 14,
    "num_experts_per_tok": 4, "num_nextn_predict_layers": 0,
}  # fmt: skip
LAYERS = (4, 16)


def cheap_recipe(file: Path) -> Path:
    """GPTQ with its Gram matrices, but without the searches that cost time and no memory."""
    raw: dict[str, Any] = yaml.safe_load(files.text("h200"))
    raw["weights"]["routed_expert"]["clip"] = {"steps": 1, "lowest": 1.0}
    raw["efforts"]["fast"] = {"descent": 0, "guidance": False}
    file.write_text(yaml.safe_dump(raw | {"name": "cheap"}))
    return file


def tensors_of(layers: int) -> Tensors:
    """Random weights, made once: every layer from the second on has the same."""
    config = parse_config(WIDE | {"num_hidden_layers": 2})
    tensors = small.random_tensors(config)
    second = {name: t for name, t in tensors.items() if name.startswith("model.layers.1.")}
    for number in range(2, layers):
        prefix = f"model.layers.{number}."
        copies = ((name.replace("model.layers.1.", prefix), t) for name, t in second.items())
        tensors |= {name: tensor.clone() for name, tensor in copies}
    return tensors


def small_run(
    folder: Path, raw: dict[str, Any], recipe: Path, warm: Warm, tensors: Tensors | None = None
) -> Ended:
    """A calibration of four windows of 64 tokens; its checkpoint is `folder`/source."""
    source = small.write_checkpoint(folder / "source", raw, tensors)
    data = small.write_text(folder / "text.jsonl", 2000)
    evaluation = small.write_text(folder / "other.jsonl", 1000, seed=1)
    ended = warm.run(
        "calibrate", source, "--recipe", recipe, "--data", data, "--eval-data", evaluation,
        "--windows", "4", "--sequence-length", "64", "--eval-windows", "2",
        "--output", folder / "out",
    )  # fmt: skip
    assert ended.code == 0, ended.stderr
    return ended


def calibrate(folder: Path, layers: int, recipe: Path, warm: Warm) -> Ended:
    raw = WIDE | {"num_hidden_layers": layers}
    ended = small_run(folder, raw, recipe, warm, tensors_of(layers))
    assert open_checkpoint(folder / "source").layer_bytes(1) > 6 * MB
    return ended


def test_peak_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    recipe = cheap_recipe(tmp_path / "cheap.yaml")
    # Freed matrices go back at once, so that what is seen is what is held.
    with Warm(tmp_path, MALLOC_MMAP_THRESHOLD_="131072") as warm:
        empty = warm.run("--version").peak_bytes
        few, many = (
            calibrate(tmp_path / str(layers), layers, recipe, warm).peak_bytes for layers in LAYERS
        )
    print(f"peak MB at {LAYERS} layers: {few / MB:.0f}, {many / MB:.0f}; idle {empty / MB:.0f}")
    assert few > 1.5 * empty, "the layers hardly show beside the interpreter"
    assert many <= 1.05 * few
