"""Reading any quantized (or plain) GLM-5 checkpoint back, a layer at a time."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from glm5q import formats, names, quant
from glm5q.checkpoint import open_checkpoint
from glm5q.config import ModelConfig, read_config
from glm5q.errors import CheckpointError
from glm5q.formats import compressed_tensors, modelslim, sglang_w4afp8
from glm5q.formats.base import Options, module_names
from glm5q.layer import Layer
from glm5q.shards import Files, Stored, stored_tensors
from glm5q.stream import LayerSource
from glm5q.types import CodedScheme, IntScheme, KeepScheme, Role, Scheme


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """An opened quantized checkpoint, ours or another tool's.

    `quantization` is its engine's own description: `quantization_config`, or msModelSlim's file.
    """

    root: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    format: str
    quantization: dict[str, Any]
    stored: dict[str, Stored]

    @property
    def bytes(self) -> int:
        return sum(entry.nbytes for entry in self.stored.values())

    def top_tensor(self, name: str) -> Tensor:
        return self._load([name])[name]

    def top(self) -> dict[str, Tensor]:
        """Returns the tensors outside the layers by full name, as stored."""
        wanted = [spec.name for spec in names.top_tensors(self.config) if spec.name in self.stored]
        return self._load(wanted)

    def layer(self, number: int) -> Layer:
        """Returns one layer, quantized matrices as codes."""
        prefix = names.layer_prefix(number)
        wanted = [name for name in self.stored if name.startswith(prefix)]
        schemes = self.schemes(number)
        try:
            tensors = self._load(wanted)
            decode = formats.get(self.format).decode_layer
            return decode(number, tensors, schemes, self.config)
        except KeyError as error:
            raise CheckpointError(
                f"{self.root}: tensor {error.args[0]} is missing",
                "its quantization_config claims what the files do not hold",
            ) from None

    def schemes(self, number: int) -> dict[str, CodedScheme | None]:
        """Returns the scheme its config claims for each module path of a layer."""
        if self.format == modelslim.NAME:
            return modelslim.read_schemes(self.quantization, number, self.config)
        if self.format == sglang_w4afp8.NAME:
            return sglang_w4afp8.read_schemes(number, self.config)
        return compressed_tensors.read_schemes(self.quantization, number, self.config)

    def assignment(self, number: int) -> dict[Role, Scheme]:
        """Returns the scheme of every role in a layer, as its config claims."""
        found: dict[Role, Scheme] = {role: KeepScheme() for role in Role}
        schemes = self.schemes(number)
        for module in names.layer_modules(self.config, number):
            found[module.role] = schemes[module.path] or KeepScheme()
        return found

    def options(self) -> Options:
        """Returns the options it was written with, as far as its files show them."""
        copied = names.layer_prefix(self.config.num_hidden_layers) + "embed_tokens.weight"
        return Options(
            packed=any(name.endswith(".weight_packed") for name in self.stored),
            copy_mtp=copied in self.stored,
        )

    def _load(self, wanted: list[str]) -> dict[str, Tensor]:
        with Files() as files:
            return {name: files.tensor(self.stored[name]) for name in wanted}


def open_any(root: Path, latent_norm_eps: float | None = None) -> LayerSource:
    """Returns a checkpoint for evaluation: a quantized one, or one that is not."""
    found = open_quantized(root, latent_norm_eps)
    return open_checkpoint(root, latent_norm_eps) if found is None else found


def open_quantized(root: Path, latent_norm_eps: float | None = None) -> QuantizedCheckpoint | None:
    """Returns the quantized checkpoint in `root`, None if it is in no format we write."""
    config, raw = read_config(root)
    description = root / modelslim.DESCRIPTION
    quantization = raw.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if description.exists():
        name, quantization, stem = modelslim.NAME, _read_json(description), modelslim.STEM
    elif method == sglang_w4afp8.QUANT_METHOD:
        name, stem = sglang_w4afp8.NAME, sglang_w4afp8.STEM
    elif method == compressed_tensors.NAME:
        name, stem = compressed_tensors.NAME, compressed_tensors.STEM
    else:
        return None
    config = config.with_latent_norm_eps(latent_norm_eps)
    stored = stored_tensors(root, stem)
    if not any(name.startswith(names.layer_prefix(config.num_hidden_layers)) for name in stored):
        config = replace(config, num_nextn_predict_layers=0)  # peers drop the MTP layer
    found = QuantizedCheckpoint(root, config, raw, name, quantization, stored)
    schemes = _described(found)
    if name == compressed_tensors.NAME:
        _check_shapes(found, schemes)
    return found


def _described(found: QuantizedCheckpoint) -> list[dict[str, CodedScheme | None]]:
    """Returns every layer's schemes. Raises CheckpointError when a description makes no sense."""
    try:
        return [found.schemes(number) for number in range(found.config.num_layers)]
    except (KeyError, TypeError, AttributeError, ValueError, re.error) as error:
        problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{found.root}: its quantization_config is not {found.format}'s ({problem})",
            "restore the file that came with the weights",
        ) from None


def _check_shapes(found: QuantizedCheckpoint, schemes: list[dict[str, CodedScheme | None]]) -> None:
    """Raises CheckpointError naming the first tensor not shaped as its scheme and config say."""
    for number in range(found.config.num_layers):
        for module in names.layer_modules(found.config, number):
            parts = len(names.stacked_parts(module.path)) if module.stacked else 1
            rows, columns = module.shape[-2] // parts, module.shape[-1]
            wanted = _shapes(schemes[number][module.path], rows, columns)
            for name in module_names(number, module):
                for suffix, shape in wanted.items():
                    entry = found.stored.get(name + suffix)
                    if entry is not None and entry.shape != shape:
                        raise CheckpointError(
                            f"{entry.file}: {name + suffix} has shape {list(entry.shape)}, "
                            f"not {list(shape)}",
                            "fetch this shard again",
                        )


def _shapes(scheme: CodedScheme | None, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a matrix's tensors by suffix."""
    if not isinstance(scheme, IntScheme):
        return {".weight": (rows, columns)}
    groups = columns // quant.group_columns(columns, scheme.group_size)
    return {
        ".weight": (rows, columns),
        ".weight_packed": (rows, -(-columns // 8)),
        ".weight_scale": (rows, groups),
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({error})", "restore the file") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object", "restore the file")
    return found
