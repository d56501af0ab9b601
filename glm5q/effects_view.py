"""Tables for people: what `glm5q effects` measured."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports import text
from reports.effects import CacheEffect, Effects, Needle, TopkEffect
from reports.record import RunRecord
from reports.terminal import plain


def show(run: RunRecord, console: Console) -> None:
    """Prints caches, the sweep of index_topk, and retrieval, as far as they were measured."""
    found = run.effects
    assert found is not None
    if found.caches:
        _print(console, "Caches, each rounded alone", _caches(found.caches))
    if found.sweep:
        title = f"index_topk, in windows of {found.sequence_length} tokens"
        _print(console, title, _sweep(found.sweep))
        console.print(Text(_recommended(found)), soft_wrap=True)
    if found.needles:
        _print(console, "Facts told and asked for again", _needles(found.needles))


def _recommended(found: Effects) -> str:
    limit = text.significant(found.recommended_kl, 1)
    return (
        f"recommended: index_topk {found.recommended_k}, the smallest whose KL plus two standard "
        f"errors is at most {limit}; the checkpoint has {found.topk}"
    )


def _print(console: Console, title: str, table: Table) -> None:
    console.print(Text(title, style="bold"))
    console.print(table)


def _table(*heads: str) -> Table:
    table = Table(box=None)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _number(value: float | None, form: str = "sig") -> str:
    return "-" if value is None else plain(text.FORMATS[form](value))


def _caches(rows: list[CacheEffect]) -> Table:
    table = _table("part", "grid", "KL", "standard error", "B a token, layer", "bf16")
    for row in rows:
        table.add_row(
            row.part, row.grid, _number(row.kl), _number(row.kl_error), str(row.nbytes),
            str(row.plain_nbytes),
        )  # fmt: skip
    return table


def _sweep(rows: list[TopkEffect]) -> Table:
    table = _table("k", "share", "attention mass", "KL", "standard error", "a query", "bytes")
    for row in rows:
        table.add_row(
            str(row.k), _number(row.share, "pct"), _number(row.attention_mass, "pct"),
            _number(row.kl), _number(row.kl_error), _number(row.flop, "flop"),
            _number(row.nbytes, "size"),
        )  # fmt: skip
    return table


def _needles(rows: list[Needle]) -> Table:
    table = _table("length", "distance", "questions", "found", "quantized", "nat a digit", "quant.")
    for row in rows:
        table.add_row(
            str(row.length), str(row.distance), str(row.questions),
            _number(row.found_source, "pct"), _number(row.found_quantized, "pct"),
            _number(row.nll_source), _number(row.nll_quantized),
        )  # fmt: skip
    return table
