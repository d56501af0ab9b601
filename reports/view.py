"""What a page shows of a record, laid out for templates and scripts: selection and order only.

Bulk figures travel as columns of JSON at six significant digits (experts: five), gzipped, so that
78 layers x 256 experts stay far under the page's limit; report.json keeps every digit.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from reports import text
from reports.budget import Budget
from reports.comparison import Comparison
from reports.measures import MemoryPlan
from reports.record import Layer, Matrix, RunRecord

Columns = dict[str, list[Any]]
_METHOD_CODES = "0123456789abcdefghijklmnopqrstuvwxyz"


def page_data(record: RunRecord) -> dict[str, Any]:
    """Returns what the page's scripts draw from; see templates/js."""
    accuracy = record.accuracy
    return {
        "layers": _layers(record),
        "roles": _role_errors(record),
        "matrices": _matrices(record.layers),
        "experts": _experts(record),
        "indexer": None if accuracy is None or accuracy.indexer is None else _indexer(record),
        "windows": _windows(record),
        "sweeps": [_short(sweep.model_dump()) for sweep in record.sweeps],
        "layer_kl": None if accuracy is None else accuracy.layer_kl,
        "budget": None if record.budget is None else _short(record.budget.model_dump()),
        "effects": None if record.effects is None else _short(record.effects.model_dump()),
    }


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """What a comparison's scripts draw: error by depth of each run, KL differences by window."""
    kl = next((metric for metric in comparison.metrics if metric.key == "kl_mean"), None)
    runs = [_layers(record) for record in comparison.records]
    return {
        "names": comparison.names,
        "layers": [{k: run[k] for k in ("layer", "error", "hidden_error", "kl")} for run in runs],
        "window_delta": _short(comparison.window_delta),
        "kl": [_short([c.delta, c.low, c.high]) for c in kl.cells[1:]] if kl else [],
    }


def packed(data: Any) -> str:
    """Base64 of gzipped JSON; the same bytes for the same data."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def sections(record: RunRecord) -> dict[str, bool]:
    """Section -> whether this record has anything for it, in the page's order."""
    accuracy = record.accuracy
    budget = {} if record.budget is None else {"budget": True}
    effects = {} if record.effects is None else {"effects": True}
    return {
        "accuracy": accuracy is not None,
        **budget,
        "layers": bool(record.layers) or bool(accuracy and accuracy.layers),
        "experts": any(layer.experts for layer in record.layers),
        "fallbacks": bool(record.layers),
        "indexer": bool(accuracy and accuracy.indexer) or _any_accuracy(record, "topk_overlap"),
        **effects,
        "router": bool(accuracy and accuracy.mtp) or _any_accuracy(record, "router_agreement"),
        "activations": any(layer.matrices for layer in record.layers),
        "latency": bool(record.latency or record.sweeps or record.assembled),
        "memory": bool(record.memory or record.size),
        "provenance": True,
    }


def worst_experts(record: RunRecord, most: int = 20) -> list[tuple[int, int]]:
    """(index into layers, expert), largest error first, before them any that is not a number."""
    pairs = [
        (-math.inf if math.isnan(error) else -error, at, expert)
        for at, layer in enumerate(record.layers)
        for expert, error in enumerate(layer.experts.error if layer.experts else [])
    ]
    return [(at, expert) for _, at, expert in sorted(pairs)[:most]]


def fallen_experts(record: RunRecord) -> set[tuple[int, int]]:
    """(layer number, expert) of every expert with a fallback."""
    return {(f.layer, f.expert) for f in record.fallbacks if f.expert is not None}


def role_peaks(record: RunRecord) -> list[tuple[str, int, int]]:
    """(role, layer index, matrix index) of each role's largest magnitude, in order of appearance.

    A role that was never observed stands there too, by its first matrix.
    """
    peaks: dict[str, tuple[float, int, int]] = {}
    for at, layer in enumerate(record.layers):
        for number, matrix in enumerate(layer.matrices):
            reach = -math.inf if matrix.reach is None else matrix.reach
            if matrix.role not in peaks or not reach <= peaks[matrix.role][0]:
                peaks[matrix.role] = (reach, at, number)
    return [(role, at, number) for role, (_, at, number) in peaks.items()]


def latency_groups(record: RunRecord) -> list[tuple[str, str, list[int]]]:
    """(target, device, indices into latency): measured first, then in the record's order."""
    strength = {"measured": 0, "computed": 1, "quoted": 2}
    groups: dict[tuple[str, str], list[int]] = {}
    for index in sorted(range(len(record.latency)), key=lambda i: strength[record.latency[i].how]):
        row = record.latency[index]
        groups.setdefault((row.target, row.device), []).append(index)
    return [(*key, rows) for key, rows in groups.items()]


class LogAxis:
    """Positions in percent on a decade axis that spans `values`."""

    def __init__(self, values: Iterable[float]) -> None:
        kept = [value for value in values if value > 0 and math.isfinite(value)]
        self._low = math.floor(math.log10(min(kept, default=1.0)) * 2) / 2
        self._high = max(math.ceil(math.log10(max(kept, default=1.0)) * 2) / 2, self._low + 0.5)

    def at(self, value: float) -> float:
        if not value > 0:
            return 0.0
        return round((math.log10(value) - self._low) / (self._high - self._low) * 100, 2)

    def ticks(self) -> list[tuple[float, float]]:
        """(value, position) of each power of ten within."""
        powers = range(math.ceil(self._low), math.floor(self._high) + 1)
        return [(10.0**power, self.at(10.0**power)) for power in powers]


def latency_axis(record: RunRecord) -> LogAxis:
    rows = record.latency
    return LogAxis(v for row in rows for v in (row.low_s, row.high_s, row.floor_s or row.low_s))


def budget_table(budget: Budget) -> dict[str, Any]:
    """`roles`, and `rows` of (layer, its unit of each role, None where there is no choice)."""
    roles = list(dict.fromkeys(unit.role for unit in budget.units))
    found = {(unit.layer, unit.role): unit for unit in budget.units}
    layers = dict.fromkeys(unit.layer for unit in budget.units)
    return {"roles": roles, "rows": [(n, [found.get((n, r)) for r in roles]) for n in layers]}


def share(part: float, whole: float) -> float:
    """Percent of `whole`, for a bar's width."""
    return round(100 * part / whole, 3) if whole else 0.0


def by_role(roles: dict[str, tuple[int, int]], which: int) -> list[tuple[str, int]]:
    """(role, bytes) before (`which` 0) or after (1)."""
    return [(role, both[which]) for role, both in roles.items()]


def fits_first(plan: MemoryPlan) -> list[int]:
    """Indices into the plan's devices: those that fit, then the others, each in the plan's order.

    The first screen has room for a few.
    """
    return sorted(range(len(plan.devices)), key=lambda at: not plan.devices[at].fits)


def widest(plan: MemoryPlan) -> int:
    """Bytes that a memory bar's full width stands for."""
    return max((max(d.capacity_bytes, sum(d.parts.values())) for d in plan.devices), default=1)


def six(value: float | None, digits: int = 6) -> float | str | None:
    """Six significant digits; what JSON cannot say (nan, inf) as a string."""
    if value is None or isinstance(value, int):
        return value
    if not math.isfinite(value):
        return str(value)
    kept = float(f"{value:.{digits}g}")
    if text.significant(kept) == text.significant(value):
        return kept
    # Rounded twice, 0.1074499 would be shown as 0.1075: one step of the last digit back.
    step = 10.0 ** (math.floor(math.log10(abs(value))) + 1 - digits)
    return float(f"{kept + math.copysign(step, value - kept):.{digits}g}")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return six(value)
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value


def _any_accuracy(record: RunRecord, field: str) -> bool:
    layers = record.accuracy.layers if record.accuracy else []
    return any(getattr(layer, field) is not None for layer in layers)


def _layers(record: RunRecord) -> Columns:
    calibrated = {layer.layer: layer for layer in record.layers}
    judged = {layer.layer: layer for layer in record.accuracy.layers} if record.accuracy else {}
    numbers = sorted(calibrated | judged)
    columns: Columns = {"layer": numbers}
    for name in ("kind", "indexer", "error", "source_bytes", "quantized_bytes", "time_s"):
        columns[name] = [_get(calibrated.get(number), name) for number in numbers]
    columns["fallbacks"] = [
        len(calibrated[number].fallbacks) if number in calibrated else None for number in numbers
    ]
    fields = ("hidden_error", "kl", "topk_overlap", "topk_overlap_p1", "router_agreement")
    for name in fields:
        columns[name] = [_get(judged.get(number), name) for number in numbers]
    return columns


def _get(item: Any, name: str) -> Any:
    return None if item is None else _short(getattr(item, name))


def _role_errors(record: RunRecord) -> dict[str, list[Any]]:
    """Role -> error by layer, in the order of _layers()'s numbers; None where a layer lacks it."""
    if record.accuracy is None:
        return {}
    judged = {layer.layer: layer.role_error for layer in record.accuracy.layers}
    numbers = sorted({layer.layer for layer in record.layers} | set(judged))
    roles = list(dict.fromkeys(role for errors in judged.values() for role in errors))
    return {role: [six(judged.get(n, {}).get(role)) for n in numbers] for role in roles}


_WORDS = ("module", "role", "scheme", "method")
_NUMBERS = (
    "bits", "error", "input_absmax", "output_absmax", "matrices",
    "input_p999", "outlier_channels", "weight_error",
)  # fmt: skip


def _matrices(layers: Sequence[Layer]) -> dict[str, Any]:
    """`rows[layer]` holds one list a matrix: four indices into `words`, then `numbers`."""
    words: dict[str, dict[str, int]] = {name: {} for name in _WORDS}

    def row(matrix: Matrix) -> list[Any]:
        indices = [words[n].setdefault(getattr(matrix, n), len(words[n])) for n in _WORDS]
        return indices + [six(getattr(matrix, name)) for name in _NUMBERS]

    rows = {str(layer.layer): [row(matrix) for matrix in layer.matrices] for layer in layers}
    return {"rows": rows, "words": {n: list(words[n]) for n in _WORDS}, "numbers": _NUMBERS}


def _experts(record: RunRecord) -> dict[str, Any] | None:
    """Flat over layers: `counts[i]` experts of layer `layer[i]`, methods as one character each."""
    kept = [(layer.layer, layer.experts) for layer in record.layers if layer.experts]
    if not kept:
        return None
    methods: dict[str, int] = {}
    for _, experts in kept:
        for method in experts.method:
            methods.setdefault(method, min(len(methods), len(_METHOD_CODES) - 1))
    return {
        "layer": [number for number, _ in kept],
        "counts": [len(experts.tokens) for _, experts in kept],
        "tokens": [tokens for _, experts in kept for tokens in experts.tokens],
        "error": [six(error, 5) for _, experts in kept for error in experts.error],
        "methods": list(methods),
        "method": "".join(_METHOD_CODES[methods[m]] for _, e in kept for m in e.method),
        "fallen": sorted(fallen_experts(record)),
    }


def _indexer(record: RunRecord) -> Any:
    assert record.accuracy is not None
    assert record.accuracy.indexer is not None
    return _short(record.accuracy.indexer.model_dump())


def _windows(record: RunRecord) -> dict[str, Any] | None:
    accuracy = record.accuracy
    if accuracy is None:
        return None
    fields = ("kl_mean", "kl_low", "kl_high", "window_kl", "window_top1", "window_nll")
    return {name: _short(getattr(accuracy, name)) for name in fields}
