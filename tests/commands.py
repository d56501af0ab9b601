"""The command line in process, and what a refusal must look like."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5q.cli import main

INDEX = "model.safetensors.index.json"
PROGRESS = re.compile(r".*: \d+%(, .* left)?$")
Tensors = dict[str, Tensor]


def run(*arguments: str | Path) -> Result:
    """Runs `glm5q ARGUMENTS` in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: str | Path, says: tuple[str, ...], fix: bool = True) -> str:
    """Returns the one line that a refused command printed, once it is known to be one.

    Progress may come before it. Every text in `says` must be in it, a fix too unless `fix` is
    False, and nothing on stdout.
    """
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception or result.output
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not PROGRESS.match(line)]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("glm5q: ")
    assert ";" in lines[0] or not fix, f"no fix is offered: {lines[0]}"
    for text in says:
        assert text in lines[0], lines[0]
    return lines[0]


def looks_whole(output: Path) -> bool:
    """Whether a loader would take `output` for a checkpoint."""
    return (output / INDEX).exists() or (output / "model.safetensors").exists()


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrites a JSON file; `change` edits in place or returns the new content."""
    content = json.loads(path.read_text())
    changed = change(content)
    path.write_text(json.dumps(content if changed is None else changed))


def edit_shard(path: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrites a safetensors file with its tensors changed in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
