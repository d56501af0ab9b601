"""Memory plans as records hold them: of a finished output, its weights as they were written."""

from __future__ import annotations

from glm5q import names
from glm5q.checkpoint import Checkpoint
from glm5q.config import ModelConfig
from glm5q.pipeline import describe
from glm5q.pipeline.subject import capacity, chip_of, elements_of, goodness
from glm5q.types import Role
from glm5q.writer import Shard
from recipes.schema import Recipe
from reports.measures import DevicePlan, MemoryPlan
from targets import base
from targets.plan import layouts, memory, weights
from targets.plan.memory import Cache, Device, Load
from targets.plan.weights import Weights

LONGEST = 200_000  # tokens a record plans for, or as many as the model was made for
PARTS = {  # parts of a device that are not weights -> what a record calls them
    "mtp": "mtp",
    "kv_cache": "kv_cache",
    "index_cache": "index_cache",
    "activations": "activations",
    "scores": "activations",
    "reserve": "reserve",
}


def memory_plan(
    config: ModelConfig,
    chip: base.Target,
    cache: Cache,
    load: Load,
    mtp: bool,
    devices: tuple[Device, ...],
) -> MemoryPlan:
    row = memory.kv_row_bytes(config, cache.kv)
    return MemoryPlan(
        context=load.context,
        concurrency=load.concurrency,
        kv_layout=f"{memory.KV_TITLES[cache.kv]}, {row} B a token and layer",
        kv_bytes_per_token=memory.kv_bytes_per_token(config, cache, mtp),
        index_bytes_per_token=memory.index_bytes_per_token(config, cache, mtp),
        devices=[_device_plan(chip, device) for device in devices if device.capacity is not None],
    )


def _device_plan(chip: base.Target, device: Device) -> DevicePlan:
    parts: dict[str, int] = {"weights": 0}
    for name, size in device.parts.items():
        key = PARTS.get(name, "weights")
        parts[key] = parts.get(key, 0) + size
    return DevicePlan(
        chip=chip.title,
        count=device.layout.devices,
        layout=device.layout.label(),
        capacity_bytes=device.capacity or 0,
        parts=parts,
        fits=bool(device.fits),
        max_context=device.max_context,
        max_concurrency=device.max_concurrency,
    )


def record_plan(source: Checkpoint, recipe: Recipe, shards: list[Shard]) -> MemoryPlan:
    """Returns where a finished output fits on its recipe's chip, its weights as they were written.

    One sequence, as long as the model was made for and at most LONGEST; devices doubled until it
    fits, or one machine is full.
    """
    config, elements = source.config, elements_of(source)
    chip = chip_of(recipe.target)
    load = Load(min(LONGEST, config.max_position_embeddings), 1)
    cache = Cache("bf16", memory.index_layout(chip, "bf16"))
    mtp = config.num_nextn_predict_layers > 0
    planned = weights.weights(config, recipe, elements=elements)
    actual = written(config, shards)
    devices: list[Device] = []
    count = 1
    while count <= layouts.machine(chip.name) and not (devices and devices[-1].fits):
        found = []
        for one in layouts.legal(config, recipe, count):
            if one.why_not is None:
                share = weights.weights(config, recipe, layouts.share(one.layout), elements)
                mine = _as_written(share, planned, actual)
                on = memory.Plan(config, mine, cache, one.layout, capacity(chip), mtp)
                found.append(on.device(load))
        devices += [max(found, key=goodness)] if found else []
        count *= 2
    return memory_plan(config, chip, cache, load, mtp, tuple(devices))


def written(config: ModelConfig, shards: list[Shard]) -> Weights:
    """Returns an output's bytes by role and of its MTP layers, from what its shards hold."""
    expected = names.expected_tensors(config)
    mtp = tuple(names.layer_prefix(n) for n in range(config.num_layers) if config.is_mtp(n))
    by_role: dict[Role, int] = {}
    beside = 0
    for shard in shards:
        for name, size in shard.tensors.items():
            if name.startswith(mtp) and mtp:
                beside += size
            else:
                role = Role(describe.role_of(describe.base_name(name), expected))
                by_role[role] = by_role.get(role, 0) + size
    return Weights(by_role, beside)


def _as_written(share: Weights, planned: Weights, actual: Weights) -> Weights:
    """A device's planned share, scaled by what was written over what was planned of each role."""

    def scaled(size: int, planned_whole: int, actual_whole: int) -> int:
        return round(size * actual_whole / planned_whole) if planned_whole else actual_whole

    return Weights(
        {
            role: scaled(size, planned.by_role[role], actual.by_role.get(role, 0))
            for role, size in share.by_role.items()
        },
        scaled(share.mtp, planned.mtp, actual.mtp),
    )
