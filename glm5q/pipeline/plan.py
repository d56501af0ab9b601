"""`glm5q plan`: what a model needs on a chip, before anything is run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glm5q.config import ModelConfig
from glm5q.errors import RecipeError, UserError
from glm5q.pipeline.footprint import LONGEST
from glm5q.pipeline.subject import Subject, capacity, chip_of, goodness, subject_of
from recipes import checks, files
from recipes.schema import Recipe
from targets import base
from targets.plan import calibration, layouts, memory, roofline, weights
from targets.plan.layouts import Legal
from targets.plan.memory import Cache, Device, KvLayout, Layout, Load
from targets.plan.weights import Weights

MOST_DEVICES = 64  # where the search for the smallest machine stops


@dataclass(frozen=True)
class PlanOptions:
    """What `glm5q plan` was asked for.

    None takes the recipe's chip, one machine of it, and LONGEST or as many tokens as the model was
    made for.
    """

    model: str
    recipe: str
    chip: str | None = None
    count: int | None = None
    context: int | None = None
    concurrency: int = 1
    kv: KvLayout = "bf16"
    mtp: bool = True
    reserve: float = memory.RESERVE
    disk_bytes_s: float = calibration.DISK_BYTES_S


@dataclass(frozen=True)
class Found:
    """A plan. `devices` holds the fullest device of each legal layout.

    `best` is the one of those that fit whose decode is the fastest by `estimates`' model; if none
    fits, or a figure is unknown, the one that holds the most requests.

    `smallest` is the least number of devices that fits, None if none up to MOST_DEVICES does.
    `whole` is without the MTP layers where `mtp` is False.
    """

    subject: Subject
    recipe: Recipe
    chip: base.Target
    count: int
    load: Load
    mtp: bool
    cache: Cache
    whole: Weights
    layouts: tuple[Legal, ...]
    devices: tuple[Device, ...]
    best: Device
    smallest: int | None
    kv: dict[KvLayout, Device | str]
    estimates: tuple[roofline.Estimate, ...]
    needs: calibration.Needs
    notes: tuple[str, ...]


def plan(options: PlanOptions) -> Found:
    """Returns what the model needs on the chip, by layout. Raises UserError for what cannot be."""
    recipe = files.load(options.recipe)
    chip = chip_of(options.chip or recipe.target)
    subject = subject_of(options.model)
    config = subject.config
    context = options.context or min(LONGEST, config.max_position_embeddings)
    load = Load(context, options.concurrency)
    count = options.count or layouts.machine(chip.name)
    mtp = options.mtp and config.num_nextn_predict_layers > 0
    _check(options, load, recipe, chip, config)
    cache = Cache(options.kv, memory.index_layout(chip, options.kv))
    found = tuple(layouts.legal(config, recipe, count))
    planner = _Planner(subject, recipe, chip, load, mtp, options.reserve)
    devices = tuple(planner.device(one.layout, cache) for one in found if one.why_not is None)
    if not devices:
        reason = f"{found[0].layout.label()}: {found[0].why_not}"
        raise UserError(
            f"--count {count}: no layout is legal ({reason})", "give another number of devices"
        )
    speeds = {device.layout: planner.decode(device.layout, cache) for device in devices}
    best = max(devices, key=lambda device: _fastest(device, speeds[device.layout]))
    on = roofline.Machine(config, recipe, chip, best.layout, cache, subject.elements)
    whole = weights.weights(config, recipe, elements=subject.elements)
    return Found(
        subject,
        recipe,
        chip,
        count,
        load,
        mtp,
        cache,
        whole if mtp else replace(whole, mtp=0),
        found,
        devices,
        best,
        planner.smallest(cache),
        {kv: planner.other(kv, best.layout) for kv in memory.KV_LAYOUTS},
        (speeds[best.layout], on.prefill(load)),
        calibration.needs(
            config, recipe, chip, subject.source_bytes, subject.elements, options.disk_bytes_s
        ),
        tuple(_notes(options, recipe, chip, config)),
    )


def _check(
    options: PlanOptions, load: Load, recipe: Recipe, chip: base.Target, config: ModelConfig
) -> None:
    checks.check_fits(recipe, config)
    for problem in base.check_recipe_dtypes(chip.name, recipe.activations()):
        raise RecipeError(f"{recipe.name}: {problem}", "choose a recipe for this chip")
    if why := memory.kv_refusal(chip, options.kv):
        raise UserError(f"--kv {options.kv}: {chip.title} has none: {why}", "give --kv bf16")
    most = config.max_position_embeddings
    if load.context > most:
        raise UserError(
            f"--context {load.context}: the model was made for {most} positions",
            f"give {most} or less",
        )


def _notes(
    options: PlanOptions, recipe: Recipe, chip: base.Target, config: ModelConfig
) -> list[str]:
    notes = base.unverified_recipe_dtypes(chip.name, recipe.activations())
    if recipe.target != chip.name:
        notes.append(f"{recipe.name} was written for {recipe.target}")
    most = config.max_position_embeddings
    if options.context is None and most < LONGEST:
        notes.append(f"{most:,} tokens a request, not {LONGEST:,}: the model was made for no more")
    return notes


def _fastest(device: Device, decode: roofline.Estimate) -> tuple[float, tuple[object, ...]]:
    return (decode.tokens_per_s or 0.0) if device.fits else -1.0, goodness(device)


@dataclass(frozen=True)
class _Planner:
    """Plans one model and recipe on one chip, over any number of devices."""

    subject: Subject
    recipe: Recipe
    chip: base.Target
    load: Load
    mtp: bool
    reserve: float

    def device(self, layout: Layout, cache: Cache) -> Device:
        return self._plan(layout, cache).device(self.load)

    def decode(self, layout: Layout, cache: Cache) -> roofline.Estimate:
        subject = self.subject
        on = roofline.Machine(
            subject.config, self.recipe, self.chip, layout, cache, subject.elements
        )
        return on.decode(self.load)

    def _plan(self, layout: Layout, cache: Cache) -> memory.Plan:
        config, elements = self.subject.config, self.subject.elements
        mine = weights.weights(config, self.recipe, layouts.share(layout), elements)
        return memory.Plan(config, mine, cache, layout, capacity(self.chip), self.mtp, self.reserve)

    def smallest(self, cache: Cache) -> int | None:
        """Returns the least number of devices that holds the load in some legal layout."""
        room = capacity(self.chip)
        if room is None:
            return None
        config, elements = self.subject.config, self.subject.elements
        whole = weights.weights(config, self.recipe, elements=elements)
        least = whole.total - (0 if self.mtp else whole.mtp)  # the fullest holds the mean or more
        for count in range(max(1, -(-least // room)), MOST_DEVICES + 1):
            for one in layouts.legal(self.subject.config, self.recipe, count):
                if one.why_not is None and self._plan(one.layout, cache).fits(self.load):
                    return count
        return None

    def other(self, kv: KvLayout, layout: Layout) -> Device | str:
        """Returns the device with another KV layout, or why the chip has not that one."""
        if why := memory.kv_refusal(self.chip, kv):
            return why
        return self.device(layout, Cache(kv, memory.index_layout(self.chip, kv)))
