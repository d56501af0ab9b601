"""The verdict in a terminal, in a pipe, and in a model card."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from reports import terminal
from reports.record import RunRecord, read_record
from tests.reports.made_up import record

V1 = Path(__file__).parent / "data" / "record-v1.json"


@pytest.fixture(scope="module")
def made() -> RunRecord:
    return record(layers=5, experts=8, windows=8)


def shown(made: RunRecord, **options: object) -> str:
    console = Console(file=io.StringIO(), **({"width": 80} | options))  # type: ignore[arg-type]
    terminal.show(made, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_80_columns_and_plain(made: RunRecord) -> None:
    out = shown(made)
    assert max(map(len, out.splitlines())) <= 80
    assert out.isascii()
    assert "\x1b" not in out
    for part in ("KL ", "nats a token (95 %:", "top-1", "perplexity", "401.4 GB (3.76x smaller)",
                 "4 x NVIDIA H200", "does not fit", "slowest op", "fallbacks"):  # fmt: skip
        assert part in out


def test_colour_only_on_a_terminal(made: RunRecord) -> None:
    assert "\x1b[" in shown(made, force_terminal=True, color_system="standard")


def test_brackets_and_paths_are_not_markup(made: RunRecord) -> None:
    assert made.recipe is not None
    odd = made.recipe.model_copy(update={"name": "[/tmp/x] [int4]", "verification": "[bold]no"})
    out = shown(made.model_copy(update={"recipe": odd}))
    assert "[/tmp/x] [int4]" in out
    assert "[bold]no" in out


@pytest.mark.parametrize("width", [40, 60, 120])
def test_nothing_is_lost_when_narrow(made: RunRecord, width: int) -> None:
    words = shown(made, width=200).split()
    assert "".join(sorted("".join(shown(made, width=width).split()))) == "".join(
        sorted("".join(words))
    )


def test_what_was_not_measured_is_named() -> None:
    out = shown(read_record(V1))
    assert re.search(r"not measured +memory plan", out)


def test_few_windows_are_said() -> None:
    assert "of 7 windows only" in shown(record(layers=3, experts=4, windows=7), width=120)
    assert "windows only" not in shown(record(layers=3, experts=4, windows=8), width=120)
