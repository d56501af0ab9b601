"""A calibration small enough to be run a hundred times, and what must be equal after it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from glm5q.pipeline import CalibrateOptions
from recipes import files
from tests import small

RAW = small.GLM52 | {
    "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "hidden_size": 64,
    "moe_intermediate_size": 32, "intermediate_size": 64, "n_routed_experts": 4,
    "index_n_heads": 4, "vocab_size": 128,
}  # fmt: skip
STATE = ".glm5q"


def small_run(folder: Path, source: str = "source") -> CalibrateOptions:
    """Writes a checkpoint, texts and a recipe to `folder`; the output is to be `folder/out`."""
    checkpoint = small.write_checkpoint(folder / source, RAW)
    data = small.write_text(folder / "text.jsonl", 4000)
    evaluation = small.write_text(folder / "other.jsonl", 2000, seed=1)
    recipe = own_recipe(folder / "own.yaml")
    return CalibrateOptions(
        checkpoint, (recipe,), folder / "out", data, evaluation, 4, 32, evaluation_windows=2
    )


def own_recipe(file: Path, shipped: str = "h200", **changes: Any) -> str:
    """A shipped recipe with groups that this small width holds, and other values by key."""
    raw = yaml.safe_load(files.text(shipped))
    raw["weights"]["routed_expert"] |= {"group_size": 32, "clip": {"steps": 4, "lowest": 0.7}}
    for key, value in changes.items():
        part = raw["weights"]["routed_expert"] if key == "damping" else raw["calibration"]
        part[key] = value
    raw["name"] = file.stem
    file.write_text(yaml.safe_dump(raw))
    return str(file)


def edit_recipe(file: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a recipe's file; `change` edits its content in place."""
    raw = yaml.safe_load(Path(file).read_text())
    change(raw)
    Path(file).write_text(yaml.safe_dump(raw))


def command(asked: CalibrateOptions, output: Path) -> list[str | Path]:
    assert asked.data is not None
    assert asked.evaluation_data is not None
    return [
        "calibrate", asked.source, "--recipe", *asked.recipes, "--data", asked.data,
        "--eval-data", asked.evaluation_data, "--windows", str(asked.windows),
        "--sequence-length", str(asked.sequence_length), "--eval-windows",
        str(asked.evaluation_windows), "--output", output,
    ]  # fmt: skip


def contents(output: Path) -> dict[str, str]:
    """Hashes of all that a run must make again byte for byte: everything but the report."""
    assert not (output / STATE).exists()
    assert not list(output.glob("*.partial"))
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(output.iterdir())
        if file.stem != "report"
    }
