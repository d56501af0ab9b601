"""A run's page in a real browser: no network, no error, right marks, every number the record's."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from reports import html, text
from reports.record import Accuracy, RunRecord
from tests.reports.browser import EXPERTS, LAYERS, Opened, near


def test_no_request_and_no_error(opened: Opened) -> None:
    assert opened.requests == [opened.address]
    assert opened.errors == []


def test_ready_within_a_second(chromium: Any, file: Path) -> None:
    """The main thread's own time, which a busy machine does not stretch."""
    spent = []
    for _ in range(2):
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        session = context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(file.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready")
        metrics = session.send("Performance.getMetrics")["metrics"]
        spent.append(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))
        context.close()
    assert min(spent) < 1


def stretch() -> float:
    """How many times longer than its own work a busy loop takes here and now; 1 if it is quiet."""
    wall, own = time.perf_counter(), time.process_time()
    while time.process_time() - own < 0.1:
        pass
    return max(1.0, (time.perf_counter() - wall) / (time.process_time() - own))


def test_painted_within_a_second_of_navigation(chromium: Any, file: Path) -> None:
    """Wall time until all is painted, best of three; a shared machine's own slowness taken off."""
    best = math.inf
    for _ in range(3):
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        slow = stretch()
        page.goto(file.as_uri())
        painted = "performance.getEntriesByName('glm5q.painted')"
        page.wait_for_function(f"{painted}.length")
        # The browser counts from the start of the navigation.
        best = min(best, page.evaluate(f"{painted}[0].startTime") / 1e3 / max(slow, stretch()))
        context.close()
    assert best < 1


def test_marks(opened: Opened, made: RunRecord, accuracy: Accuracy) -> None:
    layers = LAYERS + 1
    routed = [layer for layer in made.layers if layer.experts]
    assert int(opened.attribute("#expert-map", "data-cells")) == len(routed) * EXPERTS
    assert int(opened.attribute("#expert-map", "data-fallen")) == len(made.fallbacks)
    assert opened.count("#windows .dot") == len(accuracy.window_kl)
    assert int(opened.attribute("#depth", "data-marks")) == 2 * layers
    assert int(opened.attribute("#router-chart", "data-marks")) == len(routed)
    indexer = accuracy.indexer
    assert indexer is not None
    assert int(opened.attribute("#recall", "data-marks")) == 3 * len(indexer.recall)
    assert opened.count("#selection canvas") == 2 * len(indexer.selection)
    assert opened.count("#ops .mark") == len(made.latency)
    assert opened.count("#ops .line .floor") == sum(row.floor_s is not None for row in made.latency)
    assert opened.count(".plan li") == len(made.memory.devices if made.memory else [])
    assert opened.count("#mtp tr") == 3
    errors = sum(len(layer.role_error) for layer in accuracy.layers)
    roles = sum(len({m.role for m in layer.matrices}) for layer in made.layers)
    seen = sum(len({m.role for m in layer.matrices if m.reach}) for layer in made.layers)
    assert opened.count("#strip rect") == 4 * layers + errors + roles
    buckets = sum(v is not None for one in indexer.layers for v in one.overlap)
    assert opened.count("#overlap rect") == 2 * layers + buckets
    assert opened.count("#ranges rect") == seen == roles - len(made.layers)
    unseen = opened.page.locator("#ranges .unseen").inner_text()
    assert unseen.split() == ["kv_b", "not", "observed"]


def test_darker_cells_are_larger_errors(opened: Opened, made: RunRecord) -> None:
    """Reads pixels back: the painted lightness falls as the record's error rises."""
    framed = {  # a mark's frame reaches into the cells around it
        (f.layer + down, f.expert + across)
        for f in made.fallbacks
        if f.expert is not None
        for down in (-1, 0, 1)
        for across in (-1, 0, 1)
    }
    ordered = sorted(
        (layer.experts.error[e], row, e)
        for row, layer in enumerate([layer for layer in made.layers if layer.experts])
        for e in range(0, EXPERTS, 8)
        if layer.experts and (layer.layer, e) not in framed
    )
    picked = [(row, e) for _, row, e in ordered[:: len(ordered) // 12]]
    light = opened.page.evaluate(
        """([cells, rows, wide]) => {
          const canvas = document.querySelector("#expert-map canvas");
          const paint = canvas.getContext("2d");
          return cells.map(([row, e]) => {
            const x = Math.floor((e + 0.5) / wide * canvas.width);
            const y = Math.floor((row + 0.5) / rows * canvas.height);
            const [r, g, b] = paint.getImageData(x, y, 1, 1).data;
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          });
        }""",
        [picked, sum(bool(layer.experts) for layer in made.layers), EXPERTS],
    )
    assert light == sorted(light, reverse=True)
    assert light[0] - light[-1] > 100


def test_every_number_with_a_place(opened: Opened, made: RunRecord) -> None:
    found = opened.page.evaluate(
        """() => [...document.querySelectorAll("data[data-path]")].map((d) =>
            [d.dataset.path, d.dataset.form, d.value, d.textContent])"""
    )
    assert len(found) > 250
    for path, form, value, shown in found:
        exact = html.resolve({"record": made}, path)
        assert (float(value), shown) == (exact, text.FORMATS[form](exact)), path


def test_no_number_without_a_place(opened: Opened) -> None:
    """In the verdict, digits stand only in <data>, in names, in code or in a sentence."""
    stray = opened.page.evaluate(
        r"""() => {
          const kept = "data, code, .note, .aside, [lang], h1, .lede, .fits, .on";
          const verdict = document.getElementById("verdict");
          const walk = document.createTreeWalker(verdict, NodeFilter.SHOW_TEXT);
          const found = [];
          while (walk.nextNode()) {
            const { data, parentElement } = walk.currentNode;
            if (/\d/.test(data) && !parentElement.closest(kept)) found.push(data);
          }
          return found;
        }"""
    )
    assert stray == []


def test_data_tables_hold_the_record(opened: Opened, made: RunRecord, accuracy: Accuracy) -> None:
    layers = opened.rows("layers")
    assert near([r[0] for r in layers], [layer.layer for layer in made.layers])
    assert near([r[2] for r in layers], [layer.error for layer in made.layers])
    assert near([r[3] for r in layers], [a.hidden_error for a in accuracy.layers])
    assert near([r[4] for r in layers], [a.kl for a in accuracy.layers])
    assert near([r[5] for r in layers], [a.topk_overlap for a in accuracy.layers])
    roles = list(dict.fromkeys(role for a in accuracy.layers for role in a.role_error))
    for i, role in enumerate(roles):
        column = [r[len(layers[0]) - len(roles) + i] for r in layers]
        assert near(column, [a.role_error.get(role) for a in accuracy.layers])
    windows = opened.rows("windows")
    fields = (accuracy.window_kl, accuracy.window_top1, accuracy.window_nll)
    for i, values in enumerate(fields):
        assert near([r[i + 1] for r in windows], values)
    matrices = [m for layer in made.layers for m in layer.matrices]
    table = opened.rows("matrices")
    for i, name in enumerate(("matrices", "bits", "error", "input_absmax", "output_absmax",
                              "input_p999", "outlier_channels", "weight_error")):  # fmt: skip
        assert near([r[i + 5] for r in table], [getattr(m, name) for m in matrices]), name
    assert [r[1:5] for r in table] == [[m.module, m.role, m.scheme, m.method] for m in matrices]


def test_indexer_tables_hold_the_record(opened: Opened, accuracy: Accuracy) -> None:
    indexer = accuracy.indexer
    assert indexer is not None
    overlap = opened.rows("overlap")
    for bucket in range(1, len(indexer.bucket_edges) - 1):
        expected = [one.overlap[bucket] for one in indexer.layers]
        assert near([r[bucket + 2] for r in overlap], expected)
    shares = [
        [one.layer, q, k, share, one.quantized[q][k]]
        for one in indexer.selection
        for q, row in enumerate(one.source)
        for k, share in enumerate(row)
    ]
    assert opened.rows("selection") == shares
    router = [[a.layer, a.router_agreement] for a in accuracy.layers if a.router_agreement]
    assert all(near(*pair) for pair in zip(opened.rows("router"), router, strict=True))


def test_sweep_table_holds_the_record(opened: Opened, made: RunRecord) -> None:
    points = [p for sweep in made.sweeps for p in sweep.points]
    found = opened.rows("sweep")
    for i, name in enumerate(("batch", "median_s", "low_s", "high_s", "tokens_per_s")):
        assert near([r[i + 3] for r in found], [getattr(p, name) for p in points])


def test_sweeps_say_their_peak(opened: Opened, made: RunRecord) -> None:
    told = opened.page.locator("#latency .answers li").all_inner_texts()
    assert len(told) == len(made.sweeps) == 2
    for line, sweep in zip(told, made.sweeps, strict=True):
        peak = max(sweep.points, key=lambda point: point.tokens_per_s)
        assert f"Peak of {sweep.op} on {sweep.target} {text.rate(peak.tokens_per_s)}" in line
        assert f"at batch {peak.batch}" in line
        assert line.split()[-1] == sweep.how  # nor is it said to rise further


def test_what_was_never_observed_is_not_zero(opened: Opened, made: RunRecord) -> None:
    row = opened.page.locator("#peaks tbody tr", has=opened.page.locator("code", has_text="kv_b"))
    cells = row.first.locator("td").all_inner_texts()
    assert cells[3:5] == ["not observed", "not observed"]
    assert (cells[5], cells[7]) == ("—", "not observed")
    unseen = [m for layer in made.layers for m in layer.matrices if m.role == "kv_b"]
    assert unseen
    drawn = [r for r in opened.rows("matrices") if r[2] == "kv_b"]
    assert [r[8:12] for r in drawn] == [[None] * 4] * len(unseen)
    shown = opened.page.locator('details[data-table="matrices"] tbody tr', has_text="kv_b_proj")
    assert shown.first.locator("td").nth(8).inner_text() == "not observed"


def test_parts_of_passes_and_plans_are_drawn_to_scale(opened: Opened, made: RunRecord) -> None:
    """Bars' widths, read back from the layout, are in the ratios of the record's numbers."""
    assert made.memory is not None
    stages = ("prefill", "decode")
    passes = [run for stage in stages for run in made.assembled if run.stage == stage]
    bars: dict[str, list[list[float]]] = {
        ".plan li .stack": [list(d.parts.values()) for d in made.memory.devices],
        "#latency .bars li .stack": [[part.time_s for part in run.parts] for run in passes],
    }
    for selector, sums in bars.items():
        drawn = opened.page.eval_on_selector_all(
            selector,
            """all => all.map((s) => [...s.querySelectorAll("i")].map(
                (i) => i.getBoundingClientRect().width))""",
        )
        assert len(drawn) == len(sums)
        for widths, parts in zip(drawn, sums, strict=True):
            assert len(widths) == len(parts)
            scale = sum(widths) / sum(parts)
            for width, part in zip(widths, parts, strict=True):
                assert abs(width - part * scale) < 0.5


def test_how_it_is_known_is_told_by_word_and_by_shape(opened: Opened) -> None:
    """Measured, computed and quoted differ in text, in outline and in fill, not in colour alone."""
    found = opened.page.evaluate(
        """() => Object.fromEntries(["measured", "computed", "quoted"].map((how) => {
            const mark = getComputedStyle(document.querySelector(`#ops tr.${how} .mark`));
            const label = document.querySelector(`#ops tr.${how} .how`);
            return [how, [label.innerText.trim(), mark.borderStyle, mark.borderRadius,
                mark.backgroundColor === mark.borderColor]];
        }))"""
    )
    assert {how: word for how, (word, *_) in found.items()} == {how: how for how in found}
    shapes = [tuple(shape) for _, *shape in found.values()]
    assert len(set(shapes)) == 3
    hatched = opened.page.evaluate(
        """() => ["measured", "computed"].map((how) => getComputedStyle(
            document.querySelector(`#latency .bars li.${how} .stack i`)).backgroundImage)"""
    )
    assert hatched[0] == "none"
    assert "gradient" in hatched[1]
