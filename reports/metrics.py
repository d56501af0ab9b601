"""What two runs are compared by: each metric's name, its value in a record, and what is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from reports.record import Accuracy, Latency, LayerAccuracy, RunRecord

Group = Literal["accuracy", "size", "latency", "cost"]
Value = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class Spec:
    """One metric. `exact`: a count, in which any difference is one; `form` as in reports.text."""

    key: str
    group: Group
    form: str
    better: Literal["lower", "higher"]
    value: Value
    exact: bool = False


def specs(records: Sequence[RunRecord]) -> list[Spec]:
    """Every metric that at least one of `records` has, in the order shown."""
    found = [*_FIXED, *_roles(records), *_latency(records), *_assembled(records), *_times(records)]
    order = ("accuracy", "size", "latency", "cost")
    kept = [spec for spec in found if any(spec.value(record) is not None for record in records)]
    return sorted(kept, key=lambda spec: order.index(spec.group))


def _accuracy(field: str) -> Value:
    return lambda record: getattr(record.accuracy, field) if record.accuracy else None


def _mtp(field: str) -> Value:
    def value(record: RunRecord) -> float | None:
        mtp = record.accuracy.mtp if record.accuracy else None
        return getattr(mtp, field) if mtp else None

    return value


def _worst(
    read: Callable[[LayerAccuracy], float | None], worst: Callable[[list[float]], float]
) -> Value:
    def value(record: RunRecord) -> float | None:
        layers = record.accuracy.layers if record.accuracy else []
        found = [value for value in map(read, layers) if value is not None]
        return worst(found) if found else None

    return value


_FIXED = (
    Spec("kl_mean", "accuracy", "sig", "lower", _accuracy("kl_mean")),
    Spec("kl_p50", "accuracy", "sig", "lower", _accuracy("kl_p50")),
    Spec("kl_p95", "accuracy", "sig", "lower", _accuracy("kl_p95")),
    Spec("kl_p99", "accuracy", "sig", "lower", _accuracy("kl_p99")),
    Spec("perplexity", "accuracy", "sig", "lower", _accuracy("perplexity_quantized")),
    Spec("top1_agreement", "accuracy", "pct", "higher", _accuracy("top1_agreement")),
    Spec("mtp_agreement", "accuracy", "pct", "higher", _mtp("agreement")),
    Spec("mtp_acceptance", "accuracy", "pct", "higher", _mtp("acceptance_quantized")),
    Spec("topk_overlap_min", "accuracy", "pct", "higher", _worst(lambda a: a.topk_overlap, min)),
    Spec("router_agreement_min", "accuracy", "pct", "higher",
         _worst(lambda a: a.router_agreement, min)),
    Spec("quantized_bytes", "size", "size", "lower",
         lambda r: r.size.quantized_bytes if r.size else None, exact=True),
    Spec("fallbacks", "cost", "int", "lower",
         lambda r: len(r.fallbacks) if r.layers else None, exact=True),
    Spec("peak_memory_bytes", "cost", "size", "lower", lambda r: r.peak_memory_bytes or None),
)  # fmt: skip


def _roles(records: Sequence[RunRecord]) -> Iterable[Spec]:
    judged: list[Accuracy] = [record.accuracy for record in records if record.accuracy]
    roles = dict.fromkeys(r for a in judged for layer in a.layers for r in layer.role_error)
    for role in roles:
        yield Spec(f"role_error_max.{role}", "accuracy", "sig", "lower", _worst_role(role))


def _worst_role(role: str) -> Value:
    return _worst(lambda layer: layer.role_error.get(role), max)


def same_methods(a: RunRecord, b: RunRecord) -> bool:
    """Whether both runs could fall back in the same ways: one method a role, pooled or not."""
    return _methods(a) == _methods(b)


def _methods(record: RunRecord) -> set[tuple[str, str, bool]]:
    """(role, method, pooling) of every plan of the recipe, its overrides' too."""
    content = record.recipe.content if record.recipe else {}
    plans = list(content.get("weights", {}).items())
    plans += [(o["role"], o["plan"]) for o in content.get("overrides", ())]
    return {(role, str(plan.get("method")), bool(plan.get("pooling"))) for role, plan in plans}


def latency_of(record: RunRecord, key: str, targets: set[str]) -> Latency | None:
    """The row that answers for `key`: the recipe's own target, measured and fastest first."""
    own = record.recipe.target if record.recipe else None
    rows = [row for row in record.latency if key == op_key(row, targets)]
    order = {"measured": 0, "computed": 1, "quoted": 2}
    return min(rows, key=lambda r: (r.target != own, order[r.how], r.median_s), default=None)


def op_key(row: Latency, targets: set[str]) -> str:
    """`latency.sparse_attention.tokens4096.keys65536`, with the target where runs share some."""
    shape = [f"{name}{value}" for name, value in row.shape.items()]
    target = [row.target] if row.target in targets else []
    return ".".join(["latency", row.op, *shape, *target])


def common_targets(records: Sequence[RunRecord]) -> set[str]:
    """Targets that every record with latencies has; empty when chips are compared with chips."""
    sets = [{row.target for row in record.latency} for record in records if record.latency]
    return set.intersection(*sets) if sets else set()


def _latency(records: Sequence[RunRecord]) -> Iterable[Spec]:
    targets = common_targets(records)
    rows = [row for record in records for row in record.latency]
    if targets:
        rows = [row for row in rows if row.target in targets]
    for key in dict.fromkeys(op_key(row, targets) for row in rows):
        yield Spec(key, "latency", "time", "lower", _median(key, targets))


def _median(key: str, targets: set[str]) -> Value:
    def value(record: RunRecord) -> float | None:
        row = latency_of(record, key, targets)
        return row.median_s if row else None

    return value


def _assembled(records: Sequence[RunRecord]) -> Iterable[Spec]:
    keys = dict.fromkeys(
        f"{run.stage}.context{run.context}.batch{run.batch}"
        for record in records
        for run in record.assembled
    )
    for key in keys:
        yield Spec(f"tokens_per_s.{key}", "latency", "rate", "higher", _throughput(key))


def _throughput(key: str) -> Value:
    def value(record: RunRecord) -> float | None:
        own = record.recipe.target if record.recipe else None
        runs = [
            run
            for run in record.assembled
            if key == f"{run.stage}.context{run.context}.batch{run.batch}"
        ]
        best = min(runs, key=lambda run: (run.target != own, -run.tokens_per_s), default=None)
        return best.tokens_per_s if best else None

    return value


def _times(records: Sequence[RunRecord]) -> Iterable[Spec]:
    for name in dict.fromkeys(name for record in records for name in record.times_s):
        yield Spec(f"times_s.{name}", "cost", "time", "lower", _time(name))


def _time(name: str) -> Value:
    return lambda record: record.times_s.get(name)
