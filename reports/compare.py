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
from reports.record import ENOUGH_WINDOWS
from reports.terminal import plain
from reports.text import FORMATS, signed, times

__all__ = ["Comparison", "as_json", "check", "compare", "markdown", "page", "show", "write_page"]

_SCRIPTS = ("core", "tables", "curves", "compare")
_STYLES = {"better": "blue", "worse": "dark_orange3"}
_DIM = {"not measured in both", "noise not known", "other method"}
_UNITS = (
    "ratio: run / baseline. difference: run - baseline in the metric's unit (KL: nats a token; "
    "shares: percentage points, pp), [its 95 % interval]."
)


def page(comparison: Comparison) -> str:
    """Returns the runs side by side as one self-contained page."""
    return html.fill(
        "compare.html.j2",
        {
            "comparison": comparison,
            "runs": comparison.records,
            "groups": grouped(comparison),
            "enough": ENOUGH_WINDOWS,
        },
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
    for warning in comparison.warnings():
        console.print(Text(f"warning: {warning}", style="bold dark_orange3"))
    for at, name in enumerate(comparison.names[1:], start=1):
        console.print(Text(f"{name} against {base}", style="bold"), soft_wrap=True)
        console.print(_block(comparison, at))
    console.print(Text(_UNITS, style="dim"))


def _block(comparison: Comparison, at: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for label in ("metric", "baseline", "run", "ratio", "difference", "verdict"):
        side: Literal["left", "right"] = "left" if label in ("metric", "verdict") else "right"
        table.add_column(label, justify=side, header_style="dim", overflow="fold")
    for metric in headline(comparison):
        cell = metric.cells[at]
        verdict = cell.verdict or "equal"
        difference = "\n".join(filter(None, (_delta(metric, cell), _interval(metric, cell))))
        row = [metric.key, _value(metric, metric.cells[0]), _value(metric, cell), _ratio(cell)]
        style = "dim" if verdict in _DIM else _STYLES.get(verdict, "")
        table.add_row(*(Text(part, style=style) for part in [*row, difference, verdict]))
    return table


def markdown(comparison: Comparison) -> str:
    """Returns a table for a pull request; every metric that moved or decides."""
    names = [escaped(name) for name in comparison.names]
    lines = [f"**{', '.join(names[1:])}** against **{names[0]}**", ""]
    told = [f"> Forced: {escaped(warning)}" for warning in comparison.forced]
    told += [f"> Warning: {escaped(warning)}" for warning in comparison.warnings()]
    lines += ["  \n".join(told), ""] if told else []
    rows = [
        [code(metric.key), _value(metric, metric.cells[0])]
        + [_markdown_cell(metric, cell) for cell in metric.cells[1:]]
        for metric in headline(comparison)
    ]
    lines += table(["metric", *names], rows, numeric=len(names))
    return "\n".join([*lines, "", escaped(_UNITS)]) + "\n"


def as_json(comparison: Comparison, breaches: Sequence[str]) -> dict[str, Any]:
    """Returns runs, metrics and breached conditions for machines."""
    return {
        "runs": list(comparison.names),
        "forced": list(comparison.forced),
        "warnings": list(comparison.warnings()),
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
    """`-0.0012 [-0.0015, -0.0009], 0.91x`."""
    moved = " ".join(filter(None, (_delta(metric, cell), _interval(metric, cell))))
    return ", ".join(filter(None, (moved, _ratio(cell))))


def _delta(metric: Metric, cell: Cell) -> str:
    return "" if cell.delta is None else plain(signed(cell.delta, metric.form))


def _ratio(cell: Cell) -> str:
    return "" if cell.ratio is None else plain(times(cell.ratio))


def _interval(metric: Metric, cell: Cell) -> str:
    if cell.low is None or cell.high is None:
        return ""
    return plain(f"[{signed(cell.low, metric.form)}, {signed(cell.high, metric.form)}]")
