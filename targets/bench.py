"""Times an op's implementations side by side and checks each result in the same run.

Every function is called once to warm up and judged; then they take turns, the order rotated each
round, so that a busy moment does not fall on one of them alone. Only ratios of one run mean
anything; on a shared machine look at the process's CPU time with one thread, which waits for
nobody, and at the load average that is kept with the result.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

from fused_ops.op import Implementation, OpRequest, Tiles, cost, load, resolve
from fused_ops.testkit import Case, Inputs, on_cpu
from targets import base
from targets.baselines import DTYPES, baseline
from targets.clock import describe, timed

DEVICES = {"cpu": "cpu", "cuda": "cuda"}  # a kind of target -> torch's device


@dataclass(frozen=True)
class Timing:
    """One function at one shape. Seconds a call: median, least and most over `rounds` turns.

    `calls_s` are the turns' wall seconds in order. `cpu_s` is the median of this process's CPU
    seconds, all threads. `bound` says whether the floor is memory's or compute's. `memory_bytes` is
    what a call allocates at most on a GPU. `problem` is what is wrong with its result; None if it
    stands and, unjudged, for plain torch.
    """

    op: str
    implementation: str
    target: str
    shape: Mapping[str, int]
    dtype: str
    median_s: float
    low_s: float
    high_s: float
    cpu_s: float
    rounds: int
    floor_s: float | None
    how: Literal["measured"]
    device: str
    problem: str | None
    calls_s: tuple[float, ...] = ()
    bound: Literal["memory", "compute"] | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Bench:
    """Timings of one request, why others were not timed, and the load average when it began."""

    request: OpRequest
    timings: tuple[Timing, ...]
    refused: tuple[tuple[str, str], ...]
    load: float
    threads: int

    def ratio(self, implementation: str, against: str) -> float:
        """Returns median over median, of CPU time if one thread; below 1 is faster."""
        alone = self.threads == 1
        times = {t.implementation: t.cpu_s if alone else t.median_s for t in self.timings}
        return times[implementation] / times[against]

    def lines(self) -> list[str]:
        """Returns the table for people: what, on how loaded a machine, and a line a function."""
        shape = " ".join(f"{name}={size}" for name, size in self.request.shape.items())
        head = f"{self.request.op} {self.request.dtype} {shape}"
        rows = [f"{head} ({self.threads} threads, load {self.load:.1f})"]
        for t in self.timings:
            floor = f", floor {t.floor_s * 1e3:.3f} ms" if t.floor_s else ""
            rows.append(
                f"  {t.implementation:<15}{t.median_s * 1e3:11.3f} ms [{t.low_s * 1e3:.3f} - "
                f"{t.high_s * 1e3:.3f}] x{t.rounds}, CPU {t.cpu_s * 1e3:.3f} ms{floor}"
                + (f", WRONG: {t.problem}" if t.problem else "")
            )
        return rows + [f"  {name:<15} not run: {why}" for name, why in self.refused]


def bench(
    target: str,
    request: OpRequest,
    rounds: int = 7,
    budget_s: float = 20.0,
    only: frozenset[str] | None = None,
    threads: int | None = None,
    cold: bool = False,
    chip: base.Target | None = None,
    tiles: Mapping[str, Tiles] | None = None,
) -> Bench:
    """Returns timings of all that run `request` on `target`, plain torch among them.

    A function takes no further turns once its own calls have taken `budget_s`. `only` names the
    functions to time, `threads` how many torch and ours use; `cold` empties a CPU's caches before
    each call, as a GPU's always are. `chip` stands for the target with this machine's figures,
    `tiles` are a recipe's. Raises UserError for an unknown target or op.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        found = chip or base.load(target)
        return _bench(found, request, rounds, budget_s, only, cold, tiles or {})
    finally:
        torch.set_num_threads(before)


def _bench(
    chip: base.Target,
    request: OpRequest,
    rounds: int,
    budget_s: float,
    only: frozenset[str] | None,
    cold: bool,
    tiles: Mapping[str, Tiles],
) -> Bench:
    load_average = os.getloadavg()[0]
    case: Case = import_module(load(request.op).cases).timed_case(request)
    device = DEVICES.get(chip.kind, "cpu")
    at_home = case.build()
    inputs = copy.deepcopy(at_home).to(device)  # judged on what no function had in hand
    calls: dict[str, Callable[[], Any]] = {}
    refused: list[tuple[str, str]] = []
    for implementation in load(request.op).implementations:
        if why := implementation.refuse(request, chip.kind, chip.name):
            refused.append((implementation.name, why))
        elif only is None or implementation.name in only:
            calls[implementation.name] = _call(implementation, inputs, tiles)
    judged = set(calls)
    for name in DTYPES:
        if (only is None or name in only) and (call := baseline(request.op, name, inputs)):
            calls[name] = call
    problems: dict[str, str | None] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, int | None] = {}
    for name, call in calls.items():
        before = _allocated(device)
        result, first = timed(call, device, cold)
        memory[name] = None if before is None else torch.cuda.max_memory_allocated() - before
        problems[name] = case.judge(at_home, on_cpu(result)).problem if name in judged else None
        times[name] = _of_the_first(first, device, budget_s)
    _take_turns(calls, times, rounds, budget_s, device, cold)
    return Bench(
        request,
        tuple(
            _timing(chip, request, name, times[name], problems[name], memory[name])
            for name in calls
        ),
        tuple(refused),
        load_average,
        torch.get_num_threads(),
    )


def _of_the_first(
    first: tuple[float, float], device: str, budget_s: float
) -> list[tuple[float, float]]:
    """What of a function's first call counts: all of it, if it alone took more than the budget.

    Never on a GPU, where kernels are compiled in it.
    """
    return [first] if device == "cpu" and first[0] > budget_s else []


def _call(
    implementation: Implementation, inputs: Inputs, tiles: Mapping[str, Tiles]
) -> Callable[[], Any]:
    """The call to time, weights prepared beforehand."""
    tuning = implementation.tuning(tiles)
    function, args, kwargs = resolve(implementation.entry), inputs.args, inputs.kwargs | tuning
    if implementation.prepare is not None:
        x, weight, offsets = args
        prepare = resolve(implementation.prepare)
        args = (x, prepare(weight, kwargs.pop("weight_scale"), x.shape[1], **tuning), offsets)
    return lambda: function(*args, **kwargs)


def _take_turns(
    calls: Mapping[str, Callable[[], Any]],
    times: dict[str, list[tuple[float, float]]],
    rounds: int,
    budget_s: float,
    device: str,
    cold: bool,
) -> None:
    names = list(calls)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if sum(wall for wall, _ in times[name]) < budget_s:
                times[name].append(timed(calls[name], device, cold)[1])


def _timing(
    chip: base.Target,
    request: OpRequest,
    name: str,
    times: list[tuple[float, float]],
    problem: str | None,
    memory_bytes: int | None,
) -> Timing:
    wall = [seconds for seconds, _ in times]
    floor_s, bound = _floor(chip, request)
    return Timing(
        op=request.op,
        implementation=name,
        target=chip.name,
        shape=dict(request.shape),
        dtype=request.dtype,
        median_s=statistics.median(wall),
        low_s=min(wall),
        high_s=max(wall),
        cpu_s=statistics.median(cpu for _, cpu in times),
        rounds=len(times),
        floor_s=floor_s,
        how="measured",
        device=describe(DEVICES.get(chip.kind, "cpu")),
        problem=problem,
        calls_s=tuple(wall),
        bound=bound,
        memory_bytes=memory_bytes,
    )


def _allocated(device: str) -> int | None:
    """Bytes that torch holds on a GPU now, its peak forgotten."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _floor(
    chip: base.Target, request: OpRequest
) -> tuple[float | None, Literal["memory", "compute"] | None]:
    """The op's floor, and what sets it, where the target's peak and bandwidth are known."""
    weights = request.dtype.split("+")[-1]
    peak, bandwidth = chip.peak_ops_s.get(weights), chip.bandwidth_bytes_s
    if peak is None or peak.value is None or bandwidth.value is None:
        return None, None
    needed = cost(request)
    memory = needed.bytes / bandwidth.value >= needed.flop / peak.value
    return needed.floor_s(peak.value, bandwidth.value), "memory" if memory else "compute"
