"""Budget and effects on a page: only where measured, every number the record's own."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from glm5q import effects_view
from reports import html, terminal, text
from reports.budget import Budget, BudgetChoice, BudgetPoint, BudgetUnit
from reports.effects import CacheEffect, Effects, Needle, TopkEffect
from reports.record import RunRecord
from tests.reports.made_up import record
from tests.reports.test_html import numbers


def budget(layers: int) -> Budget:
    units = [
        BudgetUnit(
            layer=layer,
            role=role,
            choices=[
                BudgetChoice(scheme="int8 channel + int8", nbytes=10, kl=2e-4),
                BudgetChoice(scheme="source dtype", nbytes=20, kl=0.0, kl_measured=0.0),
            ],
            chosen=int(layer == 2),
        )
        for layer in range(layers)
        for role in ("attention", "indexer_query")
        if role == "attention" or layer % 3 == 0
    ]
    points = [(390_000_000_000, 4.2, 0.031, 0.0333), (410_000_000_000, 4.6, 0.024, None)]
    curve = [BudgetPoint(nbytes=n, bits=b, kl=k, kl_measured=m) for n, b, k, m in points]
    return Budget(
        asked=412_000_000_000, nbytes=410_000_000_000, bits=4.6, kl=0.024, statistics_windows=32,
        windows=16, sequence_length=512, units=units, curve=curve, rank_correlation=0.98,
        time_s=100.0,
    )  # fmt: skip


def effects() -> Effects:
    cache = {"kl_error": 1e-5, "nbytes": 656, "plain_nbytes": 1152}
    sweep = [
        TopkEffect(
            k=k, share=k / 4096, attention_mass=0.9, kl=kl, kl_error=2e-4, flop=3e9, nbytes=7e6
        )
        for k, kl in ((205, 0.02), (1024, 4e-4), (2048, 0.0))
    ]  # fmt: skip
    return Effects(
        windows=8, sequence_length=4096, topk=2048, sweep=sweep, recommended_k=1024,
        recommended_kl=1e-3, time_s=60.0,
        caches=[CacheEffect(part="latent", grid="fp8", kl=4.4e-3, **cache)],  # type: ignore[arg-type]
        needles=[
            Needle(length=8192, distance=2048, questions=16, found_source=0.9375, nll_source=0.01)
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def made() -> RunRecord:
    plain = record(layers=4, experts=4, windows=8)
    return plain.model_copy(update={"budget": budget(4), "effects": effects()})


def test_sections_are_there_only_where_measured(made: RunRecord) -> None:
    page, without = html.render(made), html.render(record(layers=4, experts=4, windows=8))
    for name in ("budget", "effects"):
        assert f'<section id="{name}"' in page
        assert f'<section id="{name}"' not in without


def test_every_number_is_the_records(made: RunRecord) -> None:
    found = [
        n for n in numbers(html.render(made)) if n[0].startswith(("record/budget", "record/eff"))
    ]
    assert len(found) > 40
    for path, form, value, shown in found:
        exact = html.resolve({"record": made}, path)
        assert float(value) == exact, path
        assert shown == text.FORMATS[form](exact), path


def test_what_was_chosen_is_marked_by_more_than_colour(made: RunRecord) -> None:
    page = html.render(made)
    body = page.split('id="budget-layers"')[1].split("</table>")[0]
    rows = re.findall(r'<tr><td class="num">(\d)</td>(.*?)</tr>', body)
    assert [(n, cells.count("▲ source dtype"), cells.count("—")) for n, cells in rows] == [
        ("0", 0, 0), ("1", 0, 1), ("2", 1, 1), ("3", 0, 0),
    ]  # fmt: skip
    points = page.split('id="budget-points"')[1].split("</table>")[0]
    assert points.count('class="chosen"') == 1
    assert "410.0" in points.split('class="chosen"')[1].split("</tr>")[0]


def test_a_size_of_744_billion_keeps_the_page_small() -> None:
    whole = record().model_copy(update={"budget": budget(78), "effects": effects()})
    assert len(html.render(whole).encode()) < 500_000


def test_a_terminal_says_the_choice_and_the_effects(made: RunRecord) -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    terminal.show(made, console)
    effects_view.show(made, console)
    said = console.export_text()
    assert "attention source dtype in 2" in said
    assert "index_topk 1024" in said
    assert "93.75 %" in said
    assert "0.004400" in said
