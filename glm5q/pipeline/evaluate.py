"""`glm5q evaluate`: any quantized GLM-5 checkpoint against its source."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from calibrate.data import load_windows
from calibrate.evaluate import evaluate
from calibrate.states import Progress, silent
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.errors import DataError, OutputError, UserError
from glm5q.formats.quantized import open_any
from glm5q.pipeline import describe
from glm5q.pipeline.common import (
    EVALUATION_WINDOWS,
    check_device,
    check_length,
    embedded_checkpoint,
    scan,
)
from glm5q.writer import file_sha256
from reports import record as records

BY_LAYER = ("moe", "full_indexer")  # MTP layers' come last
MAY_DIFFER = ("num_nextn_predict_layers", "max_position_embeddings", "tie_word_embeddings")

WEIGHTS_ONLY = "weights only: activations were not quantized"


def compare_checkpoints(
    source: Path,
    quantized: Path,
    data: Path | None,
    output: Path | None,
    windows: int = EVALUATION_WINDOWS,
    sequence_length: int = 2048,
    seed: int = 0,
    latent_norm_eps: float | None = None,
    quantize_activations: bool = True,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[records.RunRecord, Path | None]:
    """Evaluates a quantized checkpoint against its source; writes record and page if `output`."""
    check_device(device)
    if output is not None and (output.is_dir() or output.suffix == ".html"):
        raise OutputError(f"{output}: not a name for the record", "give a file as report.json")
    left = open_checkpoint(source, latent_norm_eps)
    right = open_any(quantized, latent_norm_eps)
    check_same_shape(left, right, quantized)
    embedded = source.resolve() == embedded_checkpoint().resolve()
    file = data or (embedded_checkpoint() / "heldout.jsonl" if embedded else None)
    if file is None:
        raise DataError("no evaluation text", "give --data FILE that calibration did not see")
    notes = _check_unseen(file, quantized)
    check_length(sequence_length, left.config)
    text = load_windows(file, source, left.config.vocab_size, sequence_length, windows, seed)
    content_hash = scan(left, progress)
    comparison = evaluate(left, right, text.tokens, progress, quantize_activations, device)
    notes += describe.fallbacks(comparison)
    finished = records.RunRecord(
        kind="evaluate",
        created=describe.now(),
        command=describe.command(),
        output=str(quantized),
        machine=describe.machine(device),
        source=describe.source_info(left, content_hash),
        accuracy=describe.accuracy(
            comparison, describe.data_info(text, 0, file_sha256(file)), left.config
        ),
        times_s={"evaluate": comparison.time_s},
        peak_memory_bytes=describe.peak_memory_bytes(),
        notes=notes if quantize_activations else [*notes, WEIGHTS_ONLY],
    )
    if output is None:
        return finished, None
    return finished, describe.write(finished, output, quantized).page


def check_same_shape(left: Checkpoint, right: Any, path: Path) -> None:
    layers = left.config.num_hidden_layers
    for key, mine in asdict(left.config).items():
        theirs = getattr(right.config, key)
        if key in BY_LAYER:
            mine, theirs = mine[:layers], theirs[:layers]
        if mine != theirs and key not in MAY_DIFFER:
            raise OutputError(
                f"{path}: {key} is {theirs}, the source's is {mine}", "compare like with like"
            )


def _check_unseen(file: Path, quantized: Path) -> list[str]:
    """Refuses to evaluate on the very file that calibration read; notes it if that is not known."""
    try:
        calibration = records.read_record(quantized / "report.json").calibration
    except UserError:  # none, or another tool's
        calibration = None
    if calibration is None:
        return [
            f"no record beside {quantized.name}: whether calibration saw {file.name} is not known"
        ]
    if file.exists() and calibration.file_hash == file_sha256(file):
        raise DataError(f"{file}: calibration saw this text", "give other text with --data")
    return []
