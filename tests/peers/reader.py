"""What a public quantizer wrote, as a plain checkpoint: its codes times its scales, in float32.

Written from the formats' own descriptions and held to the tools' own unpackers by unpackers.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from glm5q import names
from glm5q.config import parse_config

NIBBLES = 8  # int4 codes in an int32 word, the lowest bits first


@dataclass(frozen=True)
class Kept:
    """What a tool did to the tensors it was asked to keep, and to the MTP layer.

    `changed` are kept tensors whose values differ from the source's.
    """

    changed: tuple[str, ...]
    mtp: str


def nibbles(words: Tensor, axis: int) -> Tensor:
    """Returns the codes 0..15, int32, in words of int32: `axis` becomes eight times as long."""
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32)
    parts = words.unsqueeze(axis + 1) >> shifts.view(-1, *[1] * (words.dim() - axis - 1)) & 15
    return parts.flatten(axis, axis + 1)


def packed_rows(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Decodes compressed-tensors' `pack-quantized`: [rows, columns], offset 8, a scale a group.

    Groups lie side by side unless `weight_g_idx` names each column's.
    """
    rows, columns = tensors[f"{name}.weight_shape"].tolist()
    codes = nibbles(tensors[f"{name}.weight_packed"], 1)[:rows, :columns] - 8
    scale = tensors[f"{name}.weight_scale"].float()
    group = tensors.get(f"{name}.weight_g_idx")
    if group is None:
        group = torch.arange(columns) // (columns // scale.shape[1])
    return codes.float() * scale[:, group.long()]


def gptq_columns(tensors: dict[str, Tensor], name: str, zero_offset: int) -> Tensor:
    """Decodes AutoGPTQ's layout: everything transposed, zeros stored less `zero_offset`.

    qweight [columns / 8, rows], scales [groups, rows], qzeros [groups, rows / 8], g_idx [columns].
    """
    codes = nibbles(tensors[f"{name}.qweight"], 0)
    zeros = nibbles(tensors[f"{name}.qzeros"], 1) + zero_offset
    scale = tensors[f"{name}.scales"].float()
    group = tensors.get(f"{name}.g_idx")
    if group is None:
        group = torch.arange(codes.shape[0]) // (codes.shape[0] // scale.shape[0])
    group = group.long()
    return ((codes - zeros[group]).float() * scale[group]).T.contiguous()


def scaled_rows(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Decodes int8 codes [rows, columns] with a scale a row."""
    return tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float()


def decoded(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a tool's output by its official name, quantized ones in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    decode, marker = _decoder(config["quantization_config"])
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    coded = {name.removesuffix(marker) for name in tensors if name.endswith(marker)}
    for name in sorted(coded):
        yield f"{name}.weight", decode(tensors, name)
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in coded:
            yield name, tensor


def _decoder(quantization: dict[str, Any]) -> tuple[Any, str]:
    """Returns (how a matrix is decoded, the suffix by which one is known)."""
    method = quantization["quant_method"]
    if method == "compressed-tensors" and quantization["format"] == "pack-quantized":
        return packed_rows, ".weight_packed"
    if method == "msmodelslim-ssz":
        return scaled_rows, ".weight_scale"
    layout = quantization.get("packing_format") or quantization.get("checkpoint_format")
    if layout in ("auto_round:auto_gptq", "gptq"):
        return lambda tensors, name: gptq_columns(tensors, name, 1), ".qweight"
    if layout == "gptq_v2":
        return lambda tensors, name: gptq_columns(tensors, name, 0), ".qweight"
    raise ValueError(f"no reader for {method} {layout}")


def write_plain(folder: Path, source: Path, output: Path) -> Kept:
    """Writes a tool's output as a checkpoint without codes and without the MTP layer."""
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    mtp = names.layer_prefix(parse_config(raw).num_hidden_layers)
    tensors = dict(decoded(folder))
    lost = [tensors.pop(name) for name in list(tensors) if name.startswith(mtp)]
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors")
    text = json.dumps(raw | {"num_nextn_predict_layers": 0}, indent=1)
    (output / "config.json").write_text(text, encoding="utf-8")
    originals: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        originals |= load_file(file)
    return Kept(_changed(tensors, originals), _mtp_fate(folder, mtp, bool(lost)))


def _changed(tensors: dict[str, Tensor], originals: dict[str, Tensor]) -> tuple[str, ...]:
    kept = [name for name in tensors if ".mlp.experts." not in name]
    return tuple(n for n in kept if not torch.equal(tensors[n].float(), originals[n].float()))


def _mtp_fate(folder: Path, prefix: str, there: bool) -> str:
    if not there:
        return "dropped"
    found = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    coded = any(name.startswith(prefix) and name.endswith(".qweight") for name in found)
    return "rounded" if coded else "kept"
