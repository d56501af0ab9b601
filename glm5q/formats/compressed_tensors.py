"""compressed-tensors as vLLM, SGLang and transformers load it.

`pack-quantized`: `weight_packed` int32, `weight_scale`, `weight_shape`. `int-quantized`: `weight`
int8 (four bits too, one a byte, which vLLM's CPU and Ascend routes read) and `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from glm5q import names, quant
from glm5q.config import ModelConfig
from glm5q.formats import base, ct_config
from glm5q.formats.base import Assignments, Finishing, Options
from glm5q.formats.ct_config import container, quantization_config, resolve
from glm5q.layer import Codes, Layer
from glm5q.types import CodedScheme, Fp8Scheme, IntScheme

NAME = "compressed-tensors"
STEM = "model"
AT_ONCE = 4  # matrices of a stack that a GPU packs at once: a code takes 24 bytes on the way


def problems(assignments: Assignments, config: ModelConfig, options: Options) -> Iterator[str]:
    """Yields why this format cannot hold the schemes.

    FP8 blocks, static activations, and int4 in the container that its engines don't unpack: vLLM
    0.33 wants it packed where it meets fp8, one a byte where it meets int8.
    """
    for number, role, scheme in base.claims(assignments, config):
        where = f"layer {number} {role.value}"
        if isinstance(scheme, Fp8Scheme):
            yield f"{where} is FP8 in blocks, this format is written for integers"
        elif isinstance(scheme, IntScheme) and scheme.activation == "fp8_static":
            yield f"{where} has static activation scales, engines want dynamic ones here"
        elif isinstance(scheme, IntScheme) and scheme.bits == 4:
            if scheme.activation == "fp8" and not options.packed:
                yield f"{where} is {scheme.label()}, which engines read packed (packing: int32)"
            elif scheme.activation == "int8" and options.packed:
                yield f"{where} is {scheme.label()}, which engines read unpacked (packing: int8)"


def layer_tensors(layer: Layer, config: ModelConfig, options: Options) -> dict[str, Tensor]:
    """Returns a layer's tensors under their checkpoint names, codes packed, the rest as decided."""
    prefix = names.layer_prefix(layer.number)
    tensors = {prefix + path: vector for path, vector in layer.vectors.items()}
    for module in names.layer_modules(config, layer.number):
        matrix = layer.matrices[module.path]
        whole = {"weight": matrix} if isinstance(matrix, Tensor) else encode(matrix, options.packed)
        for key, tensor in whole.items():
            for name, part in base.apart(layer.number, module, tensor):
                tensors[f"{name}.{key}"] = part
                if key == "weight_packed":
                    shape = part.shape[0], module.shape[-1]
                    tensors[name + ".weight_shape"] = torch.tensor(shape, dtype=torch.int64)
    return tensors


def encode(matrix: Codes, packed: bool) -> dict[str, Tensor]:
    """Returns what a matrix or stack becomes, whole: on a GPU a launch for each of 768 is 0.1 s.

    Scales are stored in the scheme's dtype.
    """
    scheme = matrix.scheme
    if not isinstance(scheme, IntScheme):
        raise TypeError(f"{scheme.label()} has no compressed-tensors layout here")
    scale = matrix.scale.to(quant.SCALE_DTYPES[scheme.scale_dtype])
    if container(scheme, packed) == "int-quantized":
        return {"weight": matrix.codes, "weight_scale": scale}
    at_once = AT_ONCE if matrix.codes.is_cuda else 1
    parts = matrix.codes.split(at_once) if matrix.codes.dim() > 2 else (matrix.codes,)
    return {"weight_packed": torch.cat([quant.pack_int4(p) for p in parts]), "weight_scale": scale}


def decode(name: str, tensors: Mapping[str, Tensor], scheme: CodedScheme) -> Codes:
    """Inverse of encode, from tensors by full name. The scale's dtype is the tensor's."""
    stored = tensors[name + ".weight_scale"]
    if isinstance(scheme, IntScheme):
        wide = stored.dtype == torch.float32
        scheme = replace(scheme, scale_dtype="float32" if wide else "bfloat16")
    packed = tensors.get(name + ".weight_packed")
    if packed is None:
        return Codes(tensors[name + ".weight"], stored.float(), scheme)
    columns = int(tensors[name + ".weight_shape"][1])
    return Codes(quant.unpack_int4(packed, columns), stored.float(), scheme)


def decode_layer(
    number: int,
    tensors: Mapping[str, Tensor],
    schemes: Mapping[str, CodedScheme | None],
    config: ModelConfig,
) -> Layer:
    """Returns the layer held in `tensors`; `schemes` gives each module path's, None for kept."""
    return base.together(number, tensors, schemes, config, decode)


def read_schemes(
    quantization: Mapping[str, Any], number: int, config: ModelConfig
) -> dict[str, CodedScheme | None]:
    """Returns the scheme a `quantization_config` claims for each module path of a layer."""
    return {
        module.path: resolve(quantization, base.module_names(number, module)[0])
        for module in names.layer_modules(config, number)
    }


def finish(
    raw_config: Mapping[str, Any],
    assignments: Assignments,
    config: ModelConfig,
    options: Options,
    _tensor_names: Sequence[str],
) -> Finishing:
    """Returns config.json with the `quantization_config`, proven against what was written."""
    quantization = quantization_config(assignments, config, options)
    ct_config.check_claims(quantization, assignments, config)
    raw = {key: value for key, value in raw_config.items() if key != "quantization_config"}
    return Finishing(raw | {"quantization_config": quantization})
