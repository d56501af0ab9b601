"""SGLang's `w4afp8`: int4 experts with static fp8 activations, every other linear 128 x 128 FP8.

Experts: `weight` int8 [out, in / 2], even column in the low nibble, two's complement;
`weight_scale_inv` [out, in / 128]; scalars `w1.input_scale` (gate), `w3` (up), `w2` (down). Others:
`weight` e4m3 and float32 `weight_scale_inv` [out / 128, in / 128], as GLM-5-FP8. SGLang reads
nothing of its config but `quant_method`, so what it builds unquantized is fixed (SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm5q import names, quant
from glm5q.config import ModelConfig
from glm5q.formats import base
from glm5q.formats.base import Assignments, Finishing, Options
from glm5q.layer import Codes, Layer
from glm5q.types import CodedScheme, Fp8Scheme, IntScheme, KeepScheme, Role, Scheme

NAME = "sglang-w4afp8"
QUANT_METHOD = "w4afp8"
STEM = "model"
GROUP = 128
UNQUANTIZED = (Role.INDEXER_WEIGHTS, Role.ROUTER, Role.MTP_PROJECTION)  # built so, whatever is said
INPUT_SCALE = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def problems(assignments: Assignments, config: ModelConfig, _options: Options) -> Iterator[str]:
    """Yields why this format cannot hold the schemes."""
    for number, role, scheme in base.claims(assignments, config):
        where = f"layer {number} {role.value}"
        if role in UNQUANTIZED:
            if not isinstance(scheme, KeepScheme):
                yield f"{where} is {scheme.label()}, SGLang builds it unquantized"
        elif role is Role.ROUTED_EXPERT:
            if not _is_expert(scheme):
                yield f"{where} is {scheme.label()}, w4afp8 wants int4 g128 + fp8_static"
        elif not isinstance(scheme, Fp8Scheme):
            yield f"{where} is {scheme.label()}, w4afp8 wants method fp8 (128x128 blocks)"


def _is_expert(scheme: Scheme) -> bool:
    return (
        isinstance(scheme, IntScheme)
        and (scheme.bits, scheme.group_size) == (4, GROUP)
        and scheme.activation == "fp8_static"
    )


def layer_tensors(layer: Layer, config: ModelConfig, _options: Options) -> dict[str, Tensor]:
    """Returns a layer's tensors under SGLang's names."""
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
    if not isinstance(matrix.scheme, IntScheme):
        return {name + ".weight": matrix.codes, name + ".weight_scale_inv": matrix.scale.float()}
    if matrix.input_scale is None:
        raise ValueError(f"{name}: w4afp8 experts need a static input scale")
    scale = matrix.scale.to(quant.SCALE_DTYPES[matrix.scheme.scale_dtype])
    return {
        name + ".weight": pack_columns(matrix.codes),
        name + ".weight_scale_inv": scale,
        input_scale_name(name): torch.tensor(matrix.input_scale, dtype=torch.bfloat16),
    }


def input_scale_name(name: str) -> str:
    """`...experts.7.gate_proj` to `...experts.7.w1.input_scale`."""
    expert, projection = name.rsplit(".", 1)
    return f"{expert}.{INPUT_SCALE[projection]}.input_scale"


def pack_columns(codes: Tensor) -> Tensor:
    """Packs int8 codes [out, in] in -8 .. 7 into int8 [out, in / 2], even columns low."""
    low, high = codes[:, 0::2].to(torch.int16) & 0xF, codes[:, 1::2].to(torch.int16) & 0xF
    packed: Tensor = (low | (high << 4)).to(torch.uint8).view(torch.int8)
    return packed


def unpack_columns(packed: Tensor) -> Tensor:
    """Inverse of pack_columns."""
    low = (packed << 4) >> 4  # int8 shifts carry the sign
    return torch.stack((low, packed >> 4), 2).flatten(1, 2)


def decode(name: str, tensors: Mapping[str, Tensor], scheme: CodedScheme) -> Codes:
    """Inverse of encode, from tensors by full name.

    SGLang gives a layer the largest input scale of its experts; ours are alike.
    """
    weight, scale = tensors[name + ".weight"], tensors[name + ".weight_scale_inv"].float()
    if isinstance(scheme, Fp8Scheme):
        return Codes(weight, scale, scheme)
    static = float(tensors[input_scale_name(name)])
    return Codes(unpack_columns(weight), scale, scheme, static)


def decode_layer(
    number: int,
    tensors: Mapping[str, Tensor],
    schemes: Mapping[str, CodedScheme | None],
    config: ModelConfig,
) -> Layer:
    """Returns the layer held in `tensors`; `schemes` gives each module path's, None for kept."""
    return base.together(number, tensors, schemes, config, decode)


def read_schemes(number: int, config: ModelConfig) -> dict[str, CodedScheme | None]:
    """Returns the scheme SGLang gives each module path of a layer, whatever the config says."""
    found: dict[str, CodedScheme | None] = {}
    for module in names.layer_modules(config, number):
        if module.role in UNQUANTIZED:
            found[module.path] = None
        elif module.role is Role.ROUTED_EXPERT:
            found[module.path] = IntScheme(4, GROUP, "bfloat16", "fp8_static")
        else:
            found[module.path] = Fp8Scheme()
    return found


def finish(
    raw_config: Mapping[str, Any],
    assignments: Assignments,
    config: ModelConfig,
    _options: Options,
    _tensor_names: Sequence[str],
) -> Finishing:
    """Returns config.json with `quant_method: w4afp8` and the kept modules, for other readers."""
    kept = ["lm_head"]
    for number in range(config.num_layers):
        for module in names.layer_modules(config, number):
            if isinstance(assignments[number][module.role], KeepScheme):
                kept += base.module_names(number, module)
    quantization = {
        "quant_method": QUANT_METHOD,
        "group_size": GROUP,
        "activation_scheme": "static",
        "weight_block_size": [quant.FP8_BLOCK, quant.FP8_BLOCK],
        "modules_to_not_convert": kept,
    }
    raw = {key: value for key, value in raw_config.items() if key != "quantization_config"}
    return Finishing(raw | {"quantization_config": quantization})
