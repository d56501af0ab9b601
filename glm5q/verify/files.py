"""Safetensors files read from their bytes: header, offsets, index. Nothing of the writers'."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# https://github.com/huggingface/safetensors, README "Format": 8 bytes of length, JSON, data.
DTYPES: dict[str, tuple[torch.dtype, int]] = {
    "BF16": (torch.bfloat16, 2),
    "F16": (torch.float16, 2),
    "F32": (torch.float32, 4),
    "F8_E4M3": (torch.float8_e4m3fn, 1),
    "I8": (torch.int8, 1),
    "U8": (torch.uint8, 1),
    "I32": (torch.int32, 4),
    "I64": (torch.int64, 8),
}
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """Where a tensor's bytes lie: `begin` from the start of the file, `size` in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass
class Files:
    """A folder's tensors by name, and what is wrong with index and shards."""

    root: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    index_problems: list[str] = field(default_factory=list)
    shard_problems: list[str] = field(default_factory=list)
    shards: int = 0

    @property
    def data_bytes(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """Returns one tensor, read from its bytes."""
        entry = self.entries[name]
        with entry.file.open("rb") as file:
            file.seek(entry.begin)
            raw = bytearray(file.read(entry.size))
        dtype = DTYPES[entry.dtype][0]
        if not raw:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(entry.shape)


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in `path`, None if it is missing or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def open_files(root: Path, stem: str) -> Files:
    """Reads index and headers. The index must name just the tensors of the shards beside it."""
    files = Files(root)
    index = root / f"{stem}{INDEX_SUFFIX}"
    present = sorted(root.glob("*.safetensors"))
    files.shards = len(present)
    for path in present:
        _add_header(files, path)
    if not index.exists():
        if [path.name for path in present] != [f"{stem}.safetensors"]:
            files.index_problems.append(f"{index.name}: missing")
        return files
    raw = read_json(index) or {}
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        files.index_problems.append(f"{index.name}: no weight_map")
        return files
    metadata = raw.get("metadata")
    _check_index(files, index.name, weight_map, metadata if isinstance(metadata, dict) else {})
    return files


def _check_index(
    files: Files, index: str, weight_map: dict[str, str], metadata: dict[str, Any]
) -> None:
    said = files.index_problems
    there = {path.name for path in files.root.glob("*.safetensors")}
    for file in sorted(set(weight_map.values()) - there):
        said.append(f"{index}: names {file}, which is missing")
    for file in sorted(there - set(weight_map.values())):
        said.append(f"{index}: does not name {file}")
    for name, file in sorted(weight_map.items()):
        entry = files.entries.get(name)
        if entry is None:
            said.append(f"{index}: {name} is in no shard")
        elif entry.file.name != file:
            said.append(f"{index}: says {name} is in {file}, it is in {entry.file.name}")
    said += [f"{index}: misses {name}" for name in sorted(set(files.entries) - set(weight_map))]
    if metadata.get("total_size") != files.data_bytes:
        said.append(
            f"{index}: total_size {metadata.get('total_size')}, tensors have {files.data_bytes}"
        )


def _add_header(files: Files, path: Path) -> None:
    said = files.shard_problems
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            said.append(f"{path.name}: header of {length} bytes in a file of {size}")
            return
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        described = [
            (
                name,
                value["dtype"],
                tuple(map(int, value["shape"])),
                *map(int, value["data_offsets"]),
            )
            for name, value in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said.append(f"{path.name}: header is not safetensors' JSON ({error!r})")
        return
    end = 0
    for name, dtype, shape, start, stop in sorted(described, key=lambda one: one[3:]):
        if dtype not in DTYPES:
            said.append(f"{path.name}: {name} has dtype {dtype}")
        elif start != end or stop - start != math.prod(shape) * DTYPES[dtype][1]:
            said.append(f"{path.name}: {name} spans bytes {start} to {stop}, not its shape's")
        elif 8 + length + stop > size:
            said.append(f"{path.name}: {name} ends past the end of the file")
        elif name in files.entries:
            said.append(f"{path.name}: {name} is also in {files.entries[name].file.name}")
        else:
            files.entries[name] = Entry(path, dtype, shape, 8 + length + start, stop - start)
        end = stop
    if 8 + length + end != size:
        said.append(f"{path.name}: {size} bytes, its header says {8 + length + end}")
