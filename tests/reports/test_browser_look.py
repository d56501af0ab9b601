"""How pages look: accessible by axe-core, no wider than the screen, screenshots kept for review.

Screenshots land in pytest's cache folder, report-screenshots; look at them after a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports import compare, html, text
from reports.comparison import Comparison
from reports.record import RunRecord, read_record
from tests.reports.browser import SIZES, Opened, near
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
    html.write_page(bare(), folder / "bare.html")
    names = ("compare", "old", "short", "bare")
    return {"report": file} | {n: folder / f"{n}.html" for n in names}


def bare() -> RunRecord:
    """A record of an edited recipe that was neither planned nor timed."""
    made = record(layers=4, experts=4, windows=9)
    assert made.recipe is not None
    edited = made.recipe.model_copy(update={"verification": "edited from h200; not verified"})
    lost = {"memory": None, "latency": [], "sweeps": [], "assembled": [], "recipe": edited}
    return made.model_copy(update=lost)


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
    ("name", "width"), [("short", 1440), ("short", 390), ("bare", 1440), ("compare", 1440)]
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_axe_finds_nothing_serious(
    chromium: Any, pages: dict[str, Path], name: str, width: int, scheme: str, locale: str
) -> None:
    module = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="not run: axe is not installed (pip install axe-playwright-python)",
    )
    page = Opened(chromium, pages[name], width, color_scheme=scheme, locale=locale)
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


@pytest.mark.parametrize("width", SIZES)
def test_tiles_say_what_would_fill_them(chromium: Any, pages: dict[str, Path], width: int) -> None:
    page = Opened(chromium, pages["bare"], width)
    told = page.page.locator("dl.verdict > div").all_inner_texts()
    for tile, command in ((told[4], "glm5q plan"), (told[5], "glm5q bench --target h200")):
        assert re.search("Not (planned|measured) in this run", tile)
        assert command in tile
    assert "An edited recipe" in page.page.locator(".note.warn").inner_text()
    assert "edited from h200; not verified" in page.page.locator(".note.warn").inner_text()
    page.close()


@pytest.mark.parametrize("name", ["short", "compare"])
def test_print_is_dark_on_white_whatever_the_screen(
    chromium: Any, pages: dict[str, Path], name: str, request: pytest.FixtureRequest
) -> None:
    page = Opened(chromium, pages[name], color_scheme="dark")
    page.page.set_viewport_size({"width": 703, "height": 1000})  # A4 less its margins
    page.page.emulate_media(media="print")
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 704  # of rounding, one
    for canvas in page.page.locator("#expert-map canvas").all():
        pixels = canvas.evaluate("""(c) => c.getContext("2d")
            .getImageData(0, 0, c.width, c.height).data.reduce((sum, v) => sum + v, 0)
            / (c.width * c.height * 4)""")
        assert pixels > 140  # on the dark scale most cells are near black
    ink, paper = page.page.evaluate(
        """() => ["h1", "body"].map((s, i) => getComputedStyle(document.querySelector(s))
            [i ? "backgroundColor" : "color"].match(/\\d+/g).slice(0, 3).map(Number))"""
    )
    assert max(ink) < 60
    assert min(paper) > 240
    shots = request.config.cache.mkdir("report-screenshots")
    page.page.screenshot(path=shots / f"{name}-print.png", full_page=True)
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
        assert near([row[at + 1] for row in rows], list(deltas))
    depths = compared.rows("depths")
    for at, made in enumerate(three.records):
        assert made.accuracy is not None
        expected = [layer.hidden_error for layer in made.accuracy.layers]
        assert near([row[at + 1] for row in depths], expected)


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
