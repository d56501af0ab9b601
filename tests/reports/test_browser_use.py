"""A run's page in use: drill-down, hover, sort, both languages, light and dark, print, keyboard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from reports import html, text
from reports.record import Accuracy, RunRecord
from tests.reports.browser import EXPERTS, LAYERS, Opened, near, plain
from tests.reports.made_up import record
from tests.reports.test_html import HOSTILE, broken, sparse


@pytest.mark.parametrize("layer", [0, 40, 78])
def test_drill_down(opened: Opened, made: RunRecord, accuracy: Accuracy, layer: int) -> None:
    box = opened.page.locator("#strip .lane svg").first.bounding_box()
    x = (layer + 0.5) / (LAYERS + 1) * box["width"]
    opened.page.locator("#strip .lane svg").first.click(position={"x": x, "y": box["height"] / 2})
    assert opened.page.locator("#drill [data-layer]").inner_text() == str(layer)
    facts = opened.page.eval_on_selector_all(
        "#drill dd", "all => all.map(d => [d.dataset.field, Number(d.dataset.v), d.textContent])"
    )
    one, judged = made.layers[layer], accuracy.layers[layer]
    for field, value, shown in facts:
        exact = (
            len(one.fallbacks)
            if field == "fallbacks"
            else getattr(judged if hasattr(judged, field) else one, field)
        )
        assert near([value], [exact]), field
        forms = {"sig", "pct", "size", "time", "int"}
        assert shown in {text.FORMATS[form](exact) for form in forms}, field
    assert opened.count("#drill tbody tr") == len(one.matrices)
    expected = len(one.experts.tokens) if one.experts else 0
    assert opened.count("#drill .scatter .dot") == expected
    if one.experts:
        found = opened.rows("experts")
        assert near([r[2] for r in found], one.experts.error, 5)
        assert [r[3] for r in found] == one.experts.tokens
        assert [r[4] for r in found] == one.experts.method


def test_layer_by_keyboard(opened: Opened) -> None:
    opened.page.locator("#layer").focus()
    opened.page.keyboard.press("Home")
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.locator("#drill [data-layer]").inner_text() == "1"
    opened.page.locator('#drill [data-step="1"]').click()
    assert opened.page.locator("#layer-now").inner_text() == "2"


def test_hover_tells_the_expert(opened: Opened, made: RunRecord) -> None:
    routed = [layer for layer in made.layers if layer.experts]
    canvas = opened.page.locator("#expert-map canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    for row, expert in ((0, 0), (31, 200), (len(routed) - 1, 255)):
        at = {
            "x": (expert + 0.5) / EXPERTS * box["width"],
            "y": (row + 0.5) / len(routed) * box["height"],
        }
        canvas.hover(position=at)
        experts = routed[row].experts
        assert experts is not None
        tip = opened.tip()
        assert f"layer {routed[row].layer} · expert {expert}" in tip
        assert f"error {text.significant(experts.error[expert])}" in tip
        assert f"tokens {text.count(experts.tokens[expert])}" in tip
        assert f"method {experts.method[expert]}" in tip


def test_expert_by_keyboard(opened: Opened, made: RunRecord) -> None:
    opened.page.locator("#expert-map canvas").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        opened.page.keyboard.press(key)
    first = next(layer for layer in made.layers if layer.experts).layer
    assert f"layer {first + 1} · expert 2" in opened.tip()


def test_hover_tells_layer_window_block_and_bar(
    opened: Opened, made: RunRecord, accuracy: Accuracy
) -> None:
    lane = opened.page.locator("#strip .lane svg").nth(1)
    box = lane.bounding_box()
    lane.hover(position={"x": 10.5 / (LAYERS + 1) * box["width"], "y": 5})
    tip = opened.tip()
    assert "layer 10" in tip
    assert f"residual error {text.significant(accuracy.layers[10].hidden_error)}" in tip
    opened.page.locator('#windows .dot[data-i="7"]').hover(force=True)
    assert "window" in opened.tip()
    chart = opened.page.locator("#selection canvas").nth(1)
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] * 0.5 / 24, "y": box["height"] * 12.5 / 24})
    assert accuracy.indexer is not None
    share = accuracy.indexer.selection[0].quantized[12][0]
    assert f"quantized {plain(text.percent(share))}" in plain(opened.tip())
    opened.page.locator(".plan .stack i").first.hover()
    assert made.memory is not None
    assert plain(text.size(made.memory.devices[0].parts["weights"])) in plain(opened.tip())


def test_curve_hover_reads_the_point(opened: Opened, accuracy: Accuracy) -> None:
    plot = opened.page.locator("#depth .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * 30 / LAYERS, "y": box["height"] / 2})
    told = opened.page.locator("#depth .u-legend").inner_text()
    assert text.significant(accuracy.layers[30].hidden_error) in told


def test_sort(opened: Opened) -> None:
    def column() -> list[float]:
        cells = "#worst tbody tr td:nth-child(4) data"
        return opened.page.eval_on_selector_all(cells, "all => all.map(d => Number(d.value))")  # type: ignore[no-any-return]

    head = opened.page.locator("#worst th:nth-child(4)")
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert column() == sorted(column(), reverse=True)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column() == sorted(column())
    opened.page.locator("#worst th:nth-child(5) button").click()
    assert head.get_attribute("aria-sort") is None
    methods = opened.page.locator("#worst tbody td:nth-child(5)").all_inner_texts()
    assert methods == sorted(methods)


def test_sort_keeps_groups_and_puts_absent_last(opened: Opened) -> None:
    opened.page.locator("#ops th button", has_text="p99").click()
    for body in opened.page.locator("#ops tbody").all():
        rows = body.locator("tr")
        assert "group" in str(rows.first.get_attribute("class"))
        shown = body.locator("tr:not(.group) td:nth-child(6)").all_inner_texts()
        assert shown == sorted(shown, key=lambda s: s == "—") or "—" not in shown


def test_experts_by_tokens(opened: Opened) -> None:
    before = opened.page.locator("#expert-map .scale-line").inner_text()
    opened.page.locator('#experts-by [data-by="tokens"]').click()
    assert opened.attribute('#experts-by [data-by="tokens"]', "aria-pressed") == "true"
    assert opened.page.locator("#expert-map .scale-line").inner_text() != before
    opened.page.locator('#experts-by [data-by="error"]').click()


def test_language_switch(chromium: Any, file: Path) -> None:
    page = Opened(chromium, file)
    assert page.page.locator("html").get_attribute("lang") == "en"
    assert page.page.locator("#verdict dt").first.inner_text() == "KL divergence"
    page.page.locator("#language").click()
    assert page.page.locator("html").get_attribute("lang") == "zh-CN"
    assert page.page.locator("#verdict dt").first.inner_text() == "KL 散度"
    assert page.count('[lang="en"]:visible') == 0
    assert "残差流误差" in page.page.locator("#depth .u-legend").inner_text()
    page.page.reload()
    page.page.wait_for_function("document.documentElement.dataset.ready")
    assert page.page.locator("html").get_attribute("lang") == "zh-CN"  # remembered
    page.page.locator("#language").click()
    assert page.count('[lang="zh-CN"]:visible') == 0
    assert page.errors == []
    page.close()


def test_chinese_reader_begins_in_chinese(chromium: Any, file: Path) -> None:
    page = Opened(chromium, file, locale="zh-CN")
    assert page.page.locator("#verdict dt").nth(2).inner_text() == "困惑度"
    page.close()


def test_theme_switch(chromium: Any, file: Path) -> None:
    page = Opened(chromium, file)
    paper = "getComputedStyle(document.body).backgroundColor"
    pixel = """() => { const c = document.querySelector("#expert-map canvas");
        return [...c.getContext("2d").getImageData(3, 3, 1, 1).data]; }"""
    light = page.page.evaluate(paper), page.page.evaluate(pixel)
    page.page.locator("#theme").click()
    dark = page.page.evaluate(paper), page.page.evaluate(pixel)
    assert light[0] != dark[0]
    assert sum(dark[1][:3]) < sum(light[1][:3])
    page.close()


def test_print(chromium: Any, file: Path) -> None:
    page = Opened(chromium, file, color_scheme="dark")
    page.page.emulate_media(media="print")
    assert page.count("nav:visible") == 0
    assert page.count("#strip rect:visible") > 0
    printed = page.page.pdf()
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    page.close()


@pytest.mark.parametrize("made", [c[1] for c in sparse()], ids=[c[0] for c in sparse()])
def test_a_page_without_parts_has_no_error(chromium: Any, tmp_path: Path, made: RunRecord) -> None:
    html.write_page(made, tmp_path / "report.html")
    page = Opened(chromium, tmp_path / "report.html")
    assert page.errors == []
    for details in page.page.locator("details[data-table]").all():
        details.locator("summary").click()
        details.locator("tbody tr").first.wait_for()
    assert page.errors == []
    page.close()


def test_no_overlap_where_all_is_selected(chromium: Any, tmp_path: Path) -> None:
    made = record(layers=4, experts=4, windows=4)
    assert made.accuracy is not None
    assert made.accuracy.indexer is not None
    short = made.accuracy.indexer.model_copy(
        update={
            "context": 2048,
            "layers": [
                one.model_copy(update={"overlap": [None] * len(one.overlap)})
                for one in made.accuracy.indexer.layers
            ],
        }
    )
    judged = [
        layer.model_copy(update={"topk_overlap": None, "topk_overlap_p1": None})
        for layer in made.accuracy.layers
    ]
    accuracy = made.accuracy.model_copy(update={"indexer": short, "layers": judged})
    html.write_page(made.model_copy(update={"accuracy": accuracy}), tmp_path / "report.html")
    page = Opened(chromium, tmp_path / "report.html")
    assert "all of the past is selected" in page.page.locator("#overlap").inner_text()
    assert page.count('details[data-table="overlap"]') == 0
    assert page.errors == []
    page.close()


def test_not_a_number_is_drawn_and_told(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write_page(broken(record(layers=6, experts=8, windows=4)), path)
    page = Opened(chromium, path)
    assert page.errors == []
    assert page.page.locator("dl.verdict .big").first.inner_text().startswith("nan")
    rows = page.rows("layers")
    # What is infinite is no number in a script's table.
    assert [row[0] for row in rows if math.isnan(float(row[2] or 0))] == [5]
    box = page.page.locator("#expert-map canvas").bounding_box()
    at = {"x": 3, "y": (5 - 3 + 0.5) / 4 * box["height"]}
    page.page.locator("#expert-map canvas").hover(position=at)
    assert "error nan" in page.tip()
    page.close()


def test_hostile_text_does_nothing(chromium: Any, tmp_path: Path) -> None:
    made = record(layers=4, experts=4, windows=4)
    layers = [
        layer.model_copy(
            update={
                "matrices": [m.model_copy(update={"module": HOSTILE}) for m in layer.matrices],
                "fallbacks": [f.model_copy(update={"reason": HOSTILE}) for f in layer.fallbacks],
            }
        )
        for layer in made.layers
    ]
    path = tmp_path / "report.html"
    html.write_page(made.model_copy(update={"notes": [HOSTILE], "layers": layers}), path)
    page = Opened(chromium, path)
    assert page.page.locator(".note", has_text="pwned").inner_text() == HOSTILE
    assert page.page.locator("#drill td").first.inner_text() == HOSTILE
    assert page.page.evaluate("window.pwned") is None
    assert (page.requests, page.errors) == ([page.address], [])
    page.close()
