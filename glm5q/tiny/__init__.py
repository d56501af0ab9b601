"""A small, really trained GLM-5 checkpoint and the scripts that made it."""

from importlib.resources import files
from pathlib import Path


def path() -> Path:
    """Folder that holds the checkpoint, its calibration text and its held-out text."""
    return Path(str(files(__name__)))
