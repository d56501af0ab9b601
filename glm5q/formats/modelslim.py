"""msModelSlim's directory, which vLLM-Ascend and SGLang on NPUs load.

Per-channel only. W8A8_DYNAMIC: `weight` int8 [out, in], float32 `weight_scale` and zero
`weight_offset` [out, 1]. W4A8_DYNAMIC (routed experts): `weight` int8 [out / 2, in], row 2r in the
low nibble and 2r + 1 in the high one, and `scale_bias`, which takes the kernel's offset of 8 back.
`quant_model_description.json` names every tensor. Held to msModelSlim 26.1's packers by tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.formats import base
from glm5q.formats.base import Assignments, Finishing, Options
from glm5q.layer import Codes, Layer
from glm5q.types import CodedScheme, IntScheme, KeepScheme, Role

NAME = "modelslim"
STEM = "quant_model_weights"
DESCRIPTION = "quant_model_description.json"
BIAS_SLICES = (
    16  # down_proj's scale_bias is a slice of columns each, so that TP up to 16 can split it
)
KERNEL_OFFSET = 8  # the grouped matmul reads nibbles as 0 .. 15
TYPES = {4: "W4A8_DYNAMIC", 8: "W8A8_DYNAMIC"}
FLOAT = "FLOAT"
QUANTIZED_PARTS = ("weight", "weight_scale", "weight_offset", "scale_bias")


def problems(assignments: Assignments, config: ModelConfig, _options: Options) -> Iterator[str]:
    """Yields why this format cannot hold the schemes: groups, float activations, odd shapes."""
    for number, role, scheme in base.claims(assignments, config):
        where = f"layer {number} {role.value}"
        if isinstance(scheme, KeepScheme):
            continue
        if isinstance(scheme, IntScheme) and scheme.group_size is not None:
            yield f"{where} has groups of {scheme.group_size}, vLLM-Ascend takes one scale a row"
        elif not isinstance(scheme, IntScheme) or scheme.activation != "int8":
            yield f"{where} is {scheme.label()}, Ascend multiplies int8 activations"
        elif scheme.bits == 4 and role is not Role.ROUTED_EXPERT:
            yield f"{where} is int4, vLLM-Ascend has no W4A8 linear outside the routed experts"
        elif scheme.bits == 4 and config.moe_intermediate_size % BIAS_SLICES:
            yield f"{where}: {config.moe_intermediate_size} columns do not split in {BIAS_SLICES}"


def layer_tensors(layer: Layer, config: ModelConfig, _options: Options) -> dict[str, Tensor]:
    """Returns a layer's tensors under msModelSlim's names."""
    prefix = names.layer_prefix(layer.number)
    tensors = {prefix + path: vector for path, vector in layer.vectors.items()}
    for name, matrix in base.matrices(layer, config):
        if isinstance(matrix, Codes):
            tensors.update(encode(name, matrix))
        else:
            tensors[name + ".weight"] = matrix
    return tensors


def encode(name: str, matrix: Codes) -> dict[str, Tensor]:
    """Returns one matrix's tensors by full name."""
    scale = matrix.scale.float()
    codes = matrix.codes
    tensors = {
        name + ".weight": codes if _bits(matrix) == 8 else pack_rows(codes),
        name + ".weight_scale": scale,
        name + ".weight_offset": torch.zeros_like(scale),
    }
    if _bits(matrix) == 4:
        slices = BIAS_SLICES if name.endswith("down_proj") else 1
        tensors[name + ".scale_bias"] = scale_bias(codes, scale, slices)
    return tensors


def _bits(matrix: Codes) -> int:
    if not isinstance(matrix.scheme, IntScheme) or matrix.scheme.group_size is not None:
        raise TypeError(f"{matrix.scheme.label()} has no msModelSlim layout")
    return matrix.scheme.bits


def pack_rows(codes: Tensor) -> Tensor:
    """Packs int8 codes [out, in] in -8 .. 7 into int8 [out / 2, in], even rows low."""
    low, high = codes[0::2].to(torch.int16) & 0xF, codes[1::2].to(torch.int16) & 0xF
    packed: Tensor = (low | (high << 4)).to(torch.uint8).view(torch.int8)
    return packed


def unpack_rows(packed: Tensor) -> Tensor:
    """Inverse of pack_rows."""
    low = (packed << 4) >> 4  # int8 shifts carry the sign
    return torch.stack((low, packed >> 4), 1).flatten(0, 1)


def scale_bias(codes: Tensor, scale: Tensor, slices: int) -> Tensor:
    """Returns float32 [out, slices]: 8 x the sum of code x scale over each slice of columns."""
    sums = codes.unflatten(1, (slices, -1)).sum(-1, dtype=torch.int32)
    bias: Tensor = KERNEL_OFFSET * sums.float() * scale
    return bias


def decode(name: str, tensors: Mapping[str, Tensor], scheme: CodedScheme) -> Codes:
    """Inverse of encode, from tensors by full name."""
    codes = tensors[name + ".weight"]
    if isinstance(scheme, IntScheme) and scheme.bits == 4:
        codes = unpack_rows(codes)
    return Codes(codes, tensors[name + ".weight_scale"], scheme)


def decode_layer(
    number: int,
    tensors: Mapping[str, Tensor],
    schemes: Mapping[str, CodedScheme | None],
    config: ModelConfig,
) -> Layer:
    """Returns the layer held in `tensors`; `schemes` gives each module path's, None for kept."""
    return base.together(number, tensors, schemes, config, decode)


def read_schemes(
    description: Mapping[str, Any], number: int, config: ModelConfig
) -> dict[str, CodedScheme | None]:
    """Returns the scheme the description gives each module path of a layer."""
    found: dict[str, CodedScheme | None] = {}
    for module in names.layer_modules(config, number):
        name = base.module_names(number, module)[0]
        kind = description.get(name + ".weight", FLOAT)
        found[module.path] = {
            "W4A8_DYNAMIC": IntScheme(4, None, "float32", "int8"),
            "W8A8_DYNAMIC": IntScheme(8, None, "float32", "int8"),
        }.get(kind)
    return found


def finish(
    raw_config: Mapping[str, Any],
    assignments: Assignments,
    config: ModelConfig,
    _options: Options,
    tensor_names: Sequence[str],
) -> Finishing:
    """Returns config.json without `quantization_config`, and the description of every tensor."""
    raw = {key: value for key, value in raw_config.items() if key != "quantization_config"}
    text = json.dumps(describe(assignments, config, tensor_names), indent=2) + "\n"
    return Finishing(raw, {DESCRIPTION: text})


def describe(
    assignments: Assignments, config: ModelConfig, tensor_names: Sequence[str]
) -> dict[str, Any]:
    """Returns quant_model_description.json: every tensor's type, FLOAT where it is kept.

    `model_quant_type` is W8A8_DYNAMIC for a mixed model, as msModelSlim's own saver has it. Layers
    whose indexer is shared have no indexer tensors and so no entries.
    """
    types: dict[str, str] = {}
    for number in range(config.num_layers):
        for module in names.layer_modules(config, number):
            scheme = assignments[number][module.role]
            if isinstance(scheme, IntScheme):
                for name in base.module_names(number, module):
                    types |= {f"{name}.{part}": TYPES[scheme.bits] for part in QUANTIZED_PARTS}
    entries = {name: types.get(name, FLOAT) for name in sorted(tensor_names)}
    return {
        "version": "1.0.0",
        "model_quant_type": "W8A8_DYNAMIC",
        "group_size": 0,
        "metadata": {},
        "optional": {},
        **entries,
    }
