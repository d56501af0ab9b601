"""`glm5q compare`: a comparison as a page, as Markdown for a pull request, and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import html, view
from reports.comparison import Cell, Comparison, Metric, compare
from reports.gate import check
from reports.markdown import code, escaped, table
from reports.terminal import plain
from reports.text import FORMATS, signed, times

__all__ = ["Comparison", "as_json", "check", "compare", "markdown", "page", "show", "write_page"]

_SCRIPTS = ("core", "tables", "curves", "compare")
_SHORT = {
    "better": "better",
    "worse": "worse",
    "within noise": "noise",
    "equal": "equal",
    "no interval": "unknown",
    "not measured": "absent",
}
_STYLES = {"better": "blue", "worse": "dark_orange3", "not measured": "dim", "no interval": "dim"}


def page(comparison: Comparison) -> str:
    """Returns the runs side by side as one self-contained page."""
    return html.fill(
        "compare.html.j2",
        {"comparison": comparison, "runs": comparison.records, "groups": grouped(comparison)},
        view.comparison_data(comparison),
        _SCRIPTS,
    )


def write_page(comparison: Comparison, path: Path) -> None:
    """Writes the page, whole or not at all."""
    html.write_text(path, page(comparison))


def grouped(comparison: Comparison) -> dict[str, list[int]]:
    """Group -> indices into `metrics`, in order."""
    groups: dict[str, list[int]] = {}
    for index, metric in enumerate(comparison.metrics):
        groups.setdefault(metric.group, []).append(index)
    return groups


def headline(comparison: Comparison) -> list[Metric]:
    """The metrics a terminal or a pull request has room for: those that moved or decide."""
    keep = {"kl_mean", "perplexity", "top1_agreement", "quantized_bytes", "fallbacks"}
    moved = {"better", "worse"}
    return [
        metric
        for metric in comparison.metrics
        if metric.key in keep or any(cell.verdict in moved for cell in metric.cells)
    ]


def show(comparison: Comparison, console: Console) -> None:
    """Prints what moved: a block a run, so that 80 columns hold any number of runs."""
    base = comparison.names[0]
    for warning in comparison.forced:
        console.print(Text(f"forced: {warning}", style="bold dark_orange3"))
    for at, name in enumerate(comparison.names[1:], start=1):
        console.print(Text(f"{name} against {base}", style="bold"), soft_wrap=True)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for label in ("metric", "baseline", "run", "change", "95 % of change", "verdict"):
            side: Literal["left", "right"] = "left" if label in ("metric", "verdict") else "right"
            table.add_column(label, justify=side, header_style="dim", overflow="fold")
        for metric in headline(comparison):
            cell = metric.cells[at]
            row = [metric.key, *(_value(metric, c) for c in (metric.cells[0], cell))]
            row += [_moved(metric, cell), _interval(metric, cell), _SHORT[cell.verdict or "equal"]]
            table.add_row(*(Text(part, style=_STYLES.get(cell.verdict or "", "")) for part in row))
        console.print(table)


def markdown(comparison: Comparison) -> str:
    """Returns a table for a pull request; every metric that moved or decides."""
    names = [escaped(name) for name in comparison.names]
    lines = [f"**{', '.join(names[1:])}** against **{names[0]}**", ""]
    lines += [f"> Forced: {escaped(warning)}" for warning in comparison.forced]
    lines += [""] if comparison.forced else []
    rows = [
        [code(metric.key), _value(metric, metric.cells[0])]
        + [_markdown_cell(metric, cell) for cell in metric.cells[1:]]
        for metric in headline(comparison)
    ]
    lines += table(["metric", *names], rows, numeric=len(names))
    return "\n".join(lines) + "\n"


def as_json(comparison: Comparison, breaches: Sequence[str]) -> dict[str, Any]:
    """Returns runs, metrics and breached conditions for machines."""
    return {
        "runs": list(comparison.names),
        "forced": list(comparison.forced),
        "metrics": [asdict(metric) for metric in comparison.metrics],
        "breaches": list(breaches),
    }


def _markdown_cell(metric: Metric, cell: Cell) -> str:
    value, change = _value(metric, cell), _change(metric, cell)
    verdict = f"**{cell.verdict}**" if cell.verdict in ("better", "worse") else cell.verdict
    return "<br>".join(part for part in (value, change, verdict) if part)


def _value(metric: Metric, cell: Cell) -> str:
    return "-" if cell.value is None else plain(FORMATS[metric.form](cell.value))


def _change(metric: Metric, cell: Cell) -> str:
    """`+0.0012 (1.10x) [0.0009, 0.0015]`."""
    if cell.delta is None:
        return ""
    parts = [plain(signed(cell.delta, metric.form))]
    if cell.ratio is not None and metric.form != "pct":
        parts.append(f"({_moved(metric, cell)})")
    return " ".join([*parts, _interval(metric, cell)]).strip()


def _moved(metric: Metric, cell: Cell) -> str:
    """The change in its shortest form: points of a share, else a multiple of the baseline."""
    if cell.delta is None:
        return ""
    if cell.ratio is None or metric.form == "pct":
        return plain(signed(cell.delta, metric.form))
    return plain(times(cell.ratio))


def _interval(metric: Metric, cell: Cell) -> str:
    if cell.low is None or cell.high is None:
        return ""
    return plain(f"[{signed(cell.low, metric.form)}, {signed(cell.high, metric.form)}]")
