"""An ONNX export read again: the graph by onnx's own checker, weights from their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5q.errors import UserError
from glm5q.verify.files import read_json
from glm5q.verify.folds import FoldedSource
from glm5q.verify.layouts import Held, dequantized
from glm5q.verify.model import Linear, Model
from glm5q.verify.report import Report, Row, row
from glm5q.verify.source import changed_files
from glm5q.verify.weights import Found, check_codes

MODEL = "model.onnx"
# onnx.proto, TensorProto.DataType
TYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    16: torch.bfloat16,
}
TOKENS = 8


class Weights:
    """The initializers that lie outside the graph, by name."""

    def __init__(self, root: Path, model: Any) -> None:
        self.root = root
        self.entries: dict[str, tuple[str, int, int, torch.dtype, tuple[int, ...]]] = {}
        for tensor in model.graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                offset, length = int(place.get("offset", 0)), int(place.get("length", 0))
                dtype = TYPES.get(tensor.data_type, torch.float32)
                shape = tuple(tensor.dims)
                self.entries[tensor.name] = (place["location"], offset, length, dtype, shape)

    def problems(self) -> Iterator[str]:
        """Yields tensors whose bytes are not their shape's, overlap, or lie past the file's end."""
        ends: dict[str, int] = {}
        ordered = sorted(self.entries.items(), key=lambda item: item[1][:2])
        for name, (file, offset, length, dtype, shape) in ordered:
            path = self.root / file
            if not path.exists():
                yield f"{name}: {file} is missing"
            elif offset + length > path.stat().st_size:
                yield f"{name}: ends at byte {offset + length}, {file} has {path.stat().st_size}"
            if length != math.prod(shape) * dtype.itemsize:
                yield f"{name}: {length} bytes for {list(shape)} of {dtype}"
            if offset < ends.get(file, 0):
                yield f"{name}: overlaps the tensor before it"
            ends[file] = offset + length

    def read(self, name: str) -> Tensor:
        file, offset, length, dtype, shape = self.entries[name]
        with (self.root / file).open("rb") as data:
            data.seek(offset)
            raw = bytearray(data.read(length))
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


def verify_onnx(root: Path, source: Path | None) -> Report:
    """Returns the rows of an ONNX export. Raises UserError where onnx is not installed."""
    onnx = _package("onnx")
    try:
        onnx.checker.check_model(str(root / MODEL))
        model = onnx.load(str(root / MODEL), load_external_data=False)
    except Exception as error:  # its ValidationError is none of ours to import
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        failed = Row("graph", "fail", text, (text,))
        return Report(str(root), "onnx", (failed,), ())
    weights = Weights(root, model)
    problems = list(weights.problems())
    original = None if source is None else _folded(source, root, weights)
    rows = [
        row("graph", [], f"onnx {onnx.__version__}'s checker, {len(model.graph.node):,} nodes"),
        row("data", problems, f"{len(weights.entries)} tensors, whole and apart"),
    ]
    if not problems:
        rows += _weight_rows(root, weights, original)
        rows.append(_runtime(root, model))
    if original is not None:
        rows.append(row("tokenizer", changed_files(root, original.root), "files unchanged"))
    return Report(str(root), "onnx", tuple(rows), ())


def _folded(source: Path, root: Path, weights: Weights) -> FoldedSource:
    """Returns the source as it was folded, if it was, before it was quantized."""

    def matrix(linear: Linear) -> Tensor | None:
        name, rows = _stored_name(linear)
        if name + ".codes" not in weights.entries:
            return _kept(weights, linear, name)[rows]
        codes, scale = (part[rows] for part in _unpacked(weights, name, linear))
        return dequantized(codes, scale, "int8")

    def vector(name: str) -> Tensor | None:
        return weights.read(name) if name in weights.entries else None

    return FoldedSource(source, Model(read_json(root / "config.json") or {}), matrix, vector)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{name} is not installed", "pip install 'glm5q[onnx]'") from None


def _weight_rows(root: Path, weights: Weights, source: FoldedSource | None) -> list[Row]:
    config = read_json(root / "config.json") or {}
    model = Model(config)
    found, missing = Found(), []
    layers = config.get("glm5q_onnx_layers") or []
    for layer in layers:
        for name, _ in model.vectors(layer):
            if name not in weights.entries:
                missing.append(f"{name} is missing")
            elif source is not None and not torch.equal(
                weights.read(name).float(), source.tensor(name).float()
            ):
                found.kept.append(f"{name}: not the source's values")
        for linear in model.linears(layer):
            try:
                _check_linear(weights, linear, source, found)
            except KeyError as error:
                missing.append(f"{error.args[0]} is missing")
    said = f"layers {layers[0]} to {layers[-1]}, none missing" if layers else "no layers"
    if not layers:
        missing.append("config.json has no glm5q_onnx_layers")
    rows = [
        row("tensors", missing, said),
        row("scales", found.scales, "all finite, none zero"),
        row("codes", found.codes, f"{found.matrices} matrices, codes on their grids"),
        row("kept", found.kept, f"equal to the source{source.said()}" if source else "finite"),
    ]
    if source is None:
        return [*rows, Row("weights", "skip", "give --source to compare")]
    return [*rows, row("weights", found.weights, "each matrix within its grid's rounding")]


def _check_linear(
    weights: Weights, linear: Linear, source: FoldedSource | None, found: Found
) -> None:
    found.matrices += 1
    name, rows = _stored_name(linear)
    if name + ".codes" in weights.entries:
        codes, scale = (part[rows] for part in _unpacked(weights, name, linear))
        four = int(codes.min()) >= -8 and int(codes.max()) <= 7
        check_codes(linear, Held("int4" if four else "int8"), codes, scale, source, found)
        return
    kept = _kept(weights, linear, name)[rows].float()
    if not bool(torch.isfinite(kept).all()):
        found.kept.append(f"{linear.name}: not finite")
    if source is not None:
        original = source.weight(linear)
        if original is None or not torch.equal(kept, original[0].to(kept.dtype)):
            found.kept.append(f"{linear.name}: kept, but not the source's values")


def _stored_name(linear: Linear) -> tuple[str, slice]:
    """Returns what the graph calls a linear's weights, and its rows: gate and up are one matrix."""
    if linear.expert is None:
        return linear.name, slice(None)
    prefix, _, projection = linear.name.rpartition(".")
    stack = prefix.rpartition(".")[0]
    if projection == "down_proj":
        return f"{stack}.down_proj.{linear.expert}", slice(None)
    start = linear.shape[0] if projection == "up_proj" else 0
    return f"{stack}.gate_up_proj.{linear.expert}", slice(start, start + linear.shape[0])


def _unpacked(weights: Weights, name: str, linear: Linear) -> tuple[Tensor, Tensor]:
    """Returns codes [out, in] and scale [out, groups].

    MatMulInteger: int8 [in, out] or [groups, in, out]; MatMulNBits: uint8 [out, groups, bytes], the
    lower nibble first, zero point 8.
    """
    codes, scale = weights.read(name + ".codes"), weights.read(name + ".scale").float()
    if codes.dtype == torch.uint8:
        both = torch.stack((codes % 16, codes // 16), -1).flatten(1)
        return both.to(torch.int16) - 8, scale
    out = codes.shape[-1]
    groups = codes.shape[0] if codes.dim() == 3 else 1
    matrix = codes.reshape(linear.shape[1], out).t().to(torch.int16)
    return matrix, scale.reshape(groups, out).t()


def _kept(weights: Weights, linear: Linear, name: str) -> Tensor:
    """Returns a kept matrix; kv_b_proj lies apart as keys and transposed values a head."""
    if linear.kind != "kv_b":
        return weights.read(name + (".weight" if linear.expert is None else ""))
    key, value = weights.read(name + ".key"), weights.read(name + ".value").transpose(1, 2)
    return torch.cat((key, value), 1).flatten(0, 1)


def _runtime(root: Path, model: Any) -> Row:
    """ONNX Runtime, where it is installed, loads the graph and gives finite results."""
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return Row("engine ONNX Runtime", "skip", "onnxruntime is not installed")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = runtime.InferenceSession(
            str(root / MODEL), options, providers=["CPUExecutionProvider"]
        )
        given = session.get_inputs()[0]
        if given.name == "input_ids":
            feed = torch.arange(TOKENS).numpy()
        else:
            generator = torch.Generator().manual_seed(0)
            feed = torch.randn((TOKENS, given.shape[1]), generator=generator).numpy()
        result = session.run([model.graph.output[-1].name], {given.name: feed})[0]
    except Exception as error:  # the runtime raises its own kinds
        return row("engine ONNX Runtime", [str(error).splitlines()[0]], "")
    bad = [] if bool(torch.isfinite(torch.from_numpy(result)).all()) else ["result is not finite"]
    return row("engine ONNX Runtime", bad, f"{runtime.__version__} runs it on {TOKENS} tokens")


__all__ = ["MODEL", "verify_onnx"]
