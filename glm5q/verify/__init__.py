"""Proof on a CPU that an engine will load a quantized checkpoint right.

Reads the files again through code that shares nothing with the writers: bytes, names, layouts and
the engines' rules are stated here a second time, each rule with its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from glm5q.errors import CheckpointError
from glm5q.verify import checks, ct_rules, engines, layouts, parallel
from glm5q.verify.files import INDEX_SUFFIX, Files, open_files, read_json
from glm5q.verify.folds import FoldedSource
from glm5q.verify.layouts import Held
from glm5q.verify.model import Linear, Model
from glm5q.verify.onnx_graph import MODEL, verify_onnx
from glm5q.verify.report import Report, Row, row
from glm5q.verify.source import changed_config, changed_files
from glm5q.verify.weights import Found, check_matrix, held_weight, whole

DESCRIPTION = "quant_model_description.json"
STEMS = {"modelslim": "quant_model_weights"}


def verify(root: Path, source: Path | None = None) -> Report:
    """Returns every check's row for the checkpoint in `root`, compared with `source` if given.

    Raises CheckpointError when there is nothing to verify: no folder, no config, no known format.
    """
    config = read_json(root / "config.json")
    if config is None:
        raise CheckpointError(f"{root / 'config.json'}: missing or not JSON", "give a checkpoint")
    if source is not None and read_json(source / "config.json") is None:
        raise CheckpointError(f"{source}: no config.json", "give the source checkpoint's folder")
    try:
        if (root / MODEL).exists():
            return verify_onnx(root, source)
        form = format_of(root, config)
        return _Verification(root, config, form, source).report()
    except KeyError as error:
        raise CheckpointError(
            f"{root / 'config.json'}: {error.args[0]} is missing", "restore the file"
        ) from None


def format_of(root: Path, config: dict[str, Any]) -> str:
    """Returns the format of the checkpoint, by the marks its engine knows it by."""
    stem = STEMS["modelslim"]
    if (root / DESCRIPTION).exists() or (root / f"{stem}{INDEX_SUFFIX}").exists():
        return "modelslim"
    method = (config.get("quantization_config") or {}).get("quant_method")
    names = {"compressed-tensors": "compressed-tensors", "w4afp8": "sglang-w4afp8"}
    if method not in names:
        raise CheckpointError(
            f"{root}: quant_method {method!r} is in no format glm5q writes",
            "give an output of `glm5q calibrate` or `glm5q export`",
        )
    return names[method]


class _Verification:
    """One run: what was read, and the rows it gives."""

    def __init__(self, root: Path, config: dict[str, Any], form: str, source: Path | None) -> None:
        self.root, self.config, self.form = root, config, form
        self.model = Model(config)
        self.stem = STEMS.get(form, "model")
        self.files: Files = open_files(root, self.stem)
        self.quantization = config.get("quantization_config") or {}
        self.description = read_json(root / DESCRIPTION) if form == "modelslim" else None
        self.record = read_json(root / "report.json")
        self.holdings = self._holdings()
        self.source = None if source is None else self._folded(source)

    def _folded(self, source: Path) -> FoldedSource:
        """Returns the source as it was folded, if it was, before it was quantized."""

        def matrix(linear: Linear) -> Tensor | None:
            what = self.holdings.get(linear.name)
            return held_weight(self.files, self.form, linear, what)

        def vector(name: str) -> Tensor | None:
            return self.files.read(name) if name in self.files.entries else None

        return FoldedSource(source, self.model, matrix, vector)

    def _holdings(self) -> dict[str, Held]:
        found = {}
        for layer in self.model.layers:
            for linear in self.model.linears(layer):
                what = layouts.held(self.files, linear, self.form, self._bits(linear.name))
                if what is not None:
                    found[linear.name] = what
        return found

    def _bits(self, name: str) -> int | None:
        """The bits that a compressed-tensors config claims: int4 may lie one a byte."""
        if self.form != "compressed-tensors" or "config_groups" not in self.quantization:
            return None
        try:
            claim = ct_rules.vllm(self.quantization, name)
        except ct_rules.RefusedError:
            return None
        return claim.bits if claim else None

    def report(self) -> Report:
        rows = [
            row("index", self.files.index_problems, "names each shard's tensors, total_size true"),
            row("shards", self.files.shard_problems, f"{self.files.shards} whole files"),
            *self._tensor_rows(),
            checks.siblings(self.model, self.holdings),
            checks.schedule(self.model),
            *self._engine_rows(),
            *self._source_rows(),
        ]
        fits = [fit for engine in self._engines() for fit in parallel.fits(engine, self.config)]
        return Report(str(self.root), self.form, tuple(rows), tuple(fits))

    def _tensor_rows(self) -> list[Row]:
        copies = any(name in self.files.entries for name, _ in self.model.copies())
        wanted, lost = checks.expected(self.form, self.model, self.holdings, copies)
        found = self._matrices()
        checks.vectors(self.files, self.model, self.source, found)
        index = read_json(self.root / f"{self.stem}{INDEX_SUFFIX}") or {}
        compared = self.source is not None
        same = "" if self.source is None else f", equal to the source{self.source.said()}"
        rows = [
            checks.tensors(self.files, wanted, lost),
            checks.layout_row(self.files, wanted, self.source),
            row("scales", found.scales, "all finite, none zero"),
            row("codes", found.codes, f"{found.matrices} matrices, codes on their grids"),
            row("kept", found.kept, "finite" + same),
            checks.mtp(self.files, self.model, set(index.get("weight_map") or {})),
            checks.size(self.files, wanted, self.record),
            checks.record_row(self.record, found, self.files, compared, self.holdings),
        ]
        if compared:
            said = "each matrix within what its grid's rounding allows"
            rows.append(row("weights", found.weights, said))
        else:
            rows.append(Row("weights", "skip", "give --source to compare"))
        return rows

    def _matrices(self) -> Found:
        """Looks into every matrix whose tensors are all there in the right shape."""
        found = Found()
        for layer in self.model.layers:
            for linear in self.model.linears(layer):
                what = self.holdings.get(linear.name)
                if what is not None and whole(self.files, self.form, linear, what):
                    check_matrix(self.files, self.form, linear, what, self.source, found)
        return found

    def _engine_rows(self) -> list[Row]:
        if self.form == "modelslim":
            tensors = set(self.files.entries)
            return engines.modelslim(self.description, self.config, self.model, tensors)
        if self.form == "sglang-w4afp8":
            return engines.w4afp8(self.model, self.holdings)
        return engines.compressed_tensors(self.quantization, self.model, self.holdings)

    def _engines(self) -> list[str]:
        if self.form == "modelslim":
            return ["vllm-ascend"]
        if self.form == "sglang-w4afp8":
            return ["sglang-w4afp8"]
        packed = any(what.packed for what in self.holdings.values())
        return ["vllm", "sglang"] if packed else ["vllm-cpu"]

    def _source_rows(self) -> list[Row]:
        if self.source is None:
            return [Row("tokenizer", "skip", "give --source to compare")]
        theirs = read_json(self.source.root / "config.json") or {}
        files = changed_files(self.root, self.source.root)
        return [
            row("tokenizer", files, "tokenizer, template and generation files unchanged"),
            row("config", changed_config(self.config, theirs), "as the source's, but quantization"),
        ]


__all__ = ["Report", "verify"]
