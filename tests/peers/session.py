"""One comparison: its folders, its model as the peers find it, and which outputs still stand."""

from __future__ import annotations

import filecmp
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from safetensors.torch import save_file

from calibrate.data import Windows
from glm5q.pipeline.common import embedded_checkpoint
from tests.peers import rare

IDENTITY = "identity.json"  # what a kept output was made from
CHECKPOINT = ("*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*",
              "special_tokens_map.json", "chat_template.jinja")  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The checkpoint that is quantized, with a share of its experts made rare unless that is 0."""

    folder: Path
    rare: float = 0.0

    @property
    def label(self) -> str:
        """Tells its files from other models'; empty for the embedded checkpoint."""
        own = "" if self.folder == embedded_checkpoint() else f"-{self.folder.name}"
        return own + (f"-rare-{self.rare:g}" if self.rare else "")

    def __str__(self) -> str:
        embedded = self.folder == embedded_checkpoint()
        own = "the embedded checkpoint" if embedded else f"the checkpoint {self.folder.name}"
        return own + (f", {self.rare:g} of each MoE layer's experts made rare" if self.rare else "")


@dataclass(frozen=True)
class Session:
    """One comparison: its folder, its model, and calibration tokens as the peers read them.

    `device` is where a peer runs that can run on more than a CPU.
    """

    folder: Path
    model: Model
    calibration: Windows
    time_limit_s: int
    device: str = "cpu"

    @property
    def source(self) -> Path:
        return self.folder / f"source{self.model.label}"

    @property
    def runs(self) -> Path:
        windows, length = self.calibration.tokens.shape
        return self.folder / f"runs{self.model.label}-{windows}x{length}"

    @property
    def tokens(self) -> Path:
        return self.runs / "tokens.safetensors"


def stage(session: Session) -> None:
    """Puts the model's own files and the calibration tokens where the peers find them.

    Raises click.UsageError where another model stands there under the same name.
    """
    model, staged = session.model, session.source
    new = not staged.exists()
    staged.mkdir(parents=True, exist_ok=True)
    session.runs.mkdir(exist_ok=True)
    for file in [file for pattern in CHECKPOINT for file in model.folder.glob(pattern)]:
        copy = staged / file.name
        if not copy.exists():
            shutil.copy(file, copy)
        elif not model.rare and not filecmp.cmp(file, copy, shallow=False):
            raise click.UsageError(f"{copy} is not {file}: remove {staged} and its outputs")
    if model.rare and new:
        rare.make(staged, session.calibration.tokens, model.rare)
    save_file({"input_ids": session.calibration.tokens}, session.tokens)


def identity(session: Session, settings: dict[str, Any]) -> dict[str, Any]:
    made_from = {"tokens": session.calibration.content_hash, **settings}
    if session.model.label:
        made_from["source"] = digest(session.source)
    return made_from


def digest(folder: Path) -> str:
    """Returns the SHA-256 of a checkpoint's tensors."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def fresh(session: Session, output: Path, settings: dict[str, Any]) -> bool:
    file = output / IDENTITY
    if not file.exists():
        return False
    return bool(json.loads(file.read_text(encoding="utf-8")) == identity(session, settings))


def keep(session: Session, output: Path, settings: dict[str, Any]) -> None:
    """Says what a finished output was made from, so that it is not made again."""
    text = json.dumps(identity(session, settings), indent=1)
    (output / IDENTITY).write_text(text, encoding="utf-8")
