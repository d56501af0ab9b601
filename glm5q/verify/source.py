"""The source checkpoint's weights, for comparison, and the files that must be unchanged."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from glm5q.verify.files import Files, open_files
from glm5q.verify.layouts import dequantized
from glm5q.verify.model import Linear

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class Source:
    """An unquantized checkpoint: BF16, F16, F32, or FP8 in blocks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: Files = open_files(root, "model")

    def has(self, name: str) -> bool:
        return name in self.files.entries

    def dtype(self, name: str) -> str:
        return self.files.entries[name].dtype

    def weight(self, linear: Linear) -> tuple[Tensor, str] | None:
        """Returns (weight [out, in] as stored, FP8 as float32; its dtype), None without one."""
        name = linear.name + ".weight"
        if self.has(name):
            return self.tensor(name), self.dtype(name)
        prefix, _, projection = linear.name.rpartition(".")
        stack = prefix.rpartition(".")[0] + (
            ".down_proj" if projection == "down_proj" else ".gate_up_proj"
        )
        if linear.expert is None or not self.has(stack):
            return None
        rows = linear.shape[0]
        both = self.files.read(stack)[linear.expert]
        start = rows if projection == "up_proj" else 0
        return both[start : start + rows], self.dtype(stack)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as stored, FP8 as float32."""
        tensor = self.files.read(name)
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantized(tensor, self.files.read(name + "_scale_inv"), "fp8")
        return tensor


def changed_files(root: Path, source: Path) -> Iterator[str]:
    """Yields tokenizer, template and generation files that are not the source's, byte for byte."""
    for name in COPIED:
        mine, theirs = root / name, source / name
        if theirs.exists() and not mine.exists():
            yield f"{name} is missing"
        elif mine.exists() and not theirs.exists():
            yield f"{name} is not in the source"
        elif mine.exists() and not filecmp.cmp(mine, theirs, shallow=False):
            yield f"{name} differs from the source's"


def changed_config(mine: dict[str, object], theirs: dict[str, object]) -> Iterator[str]:
    """Yields keys of config.json that differ from the source's, apart from its quantization."""
    for key in sorted(set(mine) | set(theirs) - {"quantization_config"}):
        if key != "quantization_config" and mine.get(key) != theirs.get(key):
            yield f"config.json: {key} is {mine.get(key)!r}, the source's {theirs.get(key)!r}"
