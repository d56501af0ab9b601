"""What a plan is about: a model's shape and its source's bytes, and a chip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from glm5q import releases
from glm5q.checkpoint import FP8_DTYPE, Checkpoint, open_checkpoint
from glm5q.config import ModelConfig, parse_config, read_config
from glm5q.errors import UserError
from glm5q.shards import DTYPES
from glm5q.types import Role
from recipes import files
from recipes.schema import Keep
from reports import record as records
from targets import base, machine
from targets.plan import weights
from targets.plan.memory import Device
from targets.plan.weights import Elements


@dataclass(frozen=True)
class Subject:
    """The model that is planned for: its shape, and its own bytes as far as they are known."""

    name: str
    config: ModelConfig
    elements: Elements
    source_bytes: int


def chip_of(name: str) -> base.Target:
    """Returns the target; the CPU's with this machine's memory."""
    chip = base.load(name)
    size = machine.memory_bytes()
    if chip.kind != "cpu" or size is None:
        return chip
    return replace(chip, memory_bytes=base.Figure(size, "measured", "this machine"))


def subject_of(model: str) -> Subject:
    """Returns a built-in release by name, or the checkpoint in a folder (its config is enough)."""
    if model in releases.NAMES:
        config = parse_config(releases.raw_config(model), model)
        return Subject(model, config, weights.released, _plain_bytes(config))
    folder = Path(model)
    if not folder.exists():
        known = ", ".join(releases.NAMES)
        raise UserError(f"{model}: no such folder", f"give a checkpoint's, or one of {known}")
    if not list(folder.glob("*.safetensors")):
        config, _ = read_config(folder)
        return Subject(model, config, weights.released, _plain_bytes(config))
    _refuse_output(folder)
    source = open_checkpoint(folder)
    return Subject(model, source.config, elements_of(source), source.nbytes)


def _refuse_output(folder: Path) -> None:
    """Raises UserError for what `glm5q calibrate` wrote: a plan is of what is not made yet."""
    try:
        record = records.read_record(folder)
    except (UserError, RecursionError):
        return
    if record.memory is not None and record.source is not None:
        raise UserError(
            f"{folder}: an output of glm5q, whose plan is in its report.json and report.html "
            "(memory)",
            f"read it there, or give its source's folder, {record.source.path}",
        )


def elements_of(source: Checkpoint) -> Elements:
    """Returns bytes an element by name; what lies in FP8 is kept as bfloat16."""

    def elements(name: str) -> int:
        stored = source.stored.get(name)
        if stored is None:  # experts fused into one tensor; or a head that is tied
            return 2
        return 2 if stored.dtype == FP8_DTYPE else DTYPES[stored.dtype].itemsize

    return elements


def _plain_bytes(config: ModelConfig) -> int:
    """The BF16 release's size."""
    kept = files.load("source-fp8").model_copy(
        update={"weights": dict.fromkeys(Role, Keep(method="keep"))}
    )
    return weights.weights(config, kept).total


def capacity(chip: base.Target) -> int | None:
    value = chip.memory_bytes.value
    return None if value is None else int(value)


def goodness(device: Device) -> tuple[bool, int, int, int]:
    """Orders layouts: what fits, most sequences, longest context, widest attention split."""
    return (
        bool(device.fits),
        device.max_concurrency or 0,
        device.max_context or 0,
        device.layout.tensor,
    )
