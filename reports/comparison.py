"""Runs side by side: what moved against the first, and whether it moved by more than the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glm5q.errors import UserError
from reports import metrics
from reports.record import ENOUGH_WINDOWS, Accuracy, RunRecord

# The words that terminal, page and Markdown alike say.
Verdict = Literal[
    "better",
    "worse",
    "within noise",
    "equal",
    "noise not known",
    "not measured in both",
    "other method",
]
Floats = NDArray[np.float64]

_RESAMPLES = 4000
_SEED = 20261130


@dataclass(frozen=True)
class Cell:
    """One run's value of one metric, against the baseline's.

    `delta` = value - baseline, `ratio` = value / baseline; `low` and `high` bound delta's 95 %
    interval. None where there is none. The baseline's own cell has a value only.
    """

    value: float | None
    delta: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Metric:
    """One row; `cells` follow Comparison.names. `form` as in reports.text."""

    key: str
    group: metrics.Group
    form: str
    better: Literal["lower", "higher"]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Comparison:
    """`records[0]` is the baseline. `forced` says in what the runs differ that should be equal.

    `window_delta[i]`: KL by window of run i + 1 less the baseline's; empty where not paired.
    `few[i]`: how many windows run i + 1's intervals rest on if they are too few, else 0.
    """

    names: tuple[str, ...]
    records: tuple[RunRecord, ...]
    metrics: tuple[Metric, ...]
    window_delta: tuple[tuple[float, ...], ...]
    forced: tuple[str, ...] = ()
    few: tuple[int, ...] = ()

    def warnings(self) -> tuple[str, ...]:
        """One line a run whose intervals rest on too few windows."""
        return tuple(
            f"{name}: intervals rest on {count} windows only; fewer than {ENOUGH_WINDOWS} "
            "say little about the noise"
            for name, count in zip(self.names[1:], self.few, strict=True)
            if count
        )


def compare(records: Sequence[RunRecord], names: Sequence[str], force: bool = False) -> Comparison:
    """Compares every record with the first.

    Raises UserError if fewer than two are given, or if source checkpoint or evaluation data differ
    and `force` is not set; what a record lacks altogether is not a difference.
    """
    if len(records) < 2:
        raise UserError(f"{len(records)} run given", "compare takes two or more")
    differences = [
        difference
        for record, name in zip(records[1:], names[1:], strict=True)
        for difference in _differences(records[0], record, names[0], name)
    ]
    if differences and not force:
        raise UserError("not comparable: " + "; ".join(differences), "--force compares anyway")
    rows = tuple(_metric(spec, records) for spec in metrics.specs(records))
    deltas = tuple(
        tuple(float(d) for d in _paired(records[0], record, "window_kl")) for record in records[1:]
    )
    few = tuple(len(d) if 0 < len(d) < ENOUGH_WINDOWS else 0 for d in deltas)
    return Comparison(tuple(names), tuple(records), rows, deltas, tuple(differences), few)


def _differences(base: RunRecord, other: RunRecord, a: str, b: str) -> list[str]:
    found = []
    if base.source and other.source and base.source.content_hash != other.source.content_hash:
        left = f"{base.source.variant} {base.source.content_hash[:12]}"
        right = f"{other.source.variant} {other.source.content_hash[:12]}"
        found.append(f"source checkpoint differs ({a}: {left}, {b}: {right})")
    if base.accuracy and other.accuracy and not _same_data(base.accuracy, other.accuracy):
        left = f"{base.accuracy.data.name} {base.accuracy.data.content_hash[:12]}"
        right = f"{other.accuracy.data.name} {other.accuracy.data.content_hash[:12]}"
        found.append(f"evaluation data differs ({a}: {left}, {b}: {right})")
    return found


def _same_data(one: Accuracy, other: Accuracy) -> bool:
    return one.data.content_hash == other.data.content_hash


def _metric(spec: metrics.Spec, records: Sequence[RunRecord]) -> Metric:
    base = spec.value(records[0])
    cells = [Cell(base)]
    cells += [_cell(spec, base, spec.value(record), records[0], record) for record in records[1:]]
    return Metric(spec.key, spec.group, spec.form, spec.better, tuple(cells))


def _cell(
    spec: metrics.Spec, base: float | None, value: float | None, a: RunRecord, b: RunRecord
) -> Cell:
    if value is None or base is None:
        return Cell(value, verdict="not measured in both")
    delta = value - base
    ratio = value / base if base else None
    low, high = _interval(spec, a, b)
    verdict = _verdict(spec, base, value, low, high)
    if spec.key == "fallbacks" and delta and not metrics.same_methods(a, b):
        verdict = "other method"  # one that cannot fall back is not better for never doing so
    return Cell(value, delta, ratio, low, high, verdict)


def _verdict(
    spec: metrics.Spec, base: float, value: float, low: float | None, high: float | None
) -> Verdict:
    if not math.isfinite(value) or not math.isfinite(base):
        return "worse" if math.isfinite(base) else "noise not known"
    if value == base:
        return "equal"
    if spec.exact:
        low = high = value - base
    if low is None or high is None:
        return "noise not known"
    if low <= 0 <= high:
        return "within noise"
    return "better" if (high < 0) == (spec.better == "lower") else "worse"


def _interval(spec: metrics.Spec, a: RunRecord, b: RunRecord) -> tuple[float | None, float | None]:
    if spec.key == "kl_mean":
        return _bootstrap(_paired(a, b, "window_kl"))
    if spec.key == "top1_agreement":
        return _bootstrap(_paired(a, b, "window_top1"))
    if spec.key == "perplexity":
        return _perplexity_interval(a, b)
    if spec.key.startswith("latency."):
        return _spread(spec.key, a, b)
    return None, None


def _windows(a: RunRecord, b: RunRecord, field: str) -> tuple[Floats, Floats]:
    """Both runs' values by window, or two empty arrays if they cannot be paired."""
    empty = np.empty(0), np.empty(0)
    if not a.accuracy or not b.accuracy or not _same_data(a.accuracy, b.accuracy):
        return empty
    left = np.asarray(getattr(a.accuracy, field), dtype=np.float64)
    right = np.asarray(getattr(b.accuracy, field), dtype=np.float64)
    return (left, right) if left.size == right.size > 0 else empty


def _paired(a: RunRecord, b: RunRecord, field: str) -> Floats:
    left, right = _windows(a, b, field)
    return right - left


def _resample(count: int, statistic: Callable[[NDArray[np.int64]], Floats]) -> Floats:
    """The statistic over _RESAMPLES draws of windows with replacement, some at a time."""
    rng = np.random.default_rng(_SEED)
    step = max(1, 2_000_000 // count)
    edges = [*range(0, _RESAMPLES, step), _RESAMPLES]
    draws = [statistic(rng.integers(0, count, (hi - lo, count))) for lo, hi in pairwise(edges)]
    return np.concatenate(draws)


def _percentiles(draws: Floats) -> tuple[float | None, float | None]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return (float(low), float(high)) if np.isfinite([low, high]).all() else (None, None)


def _bootstrap(delta: Floats) -> tuple[float | None, float | None]:
    """95 % percentile interval of the mean difference over windows; None below two windows."""
    if delta.size < 2:
        return None, None
    return _percentiles(_resample(delta.size, lambda draw: delta[draw].mean(axis=1)))


def _perplexity_interval(a: RunRecord, b: RunRecord) -> tuple[float | None, float | None]:
    """Of exp(mean nll) less the baseline's, the same windows drawn for both.

    None where that is more than a float holds.
    """
    left, right = _windows(a, b, "window_nll")
    if left.size < 2:
        return None, None
    with np.errstate(over="ignore", invalid="ignore"):
        return _percentiles(
            _resample(
                left.size,
                lambda draw: np.exp(right[draw].mean(axis=1)) - np.exp(left[draw].mean(axis=1)),
            )
        )


def _spread(key: str, a: RunRecord, b: RunRecord) -> tuple[float | None, float | None]:
    """From the two measurements' own ranges; a computed or quoted time has none."""
    targets = metrics.common_targets([a, b])
    left, right = (metrics.latency_of(record, key, targets) for record in (a, b))
    if left is None or right is None or {left.how, right.how} != {"measured"}:
        return None, None
    return right.low_s - left.high_s, right.high_s - left.low_s
