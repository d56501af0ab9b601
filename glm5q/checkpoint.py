"""Reading a GLM-5 checkpoint: raw safetensors, checked in full, one layer in memory at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5q import names, quant
from glm5q.config import RESTORE, ModelConfig, read_config
from glm5q.errors import CheckpointError
from glm5q.layer import Codes, Layer
from glm5q.shards import DTYPES, INDEX, SINGLE, Files, Stored, stored_tensors

FLOAT_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPE = "F8_E4M3"
FP8_SCALE = "_scale_inv"
SCAN_ELEMENTS = 1 << 24  # values checked at once: 64 MB as float32


__all__ = ["INDEX", "SINGLE", "Checkpoint", "Stored", "open_checkpoint", "stored_tensors"]


@dataclass(frozen=True)
class Checkpoint:
    """An opened, checked source checkpoint. Nothing but headers has been read.

    `repeated` are the names of files, one for each of their reads that failed and was repeated.
    """

    root: Path
    config: ModelConfig
    raw_config: dict[str, Any]
    stored: dict[str, Stored]
    repeated: list[str] = field(default_factory=list, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.stored.values())

    def layer_bytes(self, number: int) -> int:
        prefix = names.layer_prefix(number)
        return sum(s.nbytes for name, s in self.stored.items() if name.startswith(prefix))

    def top(self) -> dict[str, Tensor]:
        """Returns the tensors outside the layers by full name, as stored."""
        wanted = [spec.name for spec in names.top_tensors(self.config) if spec.name in self.stored]
        return {name: self.top_tensor(name) for name in wanted}

    def top_tensor(self, name: str) -> Tensor:
        with Files(self.repeated) as files:
            return self._read(files, name)

    def layer(self, number: int, pin: bool = False) -> Layer:
        """Reads one layer; experts stacked, FP8 dequantized to float32 once, the rest as stored.

        With `pin` the stacks lie in memory a GPU can copy from at full rate.
        """
        prefix = names.layer_prefix(number)
        matrices: dict[str, Tensor | Codes] = {}
        with Files(self.repeated) as files:
            vectors = {
                path: self._read(files, prefix + path)
                for path, _, _ in names.layer_vectors(self.config, number)
            }
            for module in names.layer_modules(self.config, number):
                if module.stacked:
                    matrices[module.path] = self._read_stack(files, number, module, pin)
                else:
                    matrices[module.path] = self._read(files, f"{prefix}{module.path}.weight")
            scales = self._fp8_scales(files, number)
        return Layer(number, vectors, matrices, self._from_fp8(number), scales)

    def _fp8_scales(self, files: Files, number: int) -> dict[str, Tensor]:
        """Returns the float32 block scales of a layer's FP8 matrices by path, not stacks'."""
        prefix, found = names.layer_prefix(number), {}
        for module in names.layer_modules(self.config, number):
            name = f"{prefix}{module.path}.weight"
            if not module.stacked and self.stored[name].dtype == FP8_DTYPE:
                found[module.path] = files.tensor(self.stored[name + FP8_SCALE]).float()
        return found

    def _from_fp8(self, number: int) -> frozenset[str]:
        """Returns the module paths of a layer that lie in FP8, a stack if any of its parts does."""
        prefix, found = names.layer_prefix(number), set()
        for module in names.layer_modules(self.config, number):
            parts = [prefix + module.path, f"{prefix}{module.path}.weight"]
            if module.stacked:
                experts, projections = range(module.shape[0]), names.stacked_parts(module.path)
                for e in experts:
                    parts += [names.expert_name(number, e, p) + ".weight" for p in projections]
            if any(n in self.stored and self.stored[n].dtype == FP8_DTYPE for n in parts):
                found.add(module.path)
        return frozenset(found)

    def optional_layer_tensors(self, number: int) -> dict[str, Tensor]:
        """Returns what some re-exports add to an MTP layer (embedding, head), by full name."""
        specs = names.layer_tensors(self.config, number)
        wanted = [spec.name for spec in specs if spec.optional and spec.name in self.stored]
        with Files(self.repeated) as files:
            return {name: self._read(files, name) for name in wanted}

    def _read_stack(self, files: Files, number: int, module: names.Module, pin: bool) -> Tensor:
        fused = names.layer_prefix(number) + module.path
        if fused in self.stored:
            whole = self._read(files, fused)
            return whole.pin_memory() if pin else whole
        parts = names.stacked_parts(module.path)
        experts = range(module.shape[0])
        all_names = [[names.expert_name(number, e, p) + ".weight" for p in parts] for e in experts]
        found = {self.stored[name].dtype for mine in all_names for name in mine}
        plain = len(found) == 1 and FP8_DTYPE not in found
        dtype = DTYPES[found.pop()] if plain else torch.float32
        stack = torch.empty(module.shape, dtype=dtype, pin_memory=pin)
        rows = module.shape[1] // len(parts)
        for expert, mine in enumerate(all_names):
            for part, name in enumerate(mine):
                place = stack[expert, part * rows : (part + 1) * rows]
                if DTYPES[self.stored[name].dtype] == stack.dtype:
                    files.read(self.stored[name], place)
                else:
                    place.copy_(self._read(files, name))
        return stack

    def _read(self, files: Files, name: str) -> Tensor:
        tensor = files.tensor(self.stored[name])
        if tensor.dtype == quant.FP8:
            return quant.dequantize_fp8_blocks(tensor, files.tensor(self.stored[name + FP8_SCALE]))
        return tensor

    def scan(self, progress: Callable[[int], None] = lambda _: None) -> str:
        """Reads every tensor once and returns the content hash; `progress` is given bytes read.

        The hash covers config.json and each tensor's name, dtype, shape and bytes, whatever the
        sharding. Raises
        CheckpointError naming the first tensor with a value that is not finite.
        """
        as_they_lie = sorted(
            self.stored, key=lambda n: (self.stored[n].file, self.stored[n].offset)
        )
        digests = {}
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
            scanned = pool.map(self._scan_one, as_they_lie)
            for name, digest in zip(as_they_lie, scanned, strict=True):
                digests[name] = digest
                progress(self.stored[name].nbytes)
        config = json.dumps(self.raw_config, sort_keys=True).encode()
        tensors = b"".join(digests[name] for name in sorted(digests))
        return hashlib.sha256(config + tensors).hexdigest()

    def _scan_one(self, name: str) -> bytes:
        entry = self.stored[name]
        digest = hashlib.sha256(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        reach = quant.FP8_MAX if name.endswith(FP8_SCALE) else 1.0  # a scale's largest product
        with Files(self.repeated) as files:
            for start in range(0, entry.elements, SCAN_ELEMENTS):
                count = min(SCAN_ELEMENTS, entry.elements - start)
                values = files.read(entry, torch.empty(count, dtype=DTYPES[entry.dtype]), start)
                digest.update(values.view(torch.uint8).numpy().data)
                finite = torch.isfinite(values.float() * reach)
                if not bool(finite.all()):
                    raise _not_finite(name, entry, start + int((~finite).nonzero()[0]))
        return digest.digest()


def _not_finite(name: str, entry: Stored, element: int) -> CheckpointError:
    place = torch.unravel_index(torch.tensor(element), entry.shape)
    return CheckpointError(
        f"{entry.file}: {name} is not finite at {[int(index) for index in place]}",
        "fetch this shard again, or the checkpoint is broken",
    )


def open_checkpoint(root: Path, latent_norm_eps: float | None = None) -> Checkpoint:
    """Returns the checkpoint in `root` after checking its config, index, headers, names and shapes.

    Raises CheckpointError naming the file, tensor or key for anything missing, doubled, unexpected
    or wrongly shaped.
    """
    config, raw = read_config(root)
    config = config.with_latent_norm_eps(latent_norm_eps)
    _check_unquantized(raw.get("quantization_config") or {}, root / "config.json")
    stored = stored_tensors(root)
    _check_names(root, config, stored)
    return Checkpoint(root, config, raw, stored)


def _check_unquantized(section: Any, path: Path) -> None:
    if not isinstance(section, dict):
        raise CheckpointError(f"{path}: quantization_config is {section!r}, not a table", RESTORE)
    method = section.get("quant_method")
    if method not in (None, "fp8"):
        raise CheckpointError(
            f"{path}: quantization_config.quant_method is {method!r}",
            "give the BF16 or FP8 release, not an already quantized checkpoint",
        )
    blocks = section.get("weight_block_size", [quant.FP8_BLOCK] * 2)
    if blocks != [quant.FP8_BLOCK] * 2:
        raise CheckpointError(
            f"{path}: quantization_config.weight_block_size is {blocks!r}",
            f"GLM-5-FP8 has blocks of {quant.FP8_BLOCK} x {quant.FP8_BLOCK}",
        )


def _check_names(root: Path, config: ModelConfig, stored: dict[str, Stored]) -> None:
    fused = _fused_shapes(config)
    claimed: set[str] = set()
    for name, shape in fused.items():
        if name in stored:
            _check_entry(name, stored[name], shape)
            claimed.add(name)
    for spec in names.every_tensor(config):
        name = spec.name
        if spec.expert is not None and _fused_name(spec) in claimed:
            continue
        if name not in stored:
            if spec.optional:
                continue
            raise CheckpointError(
                f"{root}: tensor {name} is missing", "the checkpoint does not fit its config.json"
            )
        _check_entry(name, stored[name], spec.shape)
        claimed.add(name)
        if stored[name].dtype == FP8_DTYPE:
            _check_fp8_scale(name, spec.shape, stored)
            claimed.add(name + FP8_SCALE)
    unexpected = sorted(set(stored) - claimed)
    if unexpected:
        first = unexpected[0]
        raise CheckpointError(
            f"{stored[first].file}: unexpected tensor {first} ({len(unexpected)} in all)",
            "the checkpoint does not fit its config.json",
        )


def _fused_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        names.layer_prefix(layer) + module.path: module.shape
        for layer in range(config.num_layers)
        for module in names.layer_modules(config, layer)
        if module.stacked
    }


def _fused_name(spec: names.TensorSpec) -> str:
    path = names.DOWN if spec.name.endswith("down_proj.weight") else names.GATE_UP
    return names.layer_prefix(spec.layer or 0) + path


def _check_entry(name: str, entry: Stored, shape: Iterable[int]) -> None:
    if entry.shape != tuple(shape):
        raise CheckpointError(
            f"{entry.file}: {name} has shape {list(entry.shape)}, config.json asks {list(shape)}",
            "weights and config.json do not belong together",
        )
    if entry.dtype not in FLOAT_DTYPES and not (entry.dtype == FP8_DTYPE and len(entry.shape) == 2):
        raise CheckpointError(
            f"{entry.file}: {name} has dtype {entry.dtype}",
            "glm5q reads BF16, F16, F32 and block-scaled F8_E4M3 matrices",
        )


def _check_fp8_scale(name: str, shape: tuple[int, ...], stored: dict[str, Stored]) -> None:
    blocks = tuple(-(-size // quant.FP8_BLOCK) for size in shape)
    scale = name + FP8_SCALE
    if scale not in stored:
        raise CheckpointError(
            f"{stored[name].file}: {name} is FP8 and {scale} is missing", "fetch the scales too"
        )
    _check_entry(scale, stored[scale], blocks)
    if stored[scale].dtype == FP8_DTYPE:
        raise CheckpointError(
            f"{stored[scale].file}: {scale} has dtype {FP8_DTYPE}", "scales are F32 or BF16"
        )
