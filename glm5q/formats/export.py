"""From one of our checkpoints to another format without calibrating again, a layer at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from glm5q import formats, names
from glm5q.errors import OutputError, UserError
from glm5q.formats.base import Options, mtp_copies
from glm5q.formats.quantized import QuantizedCheckpoint, open_quantized
from glm5q.formats.readme import readme
from glm5q.layer import Layer
from glm5q.types import IntScheme, Role, Scheme
from glm5q.writer import Writer, open_writer

Progress = Callable[[str, float, float], None]


def open_ours(root: Path) -> QuantizedCheckpoint:
    """Returns the quantized checkpoint in `root`. Raises UserError if it is not quantized."""
    found = open_quantized(root)
    if found is None:
        raise UserError(f"{root}: not quantized", "give an output of `glm5q calibrate`")
    return found


def export(
    checkpoint: QuantizedCheckpoint,
    name: str,
    output: Path,
    options: Options,
    verification: str,
    progress: Progress,
) -> list[str]:
    """Writes `checkpoint` in format `name` to `output` and returns the names of its shards.

    Raises OutputError naming the reason when the format cannot hold these very codes.
    """
    engine = formats.get(name)
    config = checkpoint.config
    assignments = [_assignment(checkpoint, number, name) for number in range(config.num_layers)]
    for problem in engine.problems(assignments, config, options):
        raise OutputError(
            f"{checkpoint.root}: cannot become {name}: {problem}",
            "calibrate for that format, e.g. with a recipe of `glm5q recipes list`",
        )
    identity = {"from": _identity(checkpoint), "format": name, "options": repr(options)}
    writer = open_writer(output, config.num_layers + 2, identity, engine.STEM)
    try:
        shards = []
        for index, tensors in enumerate(_shards(checkpoint, name, options)):
            progress(f"{name}", index, config.num_layers + 2)
            shards.append(writer.commit(index, writer.write(index, tensors), {}))
        written = [tensor for shard in shards for tensor in shard.tensors]
        ends = engine.finish(checkpoint.raw_config, assignments, config, options, written)
        origin = f"exported from `{checkpoint.format}` with the same codes"
        text = readme(name, assignments, config, options, origin, verification)
        writer.finish(ends.config, shards, checkpoint.root, ends.files | {"README.md": text})
    finally:
        writer.close(finished=_finished(writer))
    return sorted(shard.file for shard in shards)


def packed(checkpoint: QuantizedCheckpoint) -> bool:
    """Whether compressed-tensors' engines want the int4 codes packed: not where they meet int8."""
    schemes = [checkpoint.schemes(n) for n in range(checkpoint.config.num_layers)]
    return not any(
        isinstance(scheme, IntScheme) and (scheme.bits, scheme.activation) == (4, "int8")
        for layer in schemes
        for scheme in layer.values()
    )


def verification_beside(root: Path) -> str:
    """Returns how far the recipe's target was checked, by the record beside the weights."""
    try:
        recipe = json.loads((root / "report.json").read_text(encoding="utf-8"))["recipe"]
        return str(recipe["verification"])
    except (OSError, ValueError, KeyError, TypeError):
        return "not recorded"


def _finished(writer: Writer) -> bool:
    return (writer.output / f"{writer.stem}.safetensors.index.json").exists()


def _identity(checkpoint: QuantizedCheckpoint) -> str:
    """Hash of the config and of each tensor's place: files are not read for it."""
    digest = hashlib.sha256(repr(checkpoint.raw_config).encode())
    digest.update(repr(sorted(checkpoint.stored.items())).encode())
    return digest.hexdigest()


def _assignment(checkpoint: QuantizedCheckpoint, number: int, name: str) -> dict[Role, Scheme]:
    """Returns the scheme of each role, scales in the dtype that `name` stores them in."""
    found = checkpoint.assignment(number)
    if name != "modelslim":
        return found
    return {
        role: replace(scheme, scale_dtype="float32") if isinstance(scheme, IntScheme) else scheme
        for role, scheme in found.items()
    }


def _shards(
    checkpoint: QuantizedCheckpoint, name: str, options: Options
) -> Iterator[dict[str, Tensor]]:
    """Yields each shard's tensors: embedding, layers, what is left."""
    config, top = checkpoint.config, checkpoint.top()
    yield {names.EMBEDDING: top.pop(names.EMBEDDING)}
    encode = formats.get(name).layer_tensors
    for number in range(config.num_layers):
        layer: Layer = checkpoint.layer(number)
        tensors = encode(layer, config, options)
        yield tensors | mtp_copies(checkpoint, number, options)
    yield top
