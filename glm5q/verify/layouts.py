"""How each format lays out one linear layer, and its codes unpacked, stated a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from glm5q.verify.files import Files
from glm5q.verify.model import Linear

Kind = Literal["float", "int4", "int8", "fp8"]
FLOATS = ("BF16", "F16", "F32")
BLOCK = 128
SLICES = 16
INPUT_SCALES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
Layout = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name -> (dtypes, shape)


@dataclass(frozen=True)
class Held:
    """What lies on disk for a linear layer: codes' kind, columns a scale, int4 eight a word."""

    kind: Kind
    group: int | None = None
    packed: bool = False

    def label(self) -> str:
        """`int4 g128`, `int8 channel`, `fp8`, `float`."""
        if self.kind in ("float", "fp8"):
            return self.kind
        return f"{self.kind} {f'g{self.group}' if self.group else 'channel'}"


def same_group(claimed: int | None, columns: int) -> int | None:
    """Returns a claimed group as files show it: one that spans the row is one scale a row."""
    return None if claimed == columns else claimed


def held(files: Files, linear: Linear, form: str, bits: int | None) -> Held | None:
    """Returns what the files hold, None without a weight. `bits` is claimed, for codes a byte."""
    name, (rows, columns) = linear.name, linear.shape
    if name + ".weight_packed" in files.entries:
        return Held("int4", _group(files, name + ".weight_scale", columns), packed=True)
    entry = files.entries.get(name + ".weight")
    if entry is None:
        return None
    if entry.dtype in FLOATS:
        return Held("float")
    if entry.dtype == "F8_E4M3":
        return Held("fp8")
    scale = name + (".weight_scale_inv" if form == "sglang-w4afp8" else ".weight_scale")
    group = _group(files, scale, columns)
    if form == "compressed-tensors":
        return Held("int4" if bits == 4 else "int8", group)
    halved = entry.shape in ((rows // 2, columns), (rows, columns // 2))
    return Held("int4" if halved else "int8", group)


def _group(files: Files, scale: str, columns: int) -> int | None:
    """Columns a scale; None for one scale a row, and where the scale is missing."""
    entry = files.entries.get(scale)
    if entry is None or len(entry.shape) != 2 or entry.shape[1] <= 1:
        return None
    return columns // entry.shape[1]


def layout(form: str, linear: Linear, what: Held) -> Layout:
    """Returns every tensor a linear layer must have, with the dtypes and shape of each."""
    name, (rows, columns) = linear.name, linear.shape
    groups = columns // what.group if what.group else 1
    if what.kind == "float":
        return {name + ".weight": (FLOATS, (rows, columns))}
    if what.kind == "fp8":
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        return {
            name + ".weight": (("F8_E4M3",), (rows, columns)),
            name + ".weight_scale_inv": (("F32",), blocks),
        }
    if form == "modelslim":
        return _modelslim(linear, what)
    if form == "sglang-w4afp8":
        prefix, projection = name.rsplit(".", 1)
        return {
            name + ".weight": (("I8",), (rows, columns // 2)),
            name + ".weight_scale_inv": (("BF16", "F32"), (rows, groups)),
            f"{prefix}.{INPUT_SCALES.get(projection, '?')}.input_scale": (("BF16", "F32"), ()),
        }
    scale: Layout = {name + ".weight_scale": (("BF16", "F32"), (rows, groups))}
    if what.packed:
        return scale | {
            name + ".weight_packed": (("I32",), (rows, -(-columns // 8))),
            name + ".weight_shape": (("I64",), (2,)),
        }
    return scale | {name + ".weight": (("I8",), (rows, columns))}


def _modelslim(linear: Linear, what: Held) -> Layout:
    name, (rows, columns) = linear.name, linear.shape
    tensors: Layout = {
        name + ".weight_scale": (("F32",), (rows, 1)),
        name + ".weight_offset": (("F32",), (rows, 1)),
    }
    if what.kind == "int8":
        return tensors | {name + ".weight": (("I8",), (rows, columns))}
    slices = SLICES if name.endswith(".down_proj") else 1
    return tensors | {
        name + ".weight": (("I8",), (rows // 2, columns)),
        name + ".scale_bias": (("F32",), (rows, slices)),
    }


def unpacked(files: Files, form: str, linear: Linear, what: Held) -> tuple[Tensor, Tensor]:
    """Returns (codes [out, in], float32 scale [out, groups] or [blocks, blocks]) from the files."""
    name, (rows, columns) = linear.name, linear.shape
    if what.packed:
        words = files.read(name + ".weight_packed").contiguous().view(torch.uint8)
        nibbles = torch.stack((words % 16, words // 16), -1).reshape(rows, -1)[:, :columns]
        return nibbles.to(torch.int16) - 8, files.read(name + ".weight_scale").float()
    weight = files.read(name + ".weight")
    if what.kind == "fp8":
        return weight, files.read(name + ".weight_scale_inv")
    suffix = ".weight_scale_inv" if form == "sglang-w4afp8" else ".weight_scale"
    scale = files.read(name + suffix).float()
    if what.kind == "int8" or form == "compressed-tensors":
        return weight.to(torch.int16), scale
    halves = weight.view(torch.uint8).to(torch.int16)
    low, high = (_signed(half) for half in (halves % 16, halves // 16))
    if form == "modelslim":
        return torch.stack((low, high), 1).reshape(rows, columns), scale
    return torch.stack((low, high), 2).reshape(rows, columns), scale


def _signed(nibble: Tensor) -> Tensor:
    return torch.where(nibble > 7, nibble - 16, nibble)


def dequantized(codes: Tensor, scale: Tensor, kind: Kind) -> Tensor:
    """Returns float32 [out, in] = code x its scale."""
    rows, columns = codes.shape
    if kind == "fp8":
        row = torch.arange(rows).div(BLOCK, rounding_mode="floor")
        column = torch.arange(columns).div(BLOCK, rounding_mode="floor")
        return codes.float() * scale.float()[row][:, column]
    column = torch.arange(columns).div(columns // scale.shape[1], rounding_mode="floor")
    return codes.float() * scale[:, column]
