"""Quantized small checkpoints in every format, each made once a session.

Plain rounding without a forward: the bytes are laid out as `glm5q calibrate` lays them out, sooner.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5q import formats, names, quant
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.formats.base import mtp_copies
from glm5q.formats.readme import readme
from glm5q.layer import Codes, Layer
from glm5q.types import Fp8Scheme, KeepScheme, Scheme
from glm5q.writer import Shard, open_writer
from recipes import files
from recipes.schema import Recipe
from tests import small

SHAPES: dict[str, dict[str, Any]] = {
    "glm5": small.GLM5,
    "glm52": small.GLM52,
    "no_mtp": small.NO_MTP,
    # Rows of two groups, so that a group of 128 and a channel differ on disk.
    "wide": small.GLM52
    | {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "num_hidden_layers": 3,
        "indexer_types": ["full", "full", "shared"],
    },
}
RECIPES = ("h200", "cpu", "atlas-800t-a3", "h200-sglang")
INPUT_SCALE = float(torch.tensor(0.013).to(torch.bfloat16))


@functools.cache
def folder() -> Path:
    """Returns a folder that the session's outputs lie in."""
    made = tempfile.mkdtemp(prefix="glm5q-outputs-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@functools.cache
def source(shape: str = "wide") -> Path:
    """Returns a random bfloat16 checkpoint of one of SHAPES."""
    return small.write_checkpoint(folder() / shape, SHAPES[shape])


def copy(output: Path, to: Path) -> Path:
    """Returns a copy of an output that a test may break."""
    return Path(shutil.copytree(output, to / output.name))


def quantized(recipe: str, shape: str = "wide") -> Path:
    """Returns a checkpoint quantized as a shipped recipe says, with a record of what it claims."""
    return _quantized(recipe, shape)


@functools.cache
def _quantized(recipe: str, shape: str) -> Path:
    return quantize(files.load(recipe), source(shape), folder() / f"{shape}-{recipe}")


def quantize(recipe: Recipe, root: Path, output: Path) -> Path:
    """Rounds the checkpoint in `root` as `recipe` says and returns `output`."""
    opened = open_checkpoint(root)
    config, engine, options = opened.config, formats.get(recipe.format), recipe.options()
    writer = open_writer(output, config.num_layers + 2, {}, engine.STEM)
    assignments = [recipe.assignment(number, config) for number in range(config.num_layers)]
    assert list(engine.problems(assignments, config, options)) == []
    top = opened.top()
    shards = [writer.write(0, {names.EMBEDDING: top.pop(names.EMBEDDING)})]
    claims = []
    for number in range(config.num_layers):
        layer, rounded = opened.layer(number), rounded_layer(opened, number, recipe)
        tensors = engine.layer_tensors(rounded, config, options)
        tensors |= mtp_copies(opened, number, options)
        shards.append(writer.write(number + 1, tensors))
        claims.append(_claims(number, layer, rounded, shards[-1]))
    shards.append(writer.write(config.num_layers + 1, top))
    written = [name for shard in shards for name in shard.tensors]
    ends = engine.finish(opened.raw_config, assignments, config, options, written)
    text = readme(engine.NAME, assignments, config, options, recipe.name, recipe.verification)
    writer.finish(ends.config, shards, root, ends.files | {"README.md": text})
    total = sum(sum(shard.tensors.values()) for shard in shards)
    record = {"layers": claims, "size": {"quantized_bytes": total}}
    record["recipe"] = {"verification": recipe.verification}  # type: ignore[assignment]
    (output / "report.json").write_text(json.dumps(record))
    writer.close(finished=True)
    return output


def rounded_layer(opened: Checkpoint, number: int, recipe: Recipe) -> Layer:
    """Returns a layer with the matrices that the recipe quantizes as codes."""
    layer = opened.layer(number)
    matrices: dict[str, Tensor | Codes] = {}
    for module in names.layer_modules(opened.config, number):
        weight = layer.matrices[module.path]
        assert isinstance(weight, Tensor)
        matrices[module.path] = _rounded(
            weight, recipe.plan(module.role, number, opened.config).scheme()
        )
    return layer.with_matrices(matrices)


def _rounded(weight: Tensor, scheme: Scheme) -> Tensor | Codes:
    if isinstance(scheme, KeepScheme):
        return (
            weight.bfloat16() if scheme.dtype is None else weight.to(getattr(torch, scheme.dtype))
        )
    if isinstance(scheme, Fp8Scheme):
        return Codes(*quant.quantize_fp8_blocks(weight), scheme)
    scale = quant.round_scale(quant.absmax_scale(weight, scheme), scheme)
    static = INPUT_SCALE if scheme.activation == "fp8_static" else None
    return Codes(quant.quantize(weight, scale, scheme), scale, scheme, static)


def _claims(number: int, layer: Layer, rounded: Layer, shard: Shard) -> dict[str, Any]:
    """What a record says of a layer, as far as verifying reads it."""
    matrices = []
    for path, matrix in rounded.matrices.items():
        original = layer.matrices[path]
        assert isinstance(original, Tensor)
        codes = isinstance(matrix, Codes)
        values = quant.dequantize(matrix.codes, matrix.scale) if codes else matrix  # type: ignore[union-attr]
        assert isinstance(values, Tensor)
        error = (values.double() - original.double()).norm() / original.double().norm()
        scheme = matrix.scheme.label() if isinstance(matrix, Codes) else "bfloat16"
        matrices.append({"module": path, "scheme": scheme, "weight_error": float(error)})
    assert all(math.isfinite(m["weight_error"]) for m in matrices)
    return {
        "layer": number,
        "quantized_bytes": sum(shard.tensors.values()),
        "matrices": matrices,
    }
