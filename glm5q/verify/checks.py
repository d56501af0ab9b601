"""The checks that need no engine: tensors, vectors, siblings, MTP, the record's claims, bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from glm5q.verify import layouts
from glm5q.verify.files import DTYPES, Files
from glm5q.verify.layouts import Held, Layout
from glm5q.verify.model import Model
from glm5q.verify.report import Row, row
from glm5q.verify.source import Source
from glm5q.verify.weights import Found

CLAIM_TOLERANCE = 1e-3
BIAS = "e_score_correction_bias"
FP32 = ("F32",)


def expected(
    form: str, model: Model, holdings: Mapping[str, Held], copies: bool
) -> tuple[Layout, list[str]]:
    """Returns every tensor there must be with dtypes and shape, and linears that have no weight."""
    wanted: Layout = {name: (layouts.FLOATS, shape) for name, shape in model.top()}
    lost = []
    for layer in model.layers:
        for name, length in model.vectors(layer):
            wanted[name] = (FP32 if name.endswith(BIAS) else layouts.FLOATS, (length,))
        for linear in model.linears(layer):
            what = holdings.get(linear.name)
            if what is None:
                lost.append(linear.name + ".weight")
            else:
                wanted |= layouts.layout(form, linear, what)
    if copies:
        wanted |= {name: (layouts.FLOATS, shape) for name, shape in model.copies()}
    return wanted, lost


def tensors(files: Files, wanted: Layout, lost: list[str]) -> Row:
    """Every expected tensor is there, and no other."""
    problems = [f"{name} is missing" for name in lost]
    problems += [f"{name} is missing" for name in wanted if name not in files.entries]
    problems += [f"{name} is not expected" for name in files.entries if name not in wanted]
    return row("tensors", problems, f"{len(files.entries)} tensors, none missing, none extra")


def layout_row(files: Files, wanted: Layout, source: Source | None) -> Row:
    """Every tensor has the dtype and shape that its scheme asks for.

    The correction bias is F32, or as the source has it: bfloat16 reroutes tokens.
    """
    problems = []
    for name, (dtypes, shape) in wanted.items():
        entry = files.entries.get(name)
        if entry is None:
            continue
        if name.endswith(BIAS) and source is not None and source.has(name):
            dtypes = (source.dtype(name),)
        if entry.dtype not in dtypes:
            problems.append(f"{name} is {entry.dtype}, must be {' or '.join(dtypes)}")
        if entry.shape != shape:
            problems.append(f"{name} is {list(entry.shape)}, must be {list(shape)}")
    return row("layout", problems, "every dtype and shape as its scheme asks")


def vectors(files: Files, model: Model, source: Source | None, found: Found) -> None:
    """Adds norms, biases, embedding and head that are not finite or not the source's to `found`."""
    plain = [name for layer in model.layers for name, _ in model.vectors(layer)]
    plain += [name for name, _ in model.top()]
    originals = {name: name for name in plain}
    for name, _ in model.copies():
        head = name.endswith("shared_head.head.weight") and source is not None
        tied = bool(model.raw.get("tie_word_embeddings"))
        original = "lm_head.weight" if head and not tied else "model.embed_tokens.weight"
        originals[name] = name if source is not None and source.has(name) else original
    for name, original in originals.items():
        if name not in files.entries:
            continue
        mine = files.read(name)
        if not bool(torch.isfinite(mine).all()):
            found.kept.append(f"{name}: not finite")
        if source is None:
            continue
        if not source.has(original):
            found.kept.append(f"{name}: not in the source")
        elif not torch.equal(mine, source.tensor(original)):
            found.kept.append(f"{name}: not the source's values")


def siblings(model: Model, holdings: Mapping[str, Held]) -> Row:
    """Engines fuse gate with up and q_a with kv_a, and read one scheme for a layer's experts."""
    problems = []
    for layer in model.layers:
        prefix = f"model.layers.{layer}."
        pairs = [(prefix + "self_attn.q_a_proj", prefix + "self_attn.kv_a_proj_with_mqa")]
        for mlp in ("mlp.", "mlp.shared_experts."):
            pairs.append((f"{prefix}{mlp}gate_proj", f"{prefix}{mlp}up_proj"))
        for left, right in pairs:
            a, b = holdings.get(left), holdings.get(right)
            if a is not None and b is not None and a != b:
                problems.append(f"{left} is {a.label()}, {right} {b.label()}")
        experts = [x for x in model.linears(layer) if x.expert is not None and x.name in holdings]
        for linear in experts[1:]:
            first, other = holdings[experts[0].name], holdings[linear.name]
            if first != other:
                problems.append(
                    f"{linear.name} is {other.label()}, {experts[0].name} {first.label()}"
                )
    return row("siblings", problems, "fused pairs alike, one scheme a layer's experts")


def schedule(model: Model) -> Row:
    """vLLM 0.33 does not read `indexer_types`: index_topk_freq and its offset must say the same.

    And without `indexer_rope_interleave` vLLM and SGLang rotate the indexer by halves.
    """
    other = [
        layer
        for layer in range(model.decoder_layers)
        if model.has_indexer(layer) != model.full_by_frequency(layer)
    ]
    said = []
    if other:
        said.append(
            f"vLLM reads another indexer schedule than indexer_types, from layer {other[0]}"
        )
    if not model.raw.get("indexer_rope_interleave"):
        said.append("indexer_rope_interleave is not true: engines rotate the indexer by halves")
    if said:
        return Row("indexer schedule", "note", "; ".join(said), tuple(said))
    return Row("indexer schedule", "ok", "as vLLM reads it too")


def mtp(files: Files, model: Model, indexed: set[str]) -> Row:
    """MTP layers are in config.json, files and index: peers drop them, or their index does."""
    if not model.mtp_layers:
        extra = sorted(
            name
            for name in files.entries
            if name.startswith(f"model.layers.{model.decoder_layers}.")
        )
        return row(
            "mtp", [f"{name}, config.json has no MTP layer" for name in extra], "no MTP layer"
        )
    problems = []
    for layer in model.layers[model.decoder_layers :]:
        needed = [name for name, _ in model.vectors(layer)]
        needed += [f"model.layers.{layer}.eh_proj.weight", f"model.layers.{layer}.mlp.gate.weight"]
        for name in needed:
            if name not in files.entries:
                problems.append(f"{name} is missing")
            elif indexed and name not in indexed:
                problems.append(f"{name} is not in the index")
    return row("mtp", problems, f"{model.mtp_layers} MTP layer(s), in files and index")


def record_row(
    record: Mapping[str, Any] | None,
    found: Found,
    files: Files,
    compared: bool,
    holdings: Mapping[str, Held],
) -> Row:
    """report.json's claims: bytes a layer, schemes, and each module's weight error."""
    if record is None:
        return Row("record", "skip", "no report.json beside the weights")
    problems = list(_record_problems(record, found, files, compared, holdings))
    said = "bytes and schemes a layer as claimed"
    return row("record", problems, said + (", weight errors too" if compared else ""))


def _record_problems(
    record: Mapping[str, Any],
    found: Found,
    files: Files,
    compared: bool,
    holdings: Mapping[str, Held],
) -> Iterator[str]:
    for layer in record.get("layers") or []:
        number = layer["layer"]
        prefix = f"model.layers.{number}."
        size = sum(entry.size for name, entry in files.entries.items() if name.startswith(prefix))
        if size != layer["quantized_bytes"]:
            yield f"layer {number} has {size} bytes, the record says {layer['quantized_bytes']}"
        for matrix in layer["matrices"]:
            module, claimed = f"{number} {matrix['module']}", matrix.get("weight_error")
            scheme = _scheme_problem(prefix, matrix, holdings)
            if scheme:
                yield scheme
            sums = found.squares.get(module)
            if not compared or claimed is None or sums is None:
                continue
            mine = math.sqrt(sums[0] / max(sums[1], 1e-30))
            if abs(mine - claimed) > CLAIM_TOLERANCE * max(mine, claimed) + 1e-7:
                yield f"layer {module}: weight error {mine:.5f}, the record claims {claimed:.5f}"


def _scheme_problem(
    prefix: str, matrix: Mapping[str, Any], holdings: Mapping[str, Held]
) -> str | None:
    path = matrix["module"]
    if path.startswith("mlp.experts."):
        path = "mlp.experts.0." + ("down_proj" if path.endswith("down_proj") else "gate_proj")
    what = holdings.get(prefix + path)
    if what is None or what.kind == "float" or matrix["scheme"].startswith(what.label()):
        return None
    if what.group is None and matrix["scheme"].startswith(f"{what.kind} g"):
        return None  # a group that spans the row
    return f"{prefix}{path} holds {what.label()}, the record says {matrix['scheme']}"


def size(files: Files, wanted: Layout, record: Mapping[str, Any] | None) -> Row:
    """Bytes are the plan's: every expected tensor's, and the record's total."""
    planned = 0
    for name, (dtypes, shape) in wanted.items():
        entry = files.entries.get(name)
        dtype = entry.dtype if entry is not None and entry.dtype in dtypes else dtypes[0]
        planned += math.prod(shape) * DTYPES[dtype][1]
    problems = []
    if planned != files.data_bytes:
        problems.append(f"{files.data_bytes} bytes, {planned} planned")
    claimed = ((record or {}).get("size") or {}).get("quantized_bytes")
    if claimed is not None and claimed != files.data_bytes:
        problems.append(f"{files.data_bytes} bytes, the record says {claimed}")
    return row("size", problems, f"{files.data_bytes:,} bytes, as planned")
