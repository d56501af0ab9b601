"""`glm5q bench-calibrate`: the real calibration code on one random layer of a release's shape.

What is random: weights, hidden states with outlier channels, and a router that likes some experts
more. Times and memory mean what they say; accuracy on such a layer means nothing and is not shown.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate import run
from calibrate.guidance import Guidance, backward
from calibrate.job import Job, Place
from calibrate.ranks import joined
from calibrate.shares import Share
from calibrate.shelf import Shelf
from calibrate.states import States, advance, on_gpu, room, share_out
from glm5q import names, releases
from glm5q.config import ModelConfig, parse_config, read_config
from glm5q.errors import UserError
from glm5q.layer import Layer, runnable
from glm5q.pipeline import describe
from glm5q.pipeline.common import check_device, embedded_checkpoint
from glm5q.pipeline.layer_floor import Ceilings, Work, floors, measure
from glm5q.types import Role
from glm5q.writer import Shard, Writer, open_writer
from recipes import files, schema
from recipes.checks import check_fits, check_writable

SHAPES = (*releases.NAMES, "embedded")
OUTLIERS = 8  # channels of thirty times the others' size, as models of this kind have
OUTLIER = 30.0
SKEW = 0.02  # spread of the router's bias: an expert in twenty sees a third of the mean's tokens


@dataclass(frozen=True)
class BenchOptions:
    """What `glm5q bench-calibrate` was asked for; `disk_bytes_s` is what storage gives."""

    shape: str = "glm-5"
    tokens: int = 1 << 20
    sequence_length: int = 2048
    experts: int | None = None
    recipe: str = "h200"
    effort: schema.Effort = "fast"
    device: str = "cpu"
    disk_bytes_s: float = 7e9
    seed: int = 0


@dataclass(frozen=True)
class StageTime:
    """A stage's seconds, and the least a machine of these ceilings could take."""

    stage: str
    time_s: float
    floor_s: float


@dataclass(frozen=True)
class BenchResult:
    """One layer's calibration. Memory in bytes; `host_bytes` without the hidden states' own.

    Of several `ranks`, each with a device, times and memory are the first's: they wait for another.
    """

    shape: str
    device: str
    machine: dict[str, Any]
    experts: int
    tokens: int
    sequence_length: int
    recipe: str
    effort: str
    stages: tuple[StageTime, ...]
    ceilings: Ceilings
    device_bytes: int | None
    host_bytes: int
    hidden_bytes: int
    ranks: int
    expert_tokens: tuple[int, int, int]  # least, median, most
    fallbacks: tuple[str, ...]
    layers: int
    disk_bytes_s: float
    read_bytes: int
    written_bytes: int

    @property
    def layer_s(self) -> float:
        return sum(stage.time_s for stage in self.stages)

    @property
    def floor_s(self) -> float:
        return sum(stage.floor_s for stage in self.stages)

    @property
    def disk_s(self) -> float:
        """Seconds a layer's bytes take to be read and written."""
        return (self.read_bytes + self.written_bytes) / self.disk_bytes_s

    @property
    def total_s(self) -> float:
        """Projected seconds of all MoE layers: reading and computing go on together."""
        return self.layers * max(self.layer_s, self.disk_s)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for key in ("layer_s", "floor_s", "disk_s", "total_s"):
            found[key] = getattr(self, key)
        return found

    def lines(self) -> list[str]:
        """What is printed: a stage a line against its floor, memory, the projection."""
        lines = [
            f"{self.shape}, one MoE layer of {self.experts} experts, {self.tokens:,} tokens in "
            f"windows of {self.sequence_length}, {self.recipe} {self.effort}, on {self.ranks} x "
            f"{self.device}",
            f"{'stage':<18}{'seconds':>9}{'floor':>9}{'ratio':>7}",
        ]
        for stage in (*self.stages, StageTime("sum", self.layer_s, self.floor_s)):
            ratio = f"{stage.time_s / stage.floor_s:7.1f}" if stage.floor_s else f"{'-':>7}"
            lines.append(f"{stage.stage:<18}{stage.time_s:9.3f}{stage.floor_s:9.3f}{ratio}")
        if self.device_bytes is not None:
            lines.append(f"peak device memory {self.device_bytes / 1e9:.1f} GB")
        lines += [
            f"peak host memory {self.host_bytes / 1e9:.1f} GB beside {self.hidden_bytes / 1e9:.1f} "
            "GB of hidden states",
            "tokens an expert: least {:,}, median {:,}, most {:,}".format(*self.expert_tokens),
            f"projected, {self.layers} MoE layers: {self.layers * self.layer_s / 60:.1f} min of "
            f"computing, {self.layers * self.disk_s / 60:.1f} min of disk at "
            f"{self.disk_bytes_s / 1e9:g} GB/s, together {self.total_s / 60:.1f} min",
        ]
        return lines + [f"not as asked: {fallback}" for fallback in self.fallbacks]


def bench_calibrate(options: BenchOptions) -> BenchResult | None:
    """Calibrates and quantizes one random MoE layer, the stages timed with the device's work.

    Under torchrun the processes share it out, and only the first returns what was found.
    """
    check_device(options.device)
    with joined(options.device) as (device, ranks):
        return _bench(options, Place(device, ranks))


def _bench(options: BenchOptions, place: Place) -> BenchResult | None:
    config = _config(options)
    windows = options.tokens // options.sequence_length
    if windows < 2:
        raise UserError(
            f"--tokens {options.tokens}: under two windows of {options.sequence_length}",
            "give more, or a smaller --sequence-length",
        )
    recipe = files.load(options.recipe).model_copy(update={"effort": options.effort})
    check_writable(recipe)
    check_fits(recipe, config)
    number = config.moe.index(True)
    made = _Made(config, place.device, options.seed)
    layer = made.layer(number)
    held_out = max(1, round(recipe.calibration.held_out * windows))
    length, ranks = options.sequence_length, place.ranks
    share = share_out(windows, held_out, length, place.device, ranks)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(ranks.firsts_text(folder, place.device)) / "out"
        writer: Writer = _Counts(output, 1)
        if not place.on_gpu:
            shards = number + 2
            writer = open_writer(output, shards, {}) if ranks.first else Writer(output, shards)
        none = torch.empty((0, length), dtype=torch.int64)  # what only an MTP layer asks for
        job = Job(recipe, writer, made.states(share, length), none)
        job.source_states = _source_states(job, place) if recipe.steps.correction else None
        for _ in range(2 if place.on_gpu else 1):  # a GPU's first compiles and takes memory
            job.stage_s.clear()
            if place.on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            ranks.firsts(True, place.device)  # the clock starts when all are there
            if recipe.steps.guidance:
                job.guidance = _guidance(config, layer, job, place)
            run.one_layer(made, layer, job, time.perf_counter(), place)
        job.close()
    return _result(options, config, job, layer, (windows, held_out), place) if ranks.first else None


def _source_states(job: Job, place: Place) -> States:
    """Returns a source stream that starts where the quantized one does, and then has its own.

    Of three buffers for the two: each layer's is read before the other stream writes over it.
    """
    if job.states.spare is None:
        return job.states
    return replace(job.states, spare=room(job.states.hidden.shape, place.device))


def _guidance(config: ModelConfig, layer: Layer, job: Job, place: Place) -> list[Guidance | None]:
    """Times a layer's part of guide(): forward, and the gradient of what lies behind it.

    Here that is the layer's own output, which has a gradient's shape.
    """
    with job.stage("guidance", place):
        weights = runnable(layer, place.dtype, place.device)
        inputs = Shelf(1, job.states.store)
        inputs.put(job.states)
        gradient = advance(config, layer.number, weights, job.states).hidden
        found = backward(
            config, layer.number, weights, inputs.take(), gradient, place.ranks, job.fallbacks
        )[1]
    return [*[None] * layer.number, found]


def _config(options: BenchOptions) -> ModelConfig:
    if options.shape == "embedded":
        raw = read_config(embedded_checkpoint())[1]
    elif options.shape in releases.NAMES:
        raw = releases.raw_config(options.shape)
    else:
        raise UserError(f"--shape {options.shape}: no such shape", f"give {', '.join(SHAPES)}")
    if options.experts is not None:
        raw = raw | {"n_routed_experts": options.experts}
        if options.experts < raw["num_experts_per_tok"]:
            raise UserError(
                f"--experts {options.experts}: a token has {raw['num_experts_per_tok']}",
                "give at least as many",
            )
    return parse_config(raw)


class _Counts(Writer):
    """A writer that only counts: on a GPU's machine no disk is waited for, so none is timed."""

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> Shard:
        return Shard(self.name(number), "", {name: t.nbytes for name, t in tensors.items()}, {})

    def done(self, _number: int) -> None:
        return None

    def commit(self, _number: int, shard: Shard, _result: dict[str, Any]) -> Shard:
        return shard


class _Made:
    """A random source: one layer, its hidden states, and what the loop asks of a checkpoint."""

    def __init__(self, config: ModelConfig, device: str, seed: int) -> None:
        self.config, self.device, self._seed = config, device, seed
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._channels = torch.ones(config.hidden_size, device=device)
        chosen = torch.randperm(config.hidden_size, device=device, generator=self._generator)
        self._channels[chosen[:OUTLIERS]] = OUTLIER

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def layer(self, number: int) -> Layer:
        """bfloat16 matrices that keep activations near one."""
        vectors = {path: torch.ones(n) for path, _, n in names.layer_vectors(self.config, number)}
        for path, role, length in names.layer_vectors(self.config, number):
            if path.endswith(".bias") or role is Role.ROUTER:
                vectors[path] = (SKEW * self._random(length)).cpu()
        vectors["post_attention_layernorm.weight"] = self._channels.cpu()
        matrices: dict[str, Any] = {}
        for module in names.layer_modules(self.config, number):
            matrix = torch.empty(module.shape, dtype=torch.bfloat16, device=self.device)
            for one in matrix if module.stacked else [matrix]:
                one.copy_(self._random(*one.shape) * one.shape[-1] ** -0.5)
            matrices[module.path] = matrix
        return Layer(number, vectors, matrices)

    def states(self, share: Share, length: int) -> States:
        """Hidden states whose neighbouring features are alike, so that Grams are not diagonal."""
        own = (*share.statistics, *share.held_out)
        shape = (len(own), length, self.config.hidden_size)
        hidden = room(shape, self.device)
        for window, number in zip(hidden, own, strict=True):
            self._generator.manual_seed(self._seed + 1 + number)  # whichever rank has it
            values = self._random(length, shape[2])
            window.copy_(values + 0.5 * values.roll(1, 1) + 0.25 * values.roll(7, 1))
        if self.device.startswith("cuda"):
            return on_gpu(hidden, share=share)
        return States(hidden, share=share)

    def layer_bytes(self, number: int) -> int:
        sizes = (torch.Size(m.shape).numel() for m in names.layer_modules(self.config, number))
        return 2 * sum(sizes)

    def optional_layer_tensors(self, _number: int) -> dict[str, Tensor]:
        return {}

    def top_tensor(self, name: str) -> Tensor:
        raise KeyError(name)  # only an MTP layer asks


def _result(
    options: BenchOptions,
    config: ModelConfig,
    job: Job,
    layer: Layer,
    asked: tuple[int, int],
    place: Place,
) -> BenchResult:
    """Floors are of one device, so that of several the ratio shows what sharing gained."""
    found = job.results[-1]
    windows, held_out, length = *asked, options.sequence_length
    device_bytes = torch.cuda.max_memory_allocated() if place.on_gpu else None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    ceilings = measure(place.device)  # after the peaks are read: it takes gigabytes of its own
    work = Work(config, layer.number, windows * length, held_out * length, length, job.recipe)
    least = floors(work, ceilings)
    seen = sorted(found.experts.tokens) if found.experts else [0]
    in_host = _host_bytes(job)
    return BenchResult(
        shape=options.shape,
        device=options.device,
        machine=describe.machine(options.device).model_dump(mode="json"),
        experts=config.n_routed_experts,
        tokens=windows * length,
        sequence_length=length,
        recipe=job.recipe.name,
        effort=job.recipe.effort,
        stages=tuple(StageTime(s, t, least.get(s, 0.0)) for s, t in job.stage_s.items()),
        ceilings=ceilings,
        device_bytes=device_bytes,
        host_bytes=max(0, peak - in_host),
        hidden_bytes=in_host,
        ranks=place.ranks.size,
        expert_tokens=(seen[0], seen[len(seen) // 2], seen[-1]),
        fallbacks=_grouped(found.fallbacks),
        layers=sum(config.moe),
        disk_bytes_s=options.disk_bytes_s,
        read_bytes=found.source_bytes,
        written_bytes=found.quantized_bytes,
    )


def _host_bytes(job: Job) -> int:
    """Bytes of hidden states in host memory: each stream's own, and room for its next."""
    streams = [states for states in (job.states, job.source_states) if states is not None]
    held = (t for s in streams for t in (s.hidden, s.spare) if t is not None and not t.is_cuda)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def _grouped(fallbacks: Any) -> tuple[str, ...]:
    """One line a module and kind of thing that did not go as asked, with how often it was."""
    counts: dict[str, int] = {}
    for fallback in fallbacks:
        kind = fallback.reason.split(" calibration tokens")[0]
        kind = "few calibration tokens" if kind.startswith("only ") else kind
        text = f"{fallback.module}: {kind}"
        counts[text] = counts.get(text, 0) + 1
    return tuple(f"{text}, {count} times" for text, count in counts.items())
