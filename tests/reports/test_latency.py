"""`report RUN --latency BENCH`: a bench's times on a run's page, if they are of the run's chip."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5q import pipeline
from glm5q.errors import UserError
from reports.record import Latency, RunRecord, write_record
from tests.reports.made_up import record


def written(folder: Path, made: RunRecord) -> Path:
    folder.mkdir()
    write_record(made, folder / "report.json")
    return folder


def timed(target: str, median_s: float) -> RunRecord:
    row = Latency(
        op="select_topk", implementation="cpp", target=target, shape={"rows": 4}, dtype="f32",
        median_s=median_s, low_s=median_s, high_s=median_s, how="measured", device="a machine",
    )  # fmt: skip
    made = record(layers=3, experts=4, windows=4)
    none = {"recipe": None, "layers": [], "accuracy": None, "sweeps": [], "assembled": []}
    return made.model_copy(update={**none, "kind": "bench", "latency": [row]})


def test_the_times_are_the_benchs(tmp_path: Path) -> None:
    run = written(tmp_path / "run", record(layers=3, experts=4, windows=4))
    before = (run / "report.json").read_bytes()
    found, page = pipeline.render(run, None, written(tmp_path / "bench", timed("h200", 0.125)))
    assert [row.median_s for row in found.latency] == [0.125]
    assert found.slowest == 0
    assert 'value="0.125"' in page.read_text()
    assert any("a machine" in note or "latency: `" in note for note in found.notes)
    assert (run / "report.json").read_bytes() == before


def test_times_of_another_chip_are_refused(tmp_path: Path) -> None:
    run = written(tmp_path / "run", record(layers=3, experts=4, windows=4))
    with pytest.raises(UserError, match="times of cpu; the run is for h200"):
        pipeline.render(run, None, written(tmp_path / "bench", timed("cpu", 0.125)))


def test_a_record_without_times_is_refused(tmp_path: Path) -> None:
    run = written(tmp_path / "run", record(layers=3, experts=4, windows=4))
    empty = timed("h200", 0.125).model_copy(update={"latency": []})
    with pytest.raises(UserError, match="no op times"):
        pipeline.render(run, None, written(tmp_path / "bench", empty))
