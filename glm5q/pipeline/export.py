"""`glm5q export`: the same codes in another engine's format."""

from __future__ import annotations

from pathlib import Path

from calibrate.states import Progress, silent
from glm5q import formats
from glm5q.formats import export as exporting
from glm5q.formats import onnx_model
from glm5q.formats.base import Options


def export(
    checkpoint: Path,
    name: str,
    output: Path,
    vllm_only: bool = False,
    copy_mtp: bool = False,
    layers: str | None = None,
    progress: Progress = silent,
) -> None:
    """Writes one of our checkpoints in another format. Raises UserError naming what stands against.

    `layers` chooses some for onnx, as `0,3-5`.
    """
    opened = exporting.open_ours(checkpoint)
    options = Options(exporting.packed(opened), sglang=not vllm_only, copy_mtp=copy_mtp)
    verification = exporting.verification_beside(checkpoint)
    if name in formats.EXPORT_ONLY:
        onnx_model.export(opened, output, layers, verification, progress)
        return
    exporting.export(opened, name, output, options, verification, progress)
