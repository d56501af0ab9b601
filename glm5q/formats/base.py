"""What every format offers, and the parts they share: experts taken apart and put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Codes, Layer
from glm5q.stream import LayerSource
from glm5q.types import CodedScheme, KeepScheme, Role, Scheme

Assignments = Sequence[Mapping[Role, Scheme]]  # one a layer, MTP layers too


@dataclass(frozen=True)
class Options:
    """What a format leaves open. Others than its own are ignored by a format.

    `packed`: compressed-tensors int4 eight a word, else one a byte. `sglang`: its config also
    serves SGLang, which needs the class name `Linear` as a target; else vLLM alone. `copy_mtp`:
    MTP layers carry the model's embedding and head, for engines that don't share them.
    """

    packed: bool = True
    sglang: bool = True
    copy_mtp: bool = False


@dataclass(frozen=True)
class Finishing:
    """What ends a checkpoint: config.json, and other files' text by name."""

    config: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)


class Format(Protocol):
    """One engine's format. A module of this package is one."""

    NAME: str
    STEM: str  # shards are STEM-00001-of-00009.safetensors

    def problems(
        self, assignments: Assignments, config: ModelConfig, options: Options
    ) -> Iterator[str]:
        """Yields why the format cannot hold these schemes."""

    def layer_tensors(
        self, layer: Layer, config: ModelConfig, options: Options
    ) -> dict[str, Tensor]:
        """Returns a layer's tensors under the names the engine loads."""

    def decode_layer(
        self,
        number: int,
        tensors: Mapping[str, Tensor],
        schemes: Mapping[str, CodedScheme | None],
        config: ModelConfig,
    ) -> Layer:
        """Inverse of layer_tensors; `schemes` gives each module path's, None for kept."""

    def finish(
        self,
        raw_config: Mapping[str, Any],
        assignments: Assignments,
        config: ModelConfig,
        options: Options,
        tensor_names: Sequence[str],
    ) -> Finishing:
        """Returns what ends a checkpoint that holds `tensor_names`."""


def matrices(layer: Layer, config: ModelConfig) -> Iterator[tuple[str, Tensor | Codes]]:
    """Yields (full name without `.weight`, matrix) of a layer, stacks taken apart."""
    for module in names.layer_modules(config, layer.number):
        matrix = layer.matrices[module.path]
        if not isinstance(matrix, Codes):
            yield from apart(layer.number, module, matrix)
            continue
        both = (apart(layer.number, module, tensor) for tensor in (matrix.codes, matrix.scale))
        for (name, codes), (_, scale) in zip(*both, strict=True):
            yield name, replace(matrix, codes=codes, scale=scale)


def apart(number: int, module: names.Module, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields (full name without `.weight`, its part) of what has a row a row of a module's."""
    if not module.stacked:
        yield names.layer_prefix(number) + module.path, tensor
        return
    parts = names.stacked_parts(module.path)
    for expert, matrix in enumerate(tensor):
        for projection, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield names.expert_name(number, expert, projection), rows


def module_names(number: int, module: names.Module) -> list[str]:
    """Returns a module's names, without `.weight`: one, or one an expert's part."""
    if not module.stacked:
        return [names.layer_prefix(number) + module.path]
    parts = names.stacked_parts(module.path)
    experts = range(module.shape[0])
    return [names.expert_name(number, expert, part) for expert in experts for part in parts]


class Decode(Protocol):
    """Decodes one matrix from tensors by full name."""

    def __call__(self, name: str, tensors: Mapping[str, Tensor], scheme: CodedScheme) -> Codes: ...


def together(
    number: int,
    tensors: Mapping[str, Tensor],
    schemes: Mapping[str, CodedScheme | None],
    config: ModelConfig,
    decode: Decode,
) -> Layer:
    """Returns the layer held in `tensors`: vectors as they are, matrices through `decode`."""
    prefix = names.layer_prefix(number)
    vectors = {path: tensors[prefix + path] for path, _, _ in names.layer_vectors(config, number)}
    found: dict[str, Tensor | Codes] = {}
    for module in names.layer_modules(config, number):
        scheme = schemes[module.path]
        parts = [
            tensors[name + ".weight"] if scheme is None else decode(name, tensors, scheme)
            for name in module_names(number, module)
        ]
        found[module.path] = _stack(parts, module) if module.stacked else parts[0]
    return Layer(number, vectors, found)


def _stack(parts: Sequence[Tensor | Codes], module: names.Module) -> Tensor | Codes:
    shape = module.shape
    first = parts[0]
    if isinstance(first, Codes):
        codes = torch.cat([part.codes for part in parts if isinstance(part, Codes)])
        scale = torch.cat([part.scale for part in parts if isinstance(part, Codes)])
        return replace(first, codes=codes.view(shape), scale=scale.view(*shape[:2], -1))
    return torch.cat([part for part in parts if isinstance(part, Tensor)]).view(shape)


def kept_whole(assignment: Mapping[Role, Scheme]) -> bool:
    return all(isinstance(scheme, KeepScheme) for scheme in assignment.values())


def has(config: ModelConfig, layer: int, role: Role) -> bool:
    """Whether a layer has a matrix of this role."""
    return any(module.role is role for module in names.layer_modules(config, layer))


def claims(assignments: Assignments, config: ModelConfig) -> Iterator[tuple[int, Role, Scheme]]:
    """Yields (layer, role, scheme) of every role that a layer has a matrix of."""
    for number in range(config.num_layers):
        for role in dict.fromkeys(module.role for module in names.layer_modules(config, number)):
            yield number, role, assignments[number][role]


def for_engines(options: Options, assignments: Assignments, config: ModelConfig) -> Options:
    """Returns the options, not for SGLang where routed experts differ by layer: it has one scheme.

    Its W4A8 experts are read from the group of class name `Linear` and the global format (SGLang
    0.5.23, compressed_tensors.py); vLLM asks for each layer's.
    """
    experts = {
        assignment[Role.ROUTED_EXPERT]
        for number, assignment in enumerate(assignments)
        if has(config, number, Role.ROUTED_EXPERT) and not kept_whole(assignment)
    }
    return replace(options, sglang=options.sglang and len(experts) <= 1)


def mtp_copies(source: LayerSource, number: int, options: Options) -> dict[str, Tensor]:
    """Returns the embedding and head under an MTP layer's names, if they are to be copied there.

    vLLM-Ascend warns of uninitialised weights without them (vllm-ascend issues 6754 and 9655).
    """
    if not options.copy_mtp or not source.config.is_mtp(number):
        return {}
    tied = source.config.tie_word_embeddings
    prefix = names.layer_prefix(number)
    return {
        prefix + "embed_tokens.weight": source.top_tensor(names.EMBEDDING),
        prefix + "shared_head.head.weight": source.top_tensor(
            names.EMBEDDING if tied else names.LM_HEAD
        ),
    }
