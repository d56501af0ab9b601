"""`glm5q bench`: op times on this machine, and whole passes of the model assembled from them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from fused_ops.op import OPS, OpRequest
from glm5q.config import ModelConfig
from glm5q.errors import UserError
from glm5q.pipeline import describe
from glm5q.pipeline.bench_rows import Key, key_of, label, row_of, spread
from glm5q.pipeline.lower import choose, expert_dtype, requests, tiles_for, unsupported
from glm5q.pipeline.subject import subject_of
from recipes import files
from reports import measures
from reports import record as records
from targets import base, bench, ceilings, onnx_runtime, passes
from targets.baselines import DTYPES
from targets.clock import describe as describe_device
from targets.clock import timed

Progress = Callable[[str, float, float], None]

DEFAULT_CONTEXT = {"cpu": (8192,), "cuda": (65536,)}
DEFAULT_BATCHES = {"cpu": (1, 4, 16), "cuda": (1, 4, 16, 64)}
CHUNK = 4096  # tokens of a prefill chunk
ROUNDS = {"cpu": 30, "cuda": 50}
BUDGET_S = 1.5  # of a function's calls: they stop once they took so long
OURS = ("lightning_indexer", "sparse_attention", "expert_gemm")


@dataclass(frozen=True)
class BenchOptions:
    """What `glm5q bench` was asked for. `ops` empty: all; `warm` leaves a CPU's caches alone.

    `recipe`, a name or a file, decides the experts' number formats and the kernels' tiles.
    """

    target: str
    shape: str = "glm-5"
    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()
    rounds: int | None = None
    threads: int | None = None
    warm: bool = False
    output: Path | None = None
    recipe: str | None = None


def bench_options(
    *, sweep: str | None, context: str | None, ops: str | None, **options: Any
) -> BenchOptions:
    """Returns options from the command line's words. Raises UserError for one that is not a list.

    k is 1024 in a context.
    """
    batches = () if sweep is None else _numbers("--sweep", sweep.removeprefix("batch="))
    contexts = () if context is None else _numbers("--context", context)
    names = () if ops is None else tuple(name.strip() for name in ops.split(","))
    return BenchOptions(batches=batches, contexts=contexts, ops=names, **options)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    found = []
    for word in text.lower().split(","):
        unit = 1024 if word.strip().endswith("k") else 1
        digits = word.strip().removesuffix("k")
        if not digits.isdecimal() or not 0 < int(digits) * unit <= 1 << 24:
            raise UserError(f"{option}: {word!r} is no size", "give numbers, as 1,4,16 or 8k,64k")
        found.append(int(digits) * unit)
    return tuple(dict.fromkeys(found))


def run(options: BenchOptions, progress: Progress) -> records.RunRecord:
    """Returns the record of one bench; report.json and report.html go to `options.output`.

    Raises UserError for a target that this machine is not.
    """
    chip = _chip_here(options.target)
    unknown = [op for op in options.ops if op not in OPS]
    if unknown:
        raise UserError(f"--ops {unknown[0]}: no such op", f"use one of {', '.join(OPS)}")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        record = _Run(chip, options, progress).record()
    finally:
        torch.set_num_threads(before)
    if options.output is not None:
        describe.write(record, options.output / "report.json", options.output)
    return record


def _chip_here(target: str) -> base.Target:
    chip = base.load(target)
    if chip.kind == "cpu":
        return chip
    if chip.kind != "cuda":
        fix = f"`glm5q lower --target {target}` says what is known"
        raise UserError(f"{target}: nothing of ours is timed on it", fix)
    if not torch.cuda.is_available():
        raise UserError(f"{target}: no CUDA device here", "give --target cpu")
    device, model = torch.cuda.get_device_name(), chip.title.removeprefix("NVIDIA ").split()[0]
    if model not in device:
        raise UserError(f"{target}: this machine has {device}", "give the target that it is")
    return chip


class _Run:
    """One bench under way. A piece of work is timed once, however many passes have it."""

    def __init__(self, chip: base.Target, options: BenchOptions, progress: Progress) -> None:
        self._recipe = files.load(options.recipe) if options.recipe else None
        self._tiles, self._whose_tiles = tiles_for(chip, self._recipe, options.recipe)
        self._experts = expert_dtype(self._recipe) if self._recipe else passes.EXPERTS
        self._chip = ceilings.measured(chip)
        self._options, self._progress = options, progress
        self._device = bench.DEVICES[chip.kind]
        self._rounds = options.rounds or ROUNDS[chip.kind]
        self._config: ModelConfig = subject_of(options.shape).config
        self._rows: list[records.Latency] = []
        self._seconds: dict[Key, records.Latency] = {}
        self._matrices: dict[tuple[int, int], torch.Tensor] = {}
        self._load = os.getloadavg()[0]

    def record(self) -> records.RunRecord:
        plan = self._plan()
        needed = [work for parts in plan.values() for part in parts for work, _ in part.works]
        linears = [work for work in needed if isinstance(work, passes.Linear)]
        linears.sort(key=lambda work: (work.columns, work.features))  # a weight is made once
        ops = [work for work in needed if isinstance(work, OpRequest)]
        works = list(dict.fromkeys([*self._requests(), *map(key_of, ops), *map(key_of, linears)]))
        for done, work in enumerate(works):
            self._progress(f"timing {label(work)}", done, len(works))
            self._time(work)
        self._progress("timing", len(works), len(works))
        assembled = [self._assemble(*key, parts) for key, parts in plan.items()]
        return records.RunRecord(
            kind="bench",
            created=describe.now(),
            command=describe.command(),
            output=str(self._options.output or ""),
            machine=describe.machine(self._device),
            recipe=describe.recipe_info(self._recipe) if self._recipe else None,
            latency=self._rows,
            peak_memory_bytes=describe.peak_memory_bytes(),
            sweeps=self._sweeps(assembled),
            assembled=assembled,
            notes=self._all_notes(),
        )

    def _plan(self) -> dict[tuple[str, int, int], tuple[passes.Part, ...]]:
        """(stage, batch, context) -> parts; nothing where only some ops were asked for."""
        if self._options.ops:
            return {}
        kind, config = self._chip.kind, self._config
        found: dict[tuple[str, int, int], tuple[passes.Part, ...]] = {}
        for context in self._options.contexts or DEFAULT_CONTEXT[kind]:
            for batch in self._options.batches or DEFAULT_BATCHES[kind]:
                found["decode", batch, context] = passes.decode(
                    config, kind, batch, context, self._experts
                )
            chunk = min(CHUNK, context)
            found["prefill", 1, context] = passes.prefill(
                config, kind, chunk, context, self._experts
            )
        return found

    def _requests(self) -> list[Key]:
        """The table of single ops: GLM-5's, so left out for another model's shape."""
        known = requests(self._chip.kind, self._recipe)
        ops = dict.fromkeys(request.op for request in known)
        for op in self._options.ops:
            if op not in ops:
                raise UserError(f"--ops {op}: no shape of it is timed", f"use {', '.join(ops)}")
        return [key_of(request) for request in known if self._wanted(request)]

    def _wanted(self, request: OpRequest) -> bool:
        if self._options.ops:
            return request.op in self._options.ops
        return self._options.shape.startswith("glm-5")

    def _time(self, key: Key) -> None:
        work = key.work
        if isinstance(work, passes.Linear):
            row = self._linear(work)
            self._rows.append(row)
            self._seconds[key] = row
            return
        choice = choose(work, self._chip)
        if (chosen := choice.chosen) is None:
            raise unsupported(choice, self._chip)
        found = bench.bench(
            self._chip.name,
            work,
            self._rounds,
            BUDGET_S,
            frozenset({chosen, *self._against(work)}),
            cold=not self._options.warm,
            chip=self._chip,
            tiles=self._tiles,
        )
        for timing in found.timings:
            row = row_of(timing)
            self._rows.append(row)
            if timing.implementation == chosen:
                self._seconds[key] = row
        if self._onnx_too(work):
            self._time_onnx(work)
        if key not in self._seconds:
            why = dict(found.refused).get(chosen, "not timed")
            raise UserError(f"{work.op}: {chosen} cannot run here: {why}", "see glm5q doctor")

    def _onnx_too(self, work: OpRequest) -> bool:
        """Whether ONNX Runtime has a product of this size: one expert, int4 by groups of 128."""
        return (
            self._chip.kind == "cpu"
            and work.op == "expert_gemm"
            and work.shape["experts"] == 1
            and work.shape["group"] == onnx_runtime.BLOCK
            and onnx_runtime.missing() is None
        )

    def _time_onnx(self, work: OpRequest) -> None:
        """Adds its rows: other schemes, each said in its dtype, and not judged."""
        sizes = (work.shape["rows"], work.shape["in"], work.shape["out"])
        threads, cold = torch.get_num_threads(), not self._options.warm
        for name, calls in onnx_runtime.times(*sizes, self._rounds, threads, cold).items():
            row = records.Latency(
                op=work.op,
                implementation=name,
                target=self._chip.name,
                shape=dict(work.shape),
                dtype=onnx_runtime.SCHEMES[name],
                **spread(calls),
                how="measured",
                device=describe_device(self._device),
            )
            self._rows.append(row)

    def _against(self, work: OpRequest) -> tuple[str, ...]:
        """Plain torch beside it, in bfloat16; its indexer takes one sequence."""
        if work.shape.get("sequences", 1) > 1:
            return ()
        return tuple(name for name in DTYPES if name.endswith("bf16"))

    def _linear(self, work: passes.Linear) -> records.Latency:
        size = (work.features, work.columns)
        if size not in self._matrices:
            self._matrices.clear()  # one at a time: the largest is 300 MB
            weight = torch.empty(size, dtype=torch.bfloat16, device=self._device)
            self._matrices[size] = weight.uniform_(-1, 1)
        weight = self._matrices[size]
        x = torch.ones(work.rows, work.columns, dtype=torch.bfloat16, device=self._device)
        timed(lambda: F.linear(x, weight), self._device)
        wall: list[float] = []
        while len(wall) < self._rounds and sum(wall) < BUDGET_S:
            call = timed(lambda: F.linear(x, weight), self._device, not self._options.warm)
            wall.append(call[1][0])
        return records.Latency(
            op="linear",
            implementation="torch-bf16",
            target=self._chip.name,
            shape={"rows": work.rows, "in": work.columns, "out": work.features},
            dtype="bf16",
            **spread(wall),
            how="measured",
            device=describe_device(self._device),
        )

    def _assemble(
        self, stage: Any, batch: int, context: int, parts: Sequence[passes.Part]
    ) -> measures.Assembled:
        found = [
            measures.AssembledPart(
                op=part.name,
                calls=sum(calls for _, calls in part.works),
                time_s=sum(
                    self._seconds[key_of(work)].median_s * calls for work, calls in part.works
                ),
                how="measured",
            )
            for part in parts
            if part.works
        ]
        total = sum(part.time_s for part in found)
        tokens = batch if stage == "decode" else min(CHUNK, context)
        return measures.Assembled(
            stage=stage,
            target=self._chip.name,
            device=describe_device(self._device),
            context=context,
            batch=batch,
            tokens=tokens,
            total_s=total,
            tokens_per_s=tokens / total,
            how="measured",
            parts=found,
        )

    def _sweeps(self, assembled: Sequence[measures.Assembled]) -> list[measures.Sweep]:
        """The assembled decode step, and each of our ops in it, against batch size."""
        steps = [one for one in assembled if one.stage == "decode"]
        found = []
        for context in dict.fromkeys(step.context for step in steps):
            here = [step for step in steps if step.context == context]
            if len(here) < 2:
                continue
            names = ("decode step, assembled", *OURS)
            found += [self._sweep(name, context, here) for name in names]
        return found

    def _sweep(
        self, name: str, context: int, steps: Sequence[measures.Assembled]
    ) -> measures.Sweep:
        points = []
        for step in steps:
            own = [part.time_s for part in step.parts if part.op == name]
            seconds = own[0] if own else step.total_s
            points.append(
                measures.SweepPoint(
                    batch=step.batch,
                    median_s=seconds,
                    low_s=seconds,
                    high_s=seconds,
                    tokens_per_s=step.batch / seconds,
                )
            )
        return measures.Sweep(
            op=name if name not in OURS else f"{name}, a step's calls",
            implementation="ours" if name in OURS else "all parts",
            target=self._chip.name,
            device=describe_device(self._device),
            context=context,
            how="computed",  # sums of measured calls
            points=points,
            peak_batch=max(points, key=lambda point: point.tokens_per_s).batch,
        )

    def _scheme(self) -> str:
        """The experts' number formats in words."""
        dtype, group = self._experts
        weights, _, activations = dtype.partition("+")
        if not activations:
            return f"experts {weights}"
        grouping = f"group {group}" if group else "per channel"
        return f"experts {weights} {grouping} with {activations} activations"

    def _all_notes(self) -> list[str]:
        caches = "left as they are" if self._options.warm else "emptied before each call"
        peaks = "; ".join(
            f"{dtype} {figure.value / 1e9:.0f} GFLOP/s ({figure.source})"
            for dtype, figure in self._chip.peak_ops_s.items()
            if figure.value
        )
        bandwidth = self._chip.bandwidth_bytes_s
        notes = [
            f"load average {self._load:.1f} when it began, {os.getloadavg()[0]:.1f} when it ended; "
            f"{torch.get_num_threads()} threads; caches {caches}",
            f"floors are drawn from {peaks}; {(bandwidth.value or 0) / 1e9:.1f} GB/s "
            f"({bandwidth.source})",
        ]
        if self._whose_tiles:
            notes.append(f"kernels' tiles: {self._whose_tiles}")
        if not self._options.ops:
            notes.append(
                f"whole passes are assembled from op times and were never run: {self._scheme()}, "
                "an even router, projections as torch's bfloat16 linears; left out: "
                f"{passes.LEFT_OUT}"
            )
        if self._chip.kind == "cpu":
            notes.append(
                f"ONNX Runtime: {onnx_runtime.missing()}"
                if onnx_runtime.missing()
                else "ONNX Runtime's rows are other schemes, in a process of their own, not judged"
            )
        ours = [row for row in self._rows if row.cpu_s and row.implementation.startswith("cpp-")]
        if self._chip.kind == "cpu" and ours and torch.get_num_threads() > 1:
            busy = statistics.median((row.cpu_s or 0.0) / row.median_s for row in ours)
            notes.append(f"our {torch.get_num_threads()} threads kept {busy:.2f} cores busy")
        wrong = [row for row in self._rows if row.problem]
        notes += [f"WRONG: {row.op} {row.implementation}: {row.problem}" for row in wrong]
        return notes
