"""What several commands share: the embedded checkpoint, devices, defaults."""

from __future__ import annotations

from pathlib import Path

import torch

from calibrate.job import Place
from calibrate.states import Progress, silent
from glm5q import tiny
from glm5q.checkpoint import Checkpoint
from glm5q.config import ModelConfig
from glm5q.errors import DataError, UserError

EVALUATION_WINDOWS = 16
DEVICES = ("cpu", "cuda")


def embedded_checkpoint() -> Path:
    """Returns the folder of the small trained GLM-5 that comes with the package."""
    return tiny.path()


def check_device(device: str) -> None:
    """Raises UserError unless torch can compute on `device` here."""
    if device.split(":")[0] not in DEVICES:
        raise UserError(f"--device {device}: no such device", f"give {' or '.join(DEVICES)}")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without it asserts
        raise UserError(f"--device {device}: not usable here ({error})", "give cpu") from None


def check_same(own: list[dict[str, str]], place: Place) -> None:
    """Raises UserError where a process goes by something else than the first; `own` is by name."""
    ranks = place.ranks
    every = ranks.all_of(own, place.device)
    for index, found in enumerate(every):
        rank, wanted = index // len(own), every[index % len(own)]
        differing = [name for name, value in wanted.items() if found[name] != value]
        if differing:
            raise UserError(
                f"process {rank} has another {differing[0]} than process 0",
                "give every machine the same files and versions",
            )


def check_length(sequence_length: int, config: ModelConfig) -> None:
    """Raises DataError for windows longer than the positions that the model was made for."""
    if sequence_length > config.max_position_embeddings:
        raise DataError(
            f"windows of {sequence_length} tokens exceed config.json's max_position_embeddings, "
            f"{config.max_position_embeddings}",
            "give a smaller --sequence-length",
        )


def scan(source: Checkpoint, progress: Progress = silent) -> str:
    """Returns the source's content hash after checking that every value is finite."""
    done, total = 0, source.nbytes  # once: a sum over every tensor for every tensor takes an hour

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("checking the source", done, total)

    return source.scan(advance)
