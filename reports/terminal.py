"""The verdict on a terminal: right at 80 columns, plain when piped, markup never parsed."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import text
from reports.record import RunRecord

Lines = list[tuple[str, str]]

_PLAIN = str.maketrans(
    {"\N{NARROW NO-BREAK SPACE}": " ", "\N{MINUS SIGN}": "-", "×": "x", "µ": "u"}
)


def plain(value: str) -> str:
    """A number's text without anything a log or a grep would trip over."""
    return value.translate(_PLAIN)


def show(record: RunRecord, console: Console) -> None:
    """Prints what the run lost and won, one fact a line, wrapped under its own column."""
    title = Text(headline(record), style="bold")
    console.print(title, soft_wrap=True, highlight=False)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in verdict(record):
        table.add_row(Text(name), Text(plain(value)))
    console.print(table, highlight=False)


def headline(record: RunRecord) -> str:
    """`GLM-5/5.1 -> h200, compressed-tensors for vllm`, as far as the record says."""
    source = record.source.variant if record.source else record.machine.device
    if record.recipe is None:
        return source
    recipe = record.recipe
    return f"{source} -> {recipe.name}, {recipe.format} for {recipe.engine}"


def verdict(record: RunRecord) -> Lines:
    """(name, value) lines in the page's order, then what was not measured."""
    known = _accuracy(record) + _size(record) + _budget(record)
    known += _fits(record) + _slowest(record)
    if record.layers:
        known.append(("fallbacks", _fallbacks(record)))
    if record.recipe:
        known.append(("checked so far", record.recipe.verification))
    absent = [
        name
        for name, there in (
            ("accuracy", record.accuracy),
            ("size", record.size),
            ("memory plan", record.memory),
            ("latency", record.latency),
        )
        if not there
    ]
    return known + ([("not measured", ", ".join(absent))] if absent else [])


def _accuracy(record: RunRecord) -> Lines:
    accuracy = record.accuracy
    if accuracy is None:
        return []
    sig, pct = text.significant, text.percent
    interval = f"{sig(accuracy.kl_low)} to {sig(accuracy.kl_high)}"
    interval += f", of {len(accuracy.window_kl)} windows only" if accuracy.few else ""
    lines = [
        ("KL", f"{sig(accuracy.kl_mean)} nats a token (95 %: {interval})"),
        ("top-1", f"{pct(accuracy.top1_agreement)} the same next token"),
        (
            "perplexity",
            f"{sig(accuracy.perplexity_source)} -> {sig(accuracy.perplexity_quantized)}",
        ),
    ]
    if accuracy.mtp:
        before, after = accuracy.mtp.acceptance_source, accuracy.mtp.acceptance_quantized
        lines.append(("MTP accepted", f"{pct(before)} -> {pct(after)}"))
    return lines


def _size(record: RunRecord) -> Lines:
    if record.size is None:
        return []
    size = record.size
    change = f"{text.size(size.source_bytes)} -> {text.size(size.quantized_bytes)}"
    return [("size", f"{change} ({text.times(size.ratio)} smaller)")]


def _budget(record: RunRecord) -> Lines:
    if record.budget is None:
        return []
    found = record.budget
    changed: dict[str, list[str]] = {}
    for unit in found.units:
        if unit.chosen:
            key = f"{unit.role} {unit.choices[unit.chosen].scheme}"
            changed.setdefault(key, []).append(str(unit.layer))
    said = "; ".join(f"{key} in {', '.join(layers)}" for key, layers in changed.items())
    bits = f"{text.bits(found.bits)} bits a weight with a choice"
    return [("budget", f"{text.size(found.asked)}: {bits}; {said or 'the recipe alone'}")]


def _fits(record: RunRecord) -> Lines:
    if record.memory is None:
        return []
    plan = record.memory
    load = f"{text.count(plan.context)} tokens x {text.count(plan.concurrency)}"
    fits = [f"{d.count} x {d.chip}" for d in plan.devices if d.fits]
    misfits = [f"{d.count} x {d.chip}" for d in plan.devices if not d.fits]
    lines = [("fits", f"{', '.join(fits) or 'none of those planned'} (at {load})")]
    return lines + ([("does not fit", ", ".join(misfits))] if misfits else [])


def _slowest(record: RunRecord) -> Lines:
    if record.slowest is None:
        return []
    row = record.latency[record.slowest]
    value = f"{row.op}, {text.seconds(row.median_s)} {row.how} on {row.device}"
    return [("slowest op", value)]


def _fallbacks(record: RunRecord) -> str:
    layers = len({fallback.layer for fallback in record.fallbacks})
    return f"{len(record.fallbacks)} (layers with any: {layers})" if layers else "none"
