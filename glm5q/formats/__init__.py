"""One file an engine's checkpoint format."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from glm5q.errors import UserError
from glm5q.formats.base import Format

FORMATS: dict[str, str] = {
    "compressed-tensors": "glm5q.formats.compressed_tensors",
    "sglang-w4afp8": "glm5q.formats.sglang_w4afp8",
    "modelslim": "glm5q.formats.modelslim",
}
EXPORT_ONLY = ("onnx",)  # a graph beside its weights, not a checkpoint: `glm5q export` writes it


def get(name: str) -> Format:
    """Returns a checkpoint format by name. Raises UserError for one that is not in the table."""
    if name not in FORMATS:
        raise UserError(f"{name}: no such format", f"give one of {', '.join(FORMATS)}")
    return cast(Format, import_module(FORMATS[name]))
