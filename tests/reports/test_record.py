"""Records: what is written is read back, whatever the numbers; other schemas are refused."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest

from glm5q.errors import UserError
from reports.measures import RecallPoint
from reports.record import MtpAccuracy, RunRecord, read_record, write_record
from tests.reports.made_up import record

V1 = Path(__file__).parent / "data" / "record-v1.json"


def test_round_trip(tmp_path: Path) -> None:
    made = record(layers=5, experts=8, windows=4)
    write_record(made, tmp_path / "report.json")
    assert read_record(tmp_path) == made
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_not_a_number_survives(tmp_path: Path) -> None:
    made = record(layers=3, experts=4, windows=4)
    assert made.accuracy is not None
    mtp = MtpAccuracy(
        agreement=math.nan, acceptance_source=math.inf, acceptance_quantized=-math.inf
    )
    broken = made.model_copy(
        update={"accuracy": made.accuracy.model_copy(update={"mtp": mtp, "kl_mean": math.nan})}
    )
    write_record(broken, tmp_path / "report.json")
    back = read_record(tmp_path)
    assert back.accuracy is not None
    assert back.accuracy.mtp is not None
    assert math.isnan(back.accuracy.kl_mean)
    assert math.isnan(back.accuracy.mtp.agreement)
    assert back.accuracy.mtp.acceptance_source == math.inf


def test_additions_are_optional() -> None:
    """A schema-1 record without any of the later fields is read, and they are absent, not zero."""
    old = read_record(V1)
    assert old.schema_version == 1
    assert old.memory is None
    assert old.sweeps == []
    assert old.accuracy is not None
    assert old.accuracy.indexer is None
    assert old.accuracy.window_top1 == []
    assert old.accuracy.layers[0].kl is None
    assert old.layers[0].matrices[0].input_p999 is None
    assert old.latency[0].over_floor is None


def test_the_old_record_is_as_it_was_written() -> None:
    """Golden: mending a reader by rewriting what it must read proves nothing."""
    digest = hashlib.sha256(V1.read_bytes()).hexdigest()
    assert digest == "eb24b56a9244eb2f507e9608eb977ea834409974644f68d77ba99d8c440c455a"


@pytest.mark.parametrize("field", ["input_absmax", "output_absmax"])
def test_zero_of_both_ranges_was_never_observed(field: str) -> None:
    raw = json.loads(V1.read_text())
    matrix = raw["layers"][0]["matrices"][0]
    matrix |= {"input_absmax": 0.0, "output_absmax": 0.0, "input_p999": 0.0, "outlier_channels": 0}
    read = RunRecord.model_validate(raw).layers[0].matrices[0]
    assert (read.input_absmax, read.output_absmax, read.reach) == (None, None, None)
    assert (read.input_p999, read.outlier_channels) == (None, None)
    matrix[field] = 2.5  # one side alone was seen
    read = RunRecord.model_validate(raw).layers[0].matrices[0]
    assert getattr(read, field) == read.reach == 2.5


def test_other_schema_is_refused(tmp_path: Path) -> None:
    raw = json.loads(V1.read_text()) | {"schema_version": 2}
    (tmp_path / "report.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match="record schema 2, this glm5q reads 1"):
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", '{"schema_version": 1}', "{"])
def test_damaged_record_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_record(tmp_path)
    assert "report.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        RecallPoint.model_validate({"k": 1, "attention_mass": 1.0, "flop": 1.0, "mass": 2})


def test_slowest_prefers_measured() -> None:
    made = record(layers=3, experts=4, windows=4)
    slowest = made.slowest
    assert slowest is not None
    row = made.latency[slowest]
    assert row.how == "measured"
    assert row.median_s == max(r.median_s for r in made.latency if r.how == "measured")
    declared = [r for r in made.latency if r.how != "measured"]
    only = made.model_copy(update={"latency": declared})
    assert declared[only.slowest or 0].median_s == max(r.median_s for r in declared)
    assert RunRecord.model_validate(made.model_dump() | {"latency": []}).slowest is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("size", "quantized_bytes"), -5),
        (("size", "quantized_bytes"), 10**400),
        (("latency", 0, "low_s"), -1.0),
        (("peak_memory_bytes",), -1),
        (("times_s",), {"a/b": 1.0}),
        (("machine", "versions"), {"a/b": "1"}),
        (("memory", "devices", 0, "parts"), {"a/b": 1}),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    write_record(record(layers=3, experts=4, windows=4), tmp_path / "report.json")
    raw = json.loads((tmp_path / "report.json").read_text())
    at = raw
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    (tmp_path / "report.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=str(path[-1])):
        read_record(tmp_path)
