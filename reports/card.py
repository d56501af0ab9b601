"""The model card: the Markdown file that belongs beside a published checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import PurePath

from glm5q.formats import hub, readme
from reports import terminal, text
from reports.markdown import block, code, escaped, table
from reports.record import DataInfo, Matrix, RunRecord, SourceInfo
from reports.terminal import plain

_LIBRARIES = {"vllm-ascend": "vllm"}  # engines that a hub knows by another name
_ELSEWHERE = {"fallbacks", "checked so far"}  # have sections of their own


def model_card(record: RunRecord) -> str:
    """Returns the card: what it is, what was lost and won, how it is served and was made.

    Facts come from the record alone; intended use and training data are for the source's card.
    """
    parts = [
        _front_matter(record),
        [f"# {escaped(_title(record))}", "", *_lead(record)],
        ["## What was lost and won", "", *_verdict(record)],
        _schemes(record),
        _serving(record),
        _verified(record),
        _fallbacks(record),
        _provenance(record),
    ]
    return "\n\n".join("\n".join(lines).rstrip() for lines in parts if lines) + "\n"


def _title(record: RunRecord) -> str:
    name = PurePath(record.source.path).name if record.source else "GLM-5"
    return f"{name}, quantized ({record.recipe.name})" if record.recipe else name


def _front_matter(record: RunRecord) -> list[str]:
    """The keys that model hubs read; values as JSON, which YAML reads too."""
    keys: dict[str, object] = _licence(record.source)
    if base := _base_model(record.source):
        keys |= {"base_model": base, "base_model_relation": "quantized"}
    if record.recipe:
        engine = record.recipe.engine
        keys["library_name"] = _LIBRARIES.get(engine, engine)
    keys["pipeline_tag"] = "text-generation"
    keys["quantized_by"] = f"glm5q {record.machine.versions.get('glm5q', '')}".strip()
    keys["tags"] = _tags(record)
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()]
    return ["---", *lines, "---"]


def _base_model(source: SourceInfo | None) -> str | None:
    """The source's name on a hub; that of older records by its folder's."""
    if source is None:
        return None
    return source.base_model or hub.published(PurePath(source.path).name)


def _licence(source: SourceInfo | None) -> dict[str, object]:
    """The source's licence. A hub's form for one that is not known is `other` with a name."""
    if source and source.license:
        found = {
            "license": source.license,
            "license_name": source.license_name,
            "license_link": source.license_link,
        }
        return {key: value for key, value in found.items() if value}
    keys: dict[str, object] = {"license": "other", "license_name": "see-base-model"}
    if base := _base_model(source):
        keys["license_link"] = f"https://huggingface.co/{base}"
    return keys


def _tags(record: RunRecord) -> list[str]:
    """What a hub's filters find it by: format, number formats, widths."""
    tags = ["glm5q", "quantized"]
    if record.recipe:
        tags.append(record.recipe.format)
    words = {word for scheme in _quantized(record) for word in scheme.split()}
    formats = [name for name in ("int4", "int8", "fp8") if name in words]
    widths = {"int4": "4-bit", "int8": "8-bit", "fp8": "8-bit"}
    return list(dict.fromkeys([*tags, *formats, *(widths[name] for name in formats)]))


def _quantized(record: RunRecord) -> list[str]:
    """The schemes of what was not kept, each once."""
    found = [m.scheme for layer in record.layers for m in layer.matrices if m.method != "keep"]
    return list(dict.fromkeys(found))


def _lead(record: RunRecord) -> list[str]:
    if record.recipe is None:
        return []
    recipe, variant = record.recipe, record.source.variant if record.source else "GLM-5"
    lead = (
        f"{escaped(variant)} quantized by glm5q with the recipe {code(recipe.name)}, in "
        f"{escaped(recipe.format)} format for {escaped(recipe.engine)}; target "
        f"{escaped(recipe.target)}."
    )
    if _base_model(record.source) is None:
        lead += " The source's name on a hub is not in the record: add `base_model` to publish."
    return [lead]


def _verdict(record: RunRecord) -> list[str]:
    rows = [
        (escaped(name), escaped(plain(value)))
        for name, value in terminal.verdict(record)
        if name not in _ELSEWHERE
    ]
    lines = table(("what", "result"), rows, numeric=0)
    if record.accuracy:
        data = record.accuracy.data
        tokens = text.count(data.windows * data.sequence_length)
        lines += ["", f"Judged on {tokens} tokens that calibration did not see ({_data(data)})."]
    return lines


@dataclass
class _Scheme:
    """All matrices of one role in one scheme."""

    methods: set[str] = field(default_factory=set)
    bits: list[float] = field(default_factory=list)
    matrices: int = 0

    def add(self, matrix: Matrix) -> None:
        self.methods |= set(matrix.method.split("+"))
        self.bits.append(matrix.bits)
        self.matrices += matrix.matrices

    def cells(self) -> tuple[str, str, str]:
        ends = dict.fromkeys((text.bits(min(self.bits)), text.bits(max(self.bits))))
        return ", ".join(sorted(self.methods)), " to ".join(ends), text.count(self.matrices)


def _schemes(record: RunRecord) -> list[str]:
    """A row a role and scheme, in order of appearance: methods, least and most bits, matrices."""
    found: dict[str, dict[str, _Scheme]] = {}
    for layer in record.layers:
        for matrix in layer.matrices:
            schemes = found.setdefault(matrix.role, {})
            schemes.setdefault(matrix.scheme, _Scheme()).add(matrix)
    if not found:
        return []
    rows = []
    for role, schemes in found.items():
        for scheme, every in schemes.items():
            methods, bits, matrices = every.cells()
            rows.append((code(role), escaped(scheme), escaped(methods), bits, matrices))
    head = ("role", "scheme", "methods", "bits a weight", "matrices")
    return ["## Quantization", "", *table(head, rows, numeric=2)]


def _serving(record: RunRecord) -> list[str]:
    """The commands that the checkpoint's own README gives."""
    schemes = _quantized(record)
    if record.recipe is None or not schemes:
        return []
    fp8 = any(s.startswith("int") and s.endswith("+ fp8") for s in schemes)
    cpu = any(s.startswith("int4") and s.endswith("+ int8") for s in _quantized(record))
    engines = readme.engines(record.recipe.format, fp8, cpu=cpu, engine=record.recipe.engine)
    mtp = record.source.mtp_layers if record.source else 0
    return ["## Serving", "", "From this folder.", "", *readme.serving_lines(engines, mtp)]


def _verified(record: RunRecord) -> list[str]:
    if record.recipe is None:
        return []
    words = escaped(record.recipe.verification)
    if record.recipe.declared:
        words = f"> **{words}.** Nothing here was run on this target."
    elif record.recipe.edited:
        words = f"> **{words}.**"
    else:
        words = f"{words[:1].upper()}{words[1:]}."
    return ["## What was verified", "", words]


def _fallbacks(record: RunRecord) -> list[str]:
    """What did not go as the recipe asked: counted by action, so that the card stays short."""
    if not record.layers:
        return []
    if not record.fallbacks:
        return ["## Fallbacks", "", "None: everything went as the recipe asked."]
    actions = Counter(fallback.action for fallback in record.fallbacks)
    rows = [(escaped(action), text.count(number)) for action, number in actions.items()]
    return ["## Fallbacks", "", *table(("what was done", "times"), rows, numeric=1)]


def _provenance(record: RunRecord) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in record.machine.versions.items())
    rows = [("made", record.created), ("on", record.machine.device), ("with", versions)]
    if record.source:
        rows.append(("source hash", record.source.content_hash))
    if record.recipe:
        rows.append(("recipe hash", record.recipe.content_hash))
    lines = [f"- {name}: {escaped(value)}" for name, value in rows]
    if record.calibration:
        lines.append(f"- calibration data: {_data(record.calibration)}")
    lines += [f"- note: {escaped(note)}" for note in record.notes]
    return ["## How it was made", "", *block(record.command, "sh"), "", *lines]


def _data(data: DataInfo) -> str:
    shape = f"{text.count(data.windows)} x {text.count(data.sequence_length)} tokens"
    return f"{escaped(data.name)}, {shape}, seed {data.seed}, {code(data.content_hash[:16])}"
