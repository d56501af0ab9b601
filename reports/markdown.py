"""Markdown that shows a record's text as it is, whatever signs it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def escaped(value: str) -> str:
    """Text that Markdown must read neither as markup nor as a table's edge."""
    for sign in "\\`*_[]<>|":
        value = value.replace(sign, "\\" + sign)
    return value.replace("\n", " ")


def code(value: str) -> str:
    """Inline code, in as many backticks as its content needs."""
    fence = "`"
    while fence in value:
        fence += "`"
    pad = " " if value.startswith("`") or value.endswith("`") else ""
    return f"{fence}{pad}{value}{pad}{fence}".replace("\n", " ").replace("|", "\\|")


def block(value: str, language: str) -> list[str]:
    """Lines of a code block, fenced by more backticks than its content has in a row."""
    fence = "```"
    while fence in value:
        fence += "`"
    return [f"{fence}{language}", value, fence]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: int) -> list[str]:
    """Lines of a table whose last `numeric` columns are aligned to the right."""
    plain = len(head) - numeric
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * plain + "---:|" * numeric]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
