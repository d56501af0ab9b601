"""The streaming loop: every layer is read once, quantized for each recipe, written, and run on.

The next layer's input comes from what was written, read back, at the activation precision of the
target. So each recipe has its own hidden states; recipes share the reading of the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, cast

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from calibrate.block import LayerOutput, Observer, decoder_layer, mtp_input, rms_norm
from calibrate.methods import choose, gram_paths, plan_layer, results, with_weight_errors
from calibrate.observe import HeldOutErrors, RowWeights, Statistics
from glm5q import formats, names
from glm5q.checkpoint import Checkpoint
from glm5q.config import ModelConfig
from glm5q.errors import CheckpointError
from glm5q.formats.base import mtp_copies
from glm5q.layer import Layer, Weights, runnable
from glm5q.stream import LayerSource, layers
from glm5q.types import CodedScheme, KeepScheme, LayerResult
from glm5q.writer import Shard, Writer
from recipes.schema import Recipe

CHUNK_TOKENS = 8192  # tokens run at once
Progress = Callable[[str, float, float], None]  # (what, done, of)
Each = Callable[[slice, LayerOutput], None]  # given a chunk's windows and its output


def silent(_what: str, _done: float, _of: float) -> None:
    """Progress for nobody."""


def _ignore(_windows: slice, _output: LayerOutput) -> None:
    """Nothing to do with an output."""


@dataclass(frozen=True)
class States:
    """A stream's hidden states between two layers.

    `hidden` [windows, sequence_length, hidden]. `indices` are the last indexer's choices a chunk of
    windows, kept only where a later layer shares them.
    """

    hidden: Tensor
    indices: tuple[Tensor, ...] | None = None


@dataclass
class Job:
    """One recipe being applied: its writer, hidden states, and what is done so far."""

    recipe: Recipe
    writer: Writer
    states: States
    guidance: Sequence[RowWeights | None] = ()
    shards: list[Shard] = field(default_factory=list)
    results: list[LayerResult] = field(default_factory=list)
    resumed: int = 0


def embed(source: LayerSource, tokens: Tensor, device: str = "cpu") -> States:
    """Returns the embedded windows, float32; tokens int64 [windows, sequence_length]."""
    table = source.top_tensor(names.EMBEDDING)
    return States(torch.nn.functional.embedding(tokens, table).float().to(device))


def chunks(states: States) -> Iterator[tuple[int, slice]]:
    """Yields (number, windows) so that about CHUNK_TOKENS run at once."""
    windows, length = states.hidden.shape[:2]
    step = max(1, CHUNK_TOKENS // length)
    for number, start in enumerate(range(0, windows, step)):
        yield number, slice(start, min(start + step, windows))


def forward(
    config: ModelConfig,
    weights: Weights,
    states: States,
    observer: Observer | None = None,
    windows: range | None = None,
    each: Each = _ignore,
) -> None:
    """Runs one layer over every chunk (or those within `windows`) and hands each output to `each`.

    An output's tensors are flat over the chunk's tokens.
    """
    length = states.hidden.shape[1]
    for number, part in chunks(states):
        if windows is not None:
            part = slice(max(part.start, windows.start), min(part.stop, windows.stop))
            if part.start >= part.stop:
                continue
        hidden = states.hidden[part]
        count = hidden.shape[0]
        offsets = torch.arange(count + 1, device=hidden.device) * length
        indices = None
        if states.indices is not None:
            first = next(p for n, p in chunks(states) if n == number).start
            begin = (part.start - first) * length
            indices = states.indices[number][begin : begin + count * length]
        if observer is not None:
            observer.first_token = part.start * length
        with torch.no_grad():
            output = decoder_layer(
                config, weights, hidden.flatten(0, 1), offsets, indices, observer
            )
        each(part, output)


def check_finite(number: int, output: LayerOutput) -> None:
    """Raises CheckpointError naming the layer whose finite weights gave something that is not."""
    if not bool(torch.isfinite(output.hidden).all()):
        raise CheckpointError(
            f"layer {number} turns the text into values that are not finite",
            "its weights are damaged: fetch them again",
        )


def advance(
    config: ModelConfig,
    number: int,
    weights: Weights,
    states: States,
    observer: Observer | None = None,
    each: Each = _ignore,
) -> States:
    """Returns the states after layer `number`."""
    hidden = torch.empty_like(states.hidden)
    indices: list[Tensor] = []
    keep = number + 1 < config.num_layers and not config.full_indexer[number + 1]

    def store(part: slice, output: LayerOutput) -> None:
        check_finite(number, output)
        hidden[part] = output.hidden.view(hidden[part].shape)
        if keep:
            indices.append(output.indices)
        each(part, output)

    forward(config, weights, states, observer, each=store)
    return States(hidden, tuple(indices) if keep else None)


def mtp_states(
    config: ModelConfig, weights: Weights, source: LayerSource, tokens: Tensor, states: States
) -> States:
    """Returns the MTP layer's input: position i has hidden i after the final norm and token i + 1.

    One position shorter than the main stream, whose last token has no successor.
    """
    norm = source.top_tensor(names.FINAL_NORM).to(states.hidden.device)
    embedded = embed(source, tokens[:, 1:], str(states.hidden.device)).hidden
    hidden = torch.empty_like(embedded)
    for _, part in chunks(states):
        normed = rms_norm(states.hidden[part, :-1], norm, config.rms_norm_eps)
        hidden[part] = mtp_input(config, weights, embedded[part], normed)
    return States(hidden)


def calibrate(
    source: Checkpoint,
    jobs: Sequence[Job],
    tokens: Tensor,
    held_out: int,
    progress: Progress = silent,
    device: str = "cpu",
) -> None:
    """Quantizes every layer for every job, writing and resuming as it goes.

    `tokens` int64 [windows, sequence_length]; the last `held_out` windows choose between candidates
    and measure errors, the others give statistics. Fills each job's shards and results.
    """
    for job in jobs:
        _write_top(source, job)
    total = source.config.num_layers
    for layer in layers(source.layer, range(total)):
        for job in jobs:
            started = time.perf_counter()
            progress(f"layer {layer.number}", layer.number, total)
            if source.config.is_mtp(layer.number):
                weights = runnable(layer, device=device)
                job.states = mtp_states(source.config, weights, source, tokens, job.states)
            _one_layer(source, layer, job, held_out, started, device)
    for job in jobs:
        _write_end(source, job)
    progress("layers", total, total)


def _one_layer(
    source: Checkpoint, layer: Layer, job: Job, held_out: int, started: float, device: str
) -> None:
    """Finishes one layer of one job, from disk if an earlier run did, and moves its states on."""
    config, number = source.config, layer.number
    windows = job.states.hidden.shape[0]
    split = range(windows - held_out, windows)
    shard = job.writer.done(number + 1)
    earlier = _earlier_result(shard)
    if shard is not None and earlier is not None:
        job.resumed += 1
        job.results.append(earlier)
        update = None
    else:
        quantized, result, outputs = _quantize(source, layer, job, split, device)
        options = job.recipe.options()
        tensors = formats.get(job.recipe.format).layer_tensors(quantized, config, options)
        tensors |= source.optional_layer_tensors(number) | mtp_copies(source, number, options)
        shard = job.writer.write(number + 1, tensors)
        update = _UpdateError(job.states.hidden, outputs, split.start)
    written = read_back(job.writer.read(number + 1), job.recipe, number, config)
    weights = runnable(written, device=device)
    each = update.add if update else _ignore
    job.states = advance(config, number, weights, job.states, each=each)
    if update is not None:
        size = sum(shard.tensors.values())
        result = replace(
            result,
            error=update.value(),
            quantized_bytes=size,
            time_s=time.perf_counter() - started,
        )
        shard = job.writer.commit(number + 1, shard, asdict(result))
        job.results.append(result)
    job.shards.append(shard)


def _earlier_result(shard: Shard | None) -> LayerResult | None:
    """What an earlier run found making a layer; None if it left nothing that can be read."""
    try:
        return None if shard is None else TypeAdapter(LayerResult).validate_python(shard.result)
    except ValidationError:
        return None


def _quantize(
    source: Checkpoint, layer: Layer, job: Job, held_out: range, device: str
) -> tuple[Layer, LayerResult, Tensor]:
    """Returns (quantized layer, its record without error, source outputs on held-out windows)."""
    config, number, recipe = source.config, layer.number, job.recipe
    weights = runnable(layer, device=device)
    guidance = job.guidance[number] if number < len(job.guidance) else None
    statistics = Statistics(gram_paths(recipe, number, config), guidance)
    forward(
        config, weights, job.states, statistics, range(held_out.start),
        lambda _, output: check_finite(number, output),
    )  # fmt: skip
    plan = plan_layer(layer, weights, statistics, recipe, config)
    errors = HeldOutErrors(
        {p: {m: c.weight(m) for m in c.codes} for p, c in plan.candidates.items()},
        {path: c.activation() for path, c in plan.candidates.items()},
        guidance,
    )
    outputs = torch.empty_like(job.states.hidden[held_out.start : held_out.stop])

    def store(part: slice, output: LayerOutput) -> None:
        local = slice(part.start - held_out.start, part.stop - held_out.start)
        outputs[local] = output.hidden.view(outputs[local].shape)

    forward(config, weights, job.states, errors, held_out, store)
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


class _UpdateError:
    """Sums |q - s| / |s - x| of a layer's update over held-out windows."""

    def __init__(self, before: Tensor, outputs: Tensor, first: int) -> None:
        self._before, self._outputs, self._first = before, outputs, first
        self._squares = torch.zeros(2, dtype=torch.float64)

    def add(self, windows: slice, output: LayerOutput) -> None:
        start = max(windows.start, self._first)
        if start >= windows.stop:
            return
        after = output.hidden.view(windows.stop - windows.start, *self._before.shape[1:])
        reference = self._outputs[start - self._first : windows.stop - self._first]
        difference = after[start - windows.start :] - reference
        update = reference - self._before[start : windows.stop]
        self._squares[0] += difference.double().square().sum().cpu()
        self._squares[1] += update.double().square().sum().cpu()

    def value(self) -> float:
        return float((self._squares[0] / self._squares[1].clamp(min=1e-30)).sqrt())


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
