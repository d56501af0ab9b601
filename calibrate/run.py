"""The streaming loop: every layer is read once, quantized for each recipe, written, and run on.

The next layer's input comes from what was written, read back, at the activation precision of the
target. So each recipe has its own hidden states; recipes share the reading of the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Literal, Protocol, TypeVar, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from calibrate.block import LayerOutput
from calibrate.candidates import LayerPlan
from calibrate.correction import compare, corrected, named, source_outputs
from calibrate.inner import with_inner
from calibrate.job import Job, Place
from calibrate.methods import choose, gram_paths, plan_layer, results, with_weight_errors
from calibrate.observe import HeldOutErrors, Statistics
from calibrate.products import kept_as_bytes
from calibrate.rows import dequantize
from calibrate.shares import Share
from calibrate.states import (
    Progress,
    States,
    advance,
    all_finite,
    check_finite,
    forward,
    ignore,
    mtp_states,
    silent,
    with_less,
)
from glm5q import formats, names
from glm5q.checkpoint import Checkpoint
from glm5q.config import ModelConfig
from glm5q.formats.base import mtp_copies
from glm5q.layer import Layer, Weights, runnable
from glm5q.stream import layers
from glm5q.types import CodedScheme, Fallback, KeepScheme, LayerResult, Role
from glm5q.writer import Shard
from recipes.schema import Recipe


class Source(Protocol):
    """What the loop asks of a checkpoint besides its layers."""

    @property
    def config(self) -> ModelConfig: ...

    def layer(self, number: int) -> Layer: ...

    def top_tensor(self, name: str) -> Tensor: ...

    def layer_bytes(self, number: int) -> int: ...

    def optional_layer_tensors(self, number: int) -> dict[str, Tensor]: ...


def calibrate(
    source: Checkpoint,
    jobs: Sequence[Job],
    progress: Progress = silent,
    place: Place | None = None,
) -> None:
    """Quantizes every layer for every job, writing and resuming as it goes.

    Of a job's states, the share's held out windows choose between candidates and measure errors,
    the others give statistics. Fills each job's shards and results. Of several ranks the first
    writes, and all must see the output folder. `place` None is this CPU alone.
    """
    place = place or Place()
    ranks = place.ranks
    if ranks.first:
        for job in jobs:
            _write_top(source, job)
    total = source.config.num_layers
    read = partial(source.layer, pin=place.on_gpu)
    try:
        for layer in layers(read, range(total), place.arrived):
            for job in jobs:
                started = time.perf_counter()
                progress(f"layer {layer.number}", layer.number, total)
                if source.config.is_mtp(layer.number):
                    weights = runnable(layer, place.dtype, place.device)
                    own = shared(job.states).of(job.text)
                    job.states = mtp_states(source.config, weights, source, own, job.states)
                    if job.source_states is not None:
                        job.source_states = mtp_states(
                            source.config, weights, source, own, job.source_states
                        )
                one_layer(source, layer, job, started, place)
    finally:
        for job in jobs:
            job.close()
    if ranks.first:
        for job in jobs:
            _write_end(source, job)
    progress("layers", total, total)


def shared(states: States) -> Share:
    """Returns which windows the states are of: a job's always say."""
    if states.share is None:
        raise ValueError("a job's states need a share of the windows")
    return states.share


def one_layer(source: Source, layer: Layer, job: Job, started: float, place: Place) -> None:
    """Finishes one layer of one job, from disk if an earlier run did, and moves its states on."""
    config, number, ranks = source.config, layer.number, place.ranks
    shard = job.writer.done(number + 1) if ranks.first else None
    earlier = _earlier_result(shard)
    streams = with_room(job, number, lambda: compare(config, layer, job, place))
    if ranks.firsts(earlier is not None, place.device):
        job.settle()
        job.results += [] if earlier is None else [earlier]
        job.shards += [] if shard is None else [shard]
        _resume(config, number, job, place)
        return
    target, taken = corrected(layer, streams, job, place)
    quantized, result, outputs = quantize(source, target, job, place)
    if job.recipe.steps.inner:
        quantized, result = with_inner(
            config, target, quantized, result, job, place,
            lambda make: with_room(job, number, make),
        )  # fmt: skip
    if taken is not None:
        result = replace(result, matrices=named(result.matrices))
    if target is not layer:  # the record is of the source itself
        outputs = with_room(job, number, lambda: source_outputs(config, layer, job, place))
    with job.stage("write", place, wait=False):
        if target is not layer or job.recipe.steps.inner:
            result = replace(result, matrices=with_weight_errors(result.matrices, layer, quantized))
        written, landing = _write_layer(source, quantized, job, place)
    error = with_room(job, number, lambda: _move_on(config, written, job, outputs, place))
    own = ranks.all_of([asdict(fallback) for fallback in job.fallbacks], place.device)
    job.fallbacks.clear()
    if landing is not None:
        time_s = time.perf_counter() - started
        fallbacks = (*result.fallbacks, *TypeAdapter(tuple[Fallback, ...]).validate_python(own))
        result = replace(result, error=error, time_s=time_s, fallbacks=fallbacks, correction=taken)
        job.land(number + 1, landing, result)
        if not place.on_gpu:
            job.settle()


def _resume(config: ModelConfig, number: int, job: Job, place: Place) -> None:
    """Moves the job's states on through a layer that an earlier run wrote."""
    job.resumed += 1
    written = read_back(job.writer.read(number + 1), job.recipe, number, config)
    written = place.arrived(written)  # a GPU multiplies codes, not what a CPU makes of them
    with_room(job, number, lambda: _move_on(config, written, job, None, place))


def _write_layer(
    source: Source, quantized: Layer, job: Job, place: Place
) -> tuple[Layer, Future[Shard] | None]:
    """Starts writing a layer; returns (what the next layer's input is made with, the shard to be).

    On a CPU the layer is read back from what was written. A GPU's is still there: its codes and
    rounded scales are what the files hold, and reading waits for nobody.
    """
    config, number, options = source.config, quantized.number, job.recipe.options()
    landing: Future[Shard] | None = None
    if place.ranks.first:
        tensors = formats.get(job.recipe.format).layer_tensors(quantized, config, options)
        tensors |= source.optional_layer_tensors(number) | mtp_copies(source, number, options)
        landing = job.write(number + 1, _in_host_memory(tensors))
    if place.on_gpu:
        return quantized, landing
    if landing is not None:
        landing.result()
    place.ranks.firsts(True, place.device)  # the shard is there
    return read_back(job.writer.read(number + 1), job.recipe, number, config), landing


def _in_host_memory(tensors: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Returns what waits for the tensors off the GPU; they travel beside what it computes next.

    Pinned memory is used again.
    """
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return lambda: tensors
    leaving = torch.cuda.Stream()
    leaving.wait_stream(torch.cuda.current_stream())
    stores: dict[int, Tensor] = {}
    found = dict(tensors)
    with torch.cuda.stream(leaving):
        for name, tensor in tensors.items():
            if not tensor.is_cuda:
                continue
            store = tensor.untyped_storage()  # of experts a stack's: one copy for all of them
            host = stores.get(store.data_ptr())
            if host is None:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(store)
                host = torch.empty(whole.shape, dtype=torch.uint8, pin_memory=True)
                stores[store.data_ptr()] = host.copy_(whole, non_blocking=True)
                tensor.record_stream(leaving)
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            found[name] = torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage(), *place)

    def arrived() -> dict[str, Tensor]:
        leaving.synchronize()
        return found

    return arrived


def _move_on(
    config: ModelConfig,
    written: Layer,
    job: Job,
    outputs: Tensor | None,
    place: Place,
) -> float:
    """Runs a written layer on the job's states; returns its update's error on held-out windows.

    `outputs` [windows, ...] are the source's there, None where nobody asks.
    """
    with job.stage("move on", place):
        weights = runnable(
            written, place.dtype, place.device, expand=dequantize, keep=kept_as_bytes
        )
        first, update = shared(job.states).split.start, None
        if outputs is not None:
            update = UpdateError(job.states, outputs, first)
        each = ignore if update is None else update.add
        job.states = advance(config, written.number, weights, job.states, each=each)
        return 0.0 if update is None else update.value(place)


def _earlier_result(shard: Shard | None) -> LayerResult | None:
    """What an earlier run found making a layer; None if it left nothing that can be read."""
    try:
        return None if shard is None else TypeAdapter(LayerResult).validate_python(shard.result)
    except ValidationError:
        return None


def quantize(
    source: Source, layer: Layer, job: Job, place: Place
) -> tuple[Layer, LayerResult, Tensor]:
    """Returns (quantized layer, its record without error, source outputs on held-out windows).

    Ranks meet between the forwards, never within: one that runs out of memory there may start over.
    """
    config, number, recipe = source.config, layer.number, job.recipe
    weights = runnable(layer, place.dtype, place.device)
    with job.stage("statistics", place):
        statistics = with_room(job, number, lambda: _observed(config, number, weights, job, place))
        statistics.complete()
    with job.stage("round", place):
        plan = plan_layer(layer, weights, statistics, recipe, config)
        job.fallbacks += plan.own
        statistics.release()
    with job.stage("held-out choice", place):
        errors, outputs = with_room(
            job, number, lambda: _measured(config, weights, number, plan, statistics, job, place)
        )
        errors.complete(place.ranks, place.device)
        quantized, methods = choose(layer, plan, errors)
        matrices, experts = results(layer, plan, methods, errors, statistics, config)
        matrices = with_weight_errors(matrices, layer, quantized)
    kind = cast(Literal["dense", "moe", "mtp"], config.kind(number))
    indexer: Literal["full", "shared"] = "full" if config.full_indexer[number] else "shared"
    result = LayerResult(
        number, kind, indexer, 0.0, source.layer_bytes(number), 0, 0.0,
        matrices, experts, tuple(plan.fallbacks),
    )  # fmt: skip
    return quantized, result, outputs


def _observed(
    config: ModelConfig, number: int, weights: Weights, job: Job, place: Place
) -> Statistics:
    """Returns the sums over this rank's windows that are not held out."""
    recipe = job.recipe
    paths, cap = gram_paths(recipe, number, config), recipe.steps.token_cap
    statistics = Statistics(
        paths, job.guidance_of(number), token_cap=cap, ranks=place.ranks,
        float8_grams=recipe.steps.float8_grams,
    )  # fmt: skip
    experts = recipe.plan(Role.ROUTED_EXPERT, number, config).scheme()
    statistics.want_output = isinstance(experts, KeepScheme)  # float16 is checked against it

    def check(_windows: slice, output: LayerOutput) -> None:
        if statistics.want_output:
            check_finite(number, all_finite(output))

    seen = range(shared(job.states).split.start)
    forward(config, weights, job.states, statistics, seen, check)
    return statistics


def _measured(
    config: ModelConfig,
    weights: Weights,
    number: int,
    plan: LayerPlan,
    statistics: Statistics,
    job: Job,
    place: Place,
) -> tuple[HeldOutErrors, Tensor]:
    """Returns the candidates' errors on this rank's held-out windows, and the source's outputs."""
    errors = HeldOutErrors(
        {path: c.to_measure(place.dtype) for path, c in plan.candidates.items()},
        {path: c.activation() for path, c in plan.candidates.items()},
        job.guidance_of(number),
        {} if statistics.want_output else statistics.ranges_of_outputs(),
    )
    held_out = shared(job.states).split
    shape = (len(held_out), *job.states.hidden.shape[1:])
    outputs = torch.empty(shape, dtype=torch.float32, device=place.device)

    def store(part: slice, output: LayerOutput) -> None:
        check_finite(number, all_finite(output))
        local = slice(part.start - held_out.start, part.stop - held_out.start)
        outputs[local] = output.hidden.view(outputs[local].shape)

    forward(config, weights, job.states, errors, held_out, store)
    return errors, outputs


Made = TypeVar("Made")


def with_room(job: Job, number: int, make: Callable[[], Made]) -> Made:
    """Returns make(), as with_less does; smaller chunks stay the job's, and the record says so."""

    def tried(states: States) -> Made:
        job.states = states
        return make()

    return with_less(job.states, number, tried, job.fallbacks)


class UpdateError:
    """Sums |q - s| / |s - x| of a layer's update over held-out windows."""

    def __init__(self, before: States, outputs: Tensor, first: int) -> None:
        self._before, self._outputs, self._first = before, outputs, first
        self._squares = torch.zeros(2, dtype=torch.float64)

    def add(self, windows: slice, output: LayerOutput) -> None:
        start = max(windows.start, self._first)
        if start >= windows.stop:
            return
        device, part = output.hidden.device, slice(start, windows.stop)
        after = output.hidden.view(windows.stop - windows.start, *self._outputs.shape[1:])
        reference = self._outputs[start - self._first : windows.stop - self._first].to(device)
        difference = after[start - windows.start :] - reference
        update = reference - self._before.on(device, part)
        self._squares[0] += difference.double().square().sum().cpu()
        self._squares[1] += update.double().square().sum().cpu()

    def value(self, place: Place) -> float:
        """Returns the quotient over all ranks' windows."""
        error, size = place.ranks.add(self._squares.to(place.device)).cpu()
        return float((error / size.clamp(min=1e-30)).sqrt())


def read_back(
    tensors: dict[str, Tensor], recipe: Recipe, number: int, config: ModelConfig
) -> Layer:
    """Returns the layer held in checkpoint tensors, decoded as an engine would."""
    schemes: dict[str, CodedScheme | None] = {}
    for module in names.layer_modules(config, number):
        scheme = recipe.plan(module.role, number, config).scheme()
        schemes[module.path] = None if isinstance(scheme, KeepScheme) else scheme
    return formats.get(recipe.format).decode_layer(number, tensors, schemes, config)


def _write_top(source: Checkpoint, job: Job) -> None:
    shard = job.writer.done(0)
    if shard is None:
        table = source.top_tensor(names.EMBEDDING)
        shard = job.writer.commit(0, job.writer.write(0, {names.EMBEDDING: table}), {})
    job.shards.append(shard)


def _write_end(source: Checkpoint, job: Job) -> None:
    number = source.config.num_layers + 1
    shard = job.writer.done(number)
    if shard is None:
        tensors = {name: t for name, t in source.top().items() if name != names.EMBEDDING}
        shard = job.writer.commit(number, job.writer.write(number, tensors), {})
    job.shards.append(shard)
