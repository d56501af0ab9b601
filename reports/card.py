"""The model card: the Markdown file that belongs beside a published checkpoint."""

from __future__ import annotations

import json
from pathlib import PurePath

from reports import terminal, text
from reports.markdown import code, escaped, table
from reports.record import DataInfo, RunRecord
from reports.terminal import plain


def model_card(record: RunRecord) -> str:
    """Returns the card: what it is, what was lost and won, how it was made, what was not measured.

    Facts come from the record alone; the source's own licence and intended use are for its card.
    """
    parts = [
        _front_matter(record),
        [f"# {escaped(_title(record))}", "", *_lead(record)],
        ["## What was lost and won", "", *_verdict(record)],
        _schemes(record),
        _worst(record),
        _provenance(record),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _title(record: RunRecord) -> str:
    name = PurePath(record.source.path).name if record.source else "GLM-5"
    return f"{name}, quantized ({record.recipe.name})" if record.recipe else name


def _front_matter(record: RunRecord) -> list[str]:
    """The few keys that model hubs read; strings as JSON, which YAML reads too."""
    tags = ["glm5q", "quantized"]
    lines = ["---"]
    if record.recipe:
        lines.append(f"library_name: {json.dumps(record.recipe.engine)}")
        tags.append(record.recipe.format)
    return [*lines, f"tags: {json.dumps(tags)}", "---"]


def _lead(record: RunRecord) -> list[str]:
    if record.recipe is None:
        return []
    recipe, variant = record.recipe, record.source.variant if record.source else "GLM-5"
    lead = (
        f"{escaped(variant)} quantized by glm5q with the recipe {code(recipe.name)}, in "
        f"{escaped(recipe.format)} format for {escaped(recipe.engine)}; target "
        f"{escaped(recipe.target)}."
    )
    if not recipe.declared:
        return [lead]
    warning = f"> **{escaped(recipe.verification)}.** Nothing here was run on this target."
    return [lead, "", warning]


def _verdict(record: RunRecord) -> list[str]:
    rows = [(escaped(name), escaped(plain(value))) for name, value in terminal.verdict(record)]
    lines = table(("", ""), rows, numeric=0)
    if record.accuracy:
        data = record.accuracy.data
        tokens = text.count(data.windows * data.sequence_length)
        lines += ["", f"Judged on {tokens} tokens that calibration did not see ({_data(data)})."]
    return lines


def _schemes(record: RunRecord) -> list[str]:
    """Role -> its schemes, methods and bits, in order of appearance."""
    seen: dict[tuple[str, str, str, float], int] = {}
    for layer in record.layers:
        for matrix in layer.matrices:
            key = (matrix.role, matrix.scheme, matrix.method, matrix.bits)
            seen[key] = seen.get(key, 0) + matrix.matrices
    if not seen:
        return []
    rows = [
        (code(role), escaped(scheme), escaped(method), text.bits(bits), text.count(number))
        for (role, scheme, method, bits), number in seen.items()
    ]
    head = ("role", "scheme", "method", "bits", "matrices")
    return ["## Schemes", "", *table(head, rows, numeric=2)]


def _worst(record: RunRecord) -> list[str]:
    """What did not go as the recipe asked: counted by reason, so that the card stays short."""
    if not record.fallbacks:
        return []
    actions: dict[str, int] = {}
    for fallback in record.fallbacks:
        actions[fallback.action] = actions.get(fallback.action, 0) + 1
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
    fence = "```" if "```" not in record.command else "~~~~"
    return ["## How it was made", "", f"{fence}sh", record.command, fence, "", *lines]


def _data(data: DataInfo) -> str:
    shape = f"{text.count(data.windows)} x {text.count(data.sequence_length)} tokens"
    return f"{escaped(data.name)}, {shape}, seed {data.seed}, {code(data.content_hash[:16])}"
