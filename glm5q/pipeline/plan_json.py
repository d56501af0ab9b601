"""A plan for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from glm5q.config import ModelConfig
from glm5q.pipeline.plan import Found
from targets.plan import calibration, memory, roofline
from targets.plan.memory import Device, KvLayout


def as_json(found: Found) -> dict[str, Any]:
    """Returns the whole plan for machines; an unknown figure's value is null."""
    chip, load, config = found.chip, found.load, found.subject.config
    layout_rows: list[dict[str, Any]] = []
    by_layout = {device.layout: device for device in found.devices}
    for one in found.layouts:
        device = by_layout.get(one.layout)
        row: dict[str, Any] = {"layout": one.layout.label(), "legal": one.why_not is None}
        layout_rows.append(row | ({"why_not": one.why_not} if device is None else _json(device)))
    mtp = found.mtp
    return {
        "model": found.subject.name,
        "variant": config.variant(),
        "recipe": found.recipe.name,
        "verification": found.recipe.verification,
        "notes": list(found.notes),
        "chip": {
            "name": chip.name,
            "title": chip.title,
            "memory_bytes": asdict(chip.memory_bytes),
            "bandwidth_bytes_s": asdict(chip.bandwidth_bytes_s),
            "peak_ops_s": {name: asdict(figure) for name, figure in chip.peak_ops_s.items()},
            "weights": {name: asdict(support) for name, support in chip.weights.items()},
            "activations": {name: asdict(support) for name, support in chip.activations.items()},
            "checked": chip.verification,
        },
        "count": found.count,
        "context": load.context,
        "concurrency": load.concurrency,
        "weights": {
            "total_bytes": found.whole.total,
            "mtp_bytes": found.whole.mtp,
            "by_role": {role.value: size for role, size in found.whole.by_role.items()},
            "source_bytes": found.subject.source_bytes,
        },
        "cache": {
            "kv": found.cache.kv,
            "index": found.cache.index,
            "kv_bytes_per_token": memory.kv_bytes_per_token(config, found.cache, mtp),
            "index_bytes_per_token": memory.index_bytes_per_token(config, found.cache, mtp),
        },
        "kv_layouts": {kv: _kv_row(config, found, kv) for kv in memory.KV_LAYOUTS},
        "layouts": layout_rows,
        "best": found.best.layout.label(),
        "smallest_count": found.smallest,
        "decode": _estimate(found.estimates[0]),
        "prefill": _estimate(found.estimates[1]),
        "calibration": _needs(found.needs),
    }


def _json(device: Device) -> dict[str, Any]:
    return {
        "parts": device.parts,
        "total_bytes": device.total,
        "capacity_bytes": device.capacity,
        "fits": device.fits,
        "max_context": device.max_context,
        "max_concurrency": device.max_concurrency,
    }


def _kv_row(config: ModelConfig, found: Found, kv: KvLayout) -> dict[str, Any]:
    row: dict[str, Any] = {"row_bytes": memory.kv_row_bytes(config, kv)}
    device = found.kv[kv]
    if isinstance(device, str):
        return row | {"why_not": device}
    return row | {
        "fits": device.fits,
        "max_context": device.max_context,
        "max_concurrency": device.max_concurrency,
    }


def _estimate(one: roofline.Estimate) -> dict[str, Any]:
    return {
        "how": "computed",
        "tokens": one.tokens,
        "total_s": one.total_s,
        "tokens_per_s": one.tokens_per_s,
        "grade": one.grade,
        "inputs": {name: asdict(figure) for name, figure in one.inputs.items()},
        "unknown": one.unknown,
        "parts": [asdict(part) for part in one.parts],
    }


def _needs(needs: calibration.Needs) -> dict[str, Any]:
    return asdict(needs) | {"disk_bytes": needs.disk_bytes, "time_s": needs.time_s}
