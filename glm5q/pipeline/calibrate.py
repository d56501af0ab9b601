"""`glm5q calibrate`: recipes, data, the loop, evaluation, record and page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from calibrate import run
from calibrate.evaluate import evaluate
from calibrate.guidance import Guided, guide
from calibrate.job import Job, Place
from calibrate.ranks import joined
from calibrate.states import Progress, States, embed, silent
from calibrate.store import Store
from glm5q import formats
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.errors import OutputError, RecipeError, UserError
from glm5q.formats.quantized import open_any
from glm5q.formats.readme import readme
from glm5q.pipeline import describe
from glm5q.pipeline.budget import Spent, check_budget, spend
from glm5q.pipeline.calibrate_data import Data
from glm5q.pipeline.calibrate_options import CalibrateOptions
from glm5q.pipeline.common import check_device, check_same, scan
from glm5q.pipeline.footprint import record_plan
from glm5q.writer import Writer, check_free, file_sha256, open_writer
from recipes import checks, files, schema
from recipes.schema import Recipe
from reports import record as records
from targets.base import check_recipe_dtypes
from targets.machine import memory_bytes


def calibrate(options: CalibrateOptions, progress: Progress = silent) -> list[describe.Finished]:
    """Quantizes a checkpoint by each recipe, evaluates, and writes record and page beside it.

    One recipe writes to `output`, several to a folder each inside it. Repeating the command of an
    interrupted run resumes it. Under torchrun the processes share a layer's experts out; the first
    writes and reports, the others return nothing.
    """
    check_device(options.device)
    with joined(options.device) as (device, ranks):
        shown = progress if ranks.first else silent
        return _calibrate(options, shown, Place(device, ranks))


def _calibrate(
    options: CalibrateOptions, progress: Progress, place: Place
) -> list[describe.Finished]:
    started = time.perf_counter()
    recipes = [_adjusted(files.load(name), options) for name in options.recipes]
    source = open_checkpoint(options.source, options.latent_norm_eps)
    for recipe in recipes:
        _check_recipe(recipe, source)
        if options.budget is not None:
            check_budget(recipe, source, options.budget)
    outputs = _outputs(options, recipes)
    for output in outputs if place.ranks.first else ():
        check_free(output)  # the next steps read the source in full
    data = Data.load(options, recipes[0], source)
    _check_processes(recipes, source, data, options, place)
    content_hash = _content_hash(source, place, progress)
    scanned = time.perf_counter()
    texts = (data.calibration.tokens, data.held_out, data.evaluation.tokens)
    identities = [_identity(recipe, content_hash, data, options) for recipe in recipes]
    with _opened(recipes, outputs, identities, source, place) as writers:
        spent = [
            spend(recipe, source, options.budget, texts, place, progress, writer.state)
            for recipe, writer in zip(recipes, writers, strict=True)
        ]
        store = Store(_hidden_bytes(options, place), writers[0].state)
        jobs = _jobs([one.recipe for one in spent], writers, source, data, place, store, progress)
        run.calibrate(source, jobs, progress, place)
        own = {"repeated": source.repeated, "filed": max(store.filed, default=0)}
        seen = place.ranks.all_of([own], place.device)
        if not place.ranks.first:
            return []
        for job in jobs:
            _finish(source, job)
        quantized = time.perf_counter()
        choosing = sum(one.time_s for one in spent)
        times = {"scan": scanned - started, "layers": quantized - scanned - choosing}
        return [
            _report(source, content_hash, job, one, data, options, times, seen, progress)
            for job, one in zip(jobs, spent, strict=True)
        ]


def _check_processes(
    recipes: Sequence[Recipe],
    source: Checkpoint,
    data: Data,
    options: CalibrateOptions,
    place: Place,
) -> None:
    """Raises UserError for more processes than windows, or ones that go by different things."""
    for recipe in recipes:
        data.share(data.text(recipe, source), place)
    found = _files(source)
    check_same([_identity(recipe, found, data, options) for recipe in recipes], place)


def _content_hash(source: Checkpoint, place: Place, progress: Progress) -> str:
    """Returns the source's hash, read by each machine's first process: it may have its own copy.

    Raises UserError where that holds other bytes.
    """
    ranks = place.ranks
    own = [{"rank": ranks.rank, "hash": scan(source, progress)}] if ranks.first_of_machine else []
    first, *others = ranks.all_of(own, place.device)
    for other in others:
        if other["hash"] != first["hash"]:
            raise UserError(
                f"process {other['rank']} reads other bytes in the source than process 0",
                "copy the source to that machine again",
            )
    return str(first["hash"])


@contextmanager
def _opened(
    recipes: Sequence[Recipe],
    outputs: Sequence[Path],
    identities: Sequence[Mapping[str, str]],
    source: Checkpoint,
    place: Place,
) -> Iterator[list[Writer]]:
    """Yields a writer a recipe. Of several processes the first holds the folders and ends them.

    No other touches one that the first refuses.
    """
    writers: list[Writer] = []
    done = False
    shards = source.config.num_layers + 2
    try:
        for recipe, output, identity in zip(recipes, outputs, identities, strict=True):
            stem = formats.get(recipe.format).STEM
            if place.ranks.first:
                writers.append(open_writer(output, shards, identity, stem))
            else:
                writers.append(Writer(output, shards, stem))  # to read by alone
        place.ranks.firsts(True, place.device)
        for writer in writers:
            _check_seen(writer, place)
        yield writers
        done = True
    finally:
        for writer in writers if place.ranks.first else ():
            writer.close(finished=done)


def _files(source: Checkpoint) -> str:
    """Returns the source's files and their sizes: what a process can say of it without reading."""
    found = sorted((file.name, file.stat().st_size) for file in source.root.glob("*.safetensors"))
    return f"{found}, config.json {file_sha256(source.root / 'config.json')}"


def _check_seen(writer: Writer, place: Place) -> None:
    """Raises OutputError where a process does not see the folder that the first one opened."""
    if not writer.manifest.exists():
        raise OutputError(
            f"{writer.output}: process {place.ranks.rank} does not see what process 0 wrote there",
            "give a folder that all machines share",
        )


def _hidden_bytes(options: CalibrateOptions, place: Place) -> int | None:
    """Returns how much memory this process's hidden states may take; None where nobody knows.

    As asked, or half of the machine's, which all its processes share.
    """
    limit = memory_bytes()
    half = None if limit is None else limit // 2
    asked = half if options.hidden_gb is None else round(options.hidden_gb * 1e9)
    return None if asked is None else asked // place.ranks.local


def _guidance(
    recipes: Sequence[Recipe],
    source: Checkpoint,
    data: Data,
    place: Place,
    store: Store,
    progress: Progress,
) -> Guided:
    """Returns the end loss's weights, of the source alone: once for all that want them."""
    if not any(data.guided(recipe, data.text(recipe, source)) for recipe in recipes):
        return Guided()
    tokens = data.calibration.tokens
    share = data.share(tokens, place)
    return guide(source, tokens, progress, place.device, store, share, place.ranks)


def _jobs(
    recipes: Sequence[Recipe],
    writers: Sequence[Writer],
    source: Checkpoint,
    data: Data,
    place: Place,
    store: Store,
    progress: Progress,
) -> list[Job]:
    """Returns a job a recipe; `store` is what all hidden states may take."""
    guidance = _guidance(recipes, source, data, place, store, progress)
    part = store.part(sum(1 + recipe.steps.correction for recipe in recipes))
    return [
        _job(recipe, writer, source, data, place, replace(part, folder=writer.state), guidance)
        for recipe, writer in zip(recipes, writers, strict=True)
    ]


def _job(
    recipe: Recipe,
    writer: Writer,
    source: Checkpoint,
    data: Data,
    place: Place,
    store: Store,
    guidance: Guided,
) -> Job:
    text = data.text(recipe, source)

    def embedded() -> States:
        return embed(source, text, place.device, share=data.share(text, place), store=store)

    guidance = guidance if data.guided(recipe, text) else Guided()
    own = embedded() if recipe.steps.correction else None
    fallbacks = list(guidance.fallbacks)
    return Job(recipe, writer, embedded(), text, guidance.layers, own, fallbacks=fallbacks)


def _adjusted(recipe: Recipe, options: CalibrateOptions) -> Recipe:
    """The recipe with the command line's effort, format and amounts of data."""
    checks.check_writable(recipe)
    plan = recipe.calibration.model_dump()
    plan |= {"windows": options.windows} if options.windows else {}
    plan |= {"sequence_length": options.sequence_length} if options.sequence_length else {}
    update: dict[str, Any] = {
        "calibration": schema.CalibrationPlan(**plan),
        "effort": options.effort,
    }
    if options.format is not None:
        update["format"] = formats.get(options.format).NAME
        if update["format"] != recipe.format:  # which nobody checked with this recipe
            return files.unverified(recipe.model_copy(update=update))
    return recipe.model_copy(update=update)


def validate_recipe(file: Path) -> Recipe:
    """Returns the recipe in `file` once its keys, roles and target's number formats are checked."""
    recipe = files.load(str(file))
    _check_target(recipe)
    return recipe


def _check_recipe(recipe: Recipe, source: Checkpoint) -> None:
    checks.check_fits(recipe, source.config)
    _check_target(recipe)
    config = source.config
    assignments = [recipe.assignment(number, config) for number in range(config.num_layers)]
    found = formats.get(recipe.format).problems(assignments, config, recipe.options())
    for problem in found:
        raise RecipeError(
            f"{recipe.name}: format {recipe.format}: {problem}", "change the recipe or --format"
        )


def _check_target(recipe: Recipe) -> None:
    for problem in check_recipe_dtypes(recipe.target, recipe.activations()):
        raise RecipeError(f"{recipe.name}: {problem}", "choose formats this chip multiplies")


def _outputs(options: CalibrateOptions, recipes: Sequence[Recipe]) -> list[Path]:
    source, output = options.source.resolve(), options.output.resolve()
    if source == output or source.is_relative_to(output) or output.is_relative_to(source):
        raise OutputError(
            f"{options.output}: is, holds or lies in the source", "give another --output"
        )
    plans = {recipe.calibration.model_dump_json() for recipe in recipes}
    if len(plans) > 1:
        raise RecipeError(
            "recipes given together need the same calibration section",
            "run them apart, or give --windows and --sequence-length",
        )
    if len({recipe.name for recipe in recipes}) < len(recipes):
        raise RecipeError("the same recipe is given twice", "name each once")
    if len(recipes) == 1:
        return [options.output]
    return [options.output / recipe.name for recipe in recipes]


def _identity(
    recipe: Recipe, content_hash: str, data: Data, options: CalibrateOptions
) -> dict[str, str]:
    """What must be equal for a run to go on where another stopped."""
    return {
        "glm5q version": describe.package_version("glm5q"),
        "source": content_hash,
        "torch version": describe.package_version("torch"),
        "recipe": recipe.content_hash(),
        "data": data.calibration.content_hash,
        "device": options.device,
        "latent norm eps": str(options.latent_norm_eps),
        "budget": str(options.budget),
    }


def _finish(source: Checkpoint, job: Job) -> None:
    config = source.config
    assignments = [job.recipe.assignment(n, config) for n in range(config.num_layers)]
    engine, options = formats.get(job.recipe.format), job.recipe.options()
    written = [name for shard in job.shards for name in shard.tensors]
    ends = engine.finish(source.raw_config, assignments, config, options, written)
    origin = f"recipe `{job.recipe.name}`"
    recipe = job.recipe
    text = readme(
        engine.NAME, assignments, config, options, origin, recipe.verification, recipe.engine
    )
    job.writer.finish(ends.config, job.shards, source.root, ends.files | {"README.md": text})


def _report(
    source: Checkpoint,
    content_hash: str,
    job: Job,
    spent: Spent,
    data: Data,
    options: CalibrateOptions,
    times: dict[str, float],
    seen: Sequence[Mapping[str, Any]],
    progress: Progress,
) -> describe.Finished:
    output = job.writer.output
    quantized = open_any(output, options.latent_norm_eps)
    tokens = data.evaluation.tokens
    comparison = evaluate(source, quantized, tokens, progress, device=options.device)
    evaluation = describe.data_info(data.evaluation, 0, data.hashes[1])
    asked = job.recipe.calibration.windows
    got = len(data.calibration.tokens)
    notes = [f"asked for {asked} calibration windows, the data gave {got}"] if got < asked else []
    notes += [
        f"{file}: a read failed and was repeated, {count} times"
        for file, count in sorted(Counter(chain(*(one["repeated"] for one in seen))).items())
    ]
    if added := len(job.text) - got:
        guided = ", so no guidance" if job.recipe.steps.guidance else ""
        notes.append(f"short text: {added} windows with exchanged tokens were added{guided}")
    if size := max(one["filed"] for one in seen):
        notes.append(f"hidden states lay in files, {size / 1e9:.3g} GB a layer: memory was limited")
    notes += describe.fallbacks(comparison)
    finished = records.RunRecord(
        kind="calibrate",
        created=describe.now(),
        command=describe.command(),
        output=str(output),
        machine=describe.machine(options.device),
        source=describe.source_info(source, content_hash),
        recipe=describe.recipe_info(job.recipe),
        calibration=describe.data_info(data.calibration, data.held_out, data.hashes[0]),
        size=describe.size(source, job),
        layers=[describe.layer(result) for result in job.results],
        accuracy=describe.accuracy(comparison, evaluation, source.config),
        times_s=times | spent.times_s() | {"evaluate": comparison.time_s},
        peak_memory_bytes=describe.peak_memory_bytes(),
        resumed_layers=job.resumed,
        notes=notes,
        memory=record_plan(source, job.recipe, job.shards),
        budget=spent.budget,
    )
    return describe.write(finished, output / "report.json", output)
