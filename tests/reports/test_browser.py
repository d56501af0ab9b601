"""A run's page in a real browser: no network, no error, right marks, every number the record's."""

from __future__ import annotations

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
    assert opened.count("#strip rect") == 4 * layers + errors + roles
    buckets = sum(v is not None for one in indexer.layers for v in one.overlap)
    assert opened.count("#overlap rect") == 2 * layers + buckets
    assert opened.count("#ranges rect") == roles


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
