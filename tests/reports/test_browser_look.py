"""How pages look: accessible by axe-core, no wider than the screen, screenshots kept for review.

Screenshots land in pytest's cache folder, report-screenshots; look at them after a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports import compare, html, text
from reports.comparison import Comparison
from reports.record import read_record
from tests.reports.browser import SIZES, Opened
from tests.reports.made_up import record

V1 = Path(__file__).parent / "data" / "record-v1.json"


@pytest.fixture(scope="module")
def three() -> Comparison:
    runs = [record(kl=0.0135), record(kl=0.0123, seed=1), record(kl=0.01352, seed=2)]
    return compare.compare(runs, ["W4A8 [g128]", "W4A8 best", "W8A8"])


@pytest.fixture(scope="module")
def pages(
    file: Path, three: Comparison, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    compare.write_page(three, folder / "compare.html")
    html.write_page(read_record(V1), folder / "old.html")
    html.write_page(record(layers=4, experts=4, windows=6), folder / "short.html")
    return {"report": file} | {n: folder / f"{n}.html" for n in ("compare", "old", "short")}


@pytest.fixture(scope="module")
def compared(chromium: Any, pages: dict[str, Path]) -> Iterator[Opened]:
    page = Opened(chromium, pages["compare"])
    yield page
    page.close()


LOOKS = [
    ("report", 1440, "light", "en-US"),
    ("report", 390, "light", "zh-CN"),
    ("report", 1440, "dark", "zh-CN"),
    ("report", 390, "dark", "en-US"),
    ("compare", 1440, "light", "en-US"),
    ("compare", 390, "dark", "zh-CN"),
    ("old", 1440, "light", "en-US"),
]


@pytest.mark.parametrize(("name", "width", "scheme", "locale"), LOOKS)
def test_look(
    chromium: Any,
    pages: dict[str, Path],
    name: str,
    width: int,
    scheme: str,
    locale: str,
    request: pytest.FixtureRequest,
) -> None:
    page = Opened(chromium, pages[name], width, color_scheme=scheme, locale=locale)
    shots = request.config.cache.mkdir("report-screenshots")
    stem = f"{name}-{width}-{scheme}-{locale[:2]}"
    page.page.screenshot(path=shots / f"{stem}-first.png")
    page.page.screenshot(path=shots / f"{stem}-full.png", full_page=True)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    assert (page.requests, page.errors) == ([page.address], [])
    page.close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("short", 1440, "light"), ("short", 390, "dark"), ("compare", 1440, "light")],
)
def test_axe_finds_nothing_serious(
    chromium: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    module = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="not run: axe is not installed (pip install axe-playwright-python)",
    )
    page = Opened(chromium, pages[name], width, color_scheme=scheme)
    # Tables are judged too: two of them, for all are made alike and long ones take axe seconds.
    for summary in page.page.locator(
        'details[data-table="windows"] summary, details[data-table="router"] summary'
    ).all():
        summary.click()
    audit = module.Axe().run(page.page).response
    assert len(audit["passes"]) > 15  # it did run
    serious = [
        (v["id"], v["nodes"][0]["html"][:200], v["nodes"][0].get("failureSummary", ""))
        for v in audit["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    assert serious == []
    page.close()


@pytest.mark.parametrize("width", SIZES)
def test_the_verdict_is_on_the_first_screen(
    chromium: Any, pages: dict[str, Path], width: int
) -> None:
    page = Opened(chromium, pages["report"], width)
    for answer in page.page.locator("dl.verdict .big, dl.verdict .fits").all():
        box = answer.bounding_box()
        assert box["y"] + box["height"] <= SIZES[width]
    page.close()


def test_compare_loads_alone(compared: Opened) -> None:
    assert (compared.requests, compared.errors) == ([compared.address], [])


def test_every_number_compared(compared: Opened, three: Comparison) -> None:
    found = compared.page.evaluate(
        """() => [...document.querySelectorAll("data[data-path]")].map((d) =>
            [d.dataset.path, d.dataset.form, d.value, d.textContent])"""
    )
    assert len(found) > 150
    for path, form, value, shown in found:
        exact = html.resolve({"comparison": three}, path)
        plainly = text.FORMATS[form](exact)
        assert float(value) == exact, path
        assert shown in (plainly, text.signed(exact, form)), path


def test_compare_marks_and_tables(compared: Opened, three: Comparison) -> None:
    for at, deltas in enumerate(three.window_delta):
        assert compared.count(f"#delta-{at} .dot") == len(deltas)
    rows = compared.rows("deltas")
    for at, deltas in enumerate(three.window_delta):
        assert [row[at + 1] for row in rows] == [float(f"{d:.6g}") for d in deltas]
    depths = compared.rows("depths")
    for at, made in enumerate(three.records):
        assert made.accuracy is not None
        expected = [float(f"{layer.hidden_error:.6g}") for layer in made.accuracy.layers]
        assert [row[at + 1] for row in depths] == expected


def test_colour_only_beyond_the_noise(compared: Opened, three: Comparison) -> None:
    soft = compared.page.evaluate(
        "getComputedStyle(document.querySelector('.within-noise .delta')).color"
    )
    row = next(m for m in three.metrics if m.key == "kl_mean")
    cells = compared.page.locator("#accuracy-table tbody tr").first.locator("td")
    colours = cells.evaluate_all(
        "all => all.slice(1).map(c => getComputedStyle(c.querySelector('.delta')).color)"
    )
    coloured = [cell.verdict in ("better", "worse") for cell in row.cells[1:]]
    assert coloured == [True, False]
    assert [colour != soft for colour in colours] == coloured


def test_compare_sorts_and_speaks_chinese(compared: Opened) -> None:
    compared.page.locator("#latency-table th button").nth(1).click()
    values = compared.page.eval_on_selector_all(
        "#latency-table tbody td:nth-child(2) data", "all => all.map(d => Number(d.value))"
    )
    assert values == sorted(values, reverse=True)
    compared.page.locator("#language").click()
    assert compared.page.locator(".better .word:visible").first.inner_text().endswith("更好")
