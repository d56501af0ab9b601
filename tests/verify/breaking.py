"""Breaking a checkpoint in one way, everything else left consistent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def index_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors.index.json"))


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a JSON file in place."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def edit_shard(folder: Path, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Changes the tensors of the shard that holds `name`; index and total_size follow."""
    index = index_of(folder)
    raw = json.loads(index.read_text())
    file = raw["weight_map"][name]
    tensors = load_file(folder / file)
    before = set(tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    change(tensors)
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(tensors, folder / file, metadata={"format": "pt"})
    for gone in before - set(tensors):
        del raw["weight_map"][gone]
    raw["weight_map"] |= dict.fromkeys(set(tensors) - before, file)
    raw["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values()) - size
    index.write_text(json.dumps(raw))


def edit_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces one tensor by `change` of it."""

    def within(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name].clone())

    edit_shard(folder, name, within)


def swap(folder: Path, one: str, other: str) -> None:
    """Swaps two tensors of a shard."""

    def within(tensors: dict[str, Tensor]) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    edit_shard(folder, one, within)


def put(value: float, *place: int) -> Callable[[Tensor], Tensor]:
    """Returns a change that sets one element."""

    def change(tensor: Tensor) -> Tensor:
        tensor[place] = value
        return tensor

    return change
