"""How an implementation is held to an op's definition: seeded cases, error measures, verdicts.

Used by the tests, by `glm5q bench` and by anyone porting an op: `check(op, function)` runs the
whole matrix. The error allowed is a multiple of what plain torch in the same dtype makes against
float64; a NaN, a wrong shape or a wrong dtype never passes. A function runs before the truth is
computed, so that reused memory cannot hold the right answer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fused_ops.op import Implementation, OpRequest, load


@dataclass(frozen=True)
class Inputs:
    """What an op is called with: `function(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> Inputs:
        """Returns the same inputs on `device`."""

        def move(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        kwargs = {name: move(value) for name, value in self.kwargs.items()}
        return Inputs(tuple(move(value) for value in self.args), kwargs)


@dataclass(frozen=True)
class Verdict:
    """`problem` is None if the result stands; `error` and `allowed` are relative, 0 where exact."""

    error: float
    allowed: float
    problem: str | None


@dataclass(frozen=True)
class Case:
    """One point of an op's matrix. `build` makes its inputs, `judge` a result on them."""

    name: str
    request: OpRequest
    build: Callable[[], Inputs]
    judge: Callable[[Inputs, Any], Verdict]


def generator(*key: object) -> torch.Generator:
    """Returns a generator seeded by `key`, the same in every process and on every machine."""
    seed = 0
    for character in repr(key):
        seed = (seed * 1000003 + ord(character)) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def cases(op: str) -> list[Case]:
    """Returns the op's matrix."""
    found: list[Case] = import_module(load(op).cases).cases()
    return found


def fitting(op: str, implementation: Implementation, kind: str) -> Iterator[Case]:
    """Yields the cases that `implementation` says it runs on a target of `kind`."""
    for case in cases(op):
        if implementation.refuse(case.request, kind) is None:
            yield case


def run(case: Case, function: Callable[..., Any], device: str = "cpu") -> Verdict:
    """Calls `function` on the case's inputs on `device` and judges what it returns.

    On inputs that it never had in hand: on those it overwrote, any result could be right.
    """
    inputs = case.build()
    there = copy.deepcopy(inputs).to(device)
    result = on_cpu(function(*there.args, **there.kwargs))
    if changed := _changed(inputs, there):
        return Verdict(float("inf"), 0.0, f"changed its argument {changed}")
    return case.judge(inputs, result)


def _changed(before: Inputs, after: Inputs) -> str | None:
    """The first argument, by position or keyword, whose bytes are not as they were."""
    pairs = zip(before.args, after.args, strict=True)
    named = {str(number): pair for number, pair in enumerate(pairs)}
    named |= {name: (value, after.kwargs[name]) for name, value in before.kwargs.items()}
    for name, (old, new) in named.items():
        if isinstance(old, Tensor) and not torch.equal(_bytes(old), _bytes(new.cpu())):
            return name
    return None


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def on_cpu(result: Any) -> Any:
    """Returns a result's tensors on the CPU, where they are judged."""
    if isinstance(result, tuple):
        return tuple(on_cpu(part) for part in result)
    return result.cpu() if isinstance(result, Tensor) else result


def check(op: str, function: Callable[..., Any], device: str = "cpu") -> list[tuple[Case, Verdict]]:
    """Runs every case of `op` on `function`; an exception is a problem, not a stop."""
    verdicts = []
    for case in cases(op):
        try:
            with redirect_stdout(sys.stderr):  # what a port prints is not our table
                verdicts.append((case, run(case, function, device)))
        except (Exception, SystemExit) as error:  # noqa: BLE001, RUF100 - all it raises is its result
            said = str(error).strip().splitlines() or [""]
            problem = f"raised {type(error).__name__}: {said[0]}"
            verdicts.append((case, Verdict(float("inf"), 0.0, problem)))
    return verdicts


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Returns the worst row's |result - truth| / |truth| (2-norms over the last dimension).

    inf where a NaN or an infinity stands anywhere the truth has none, where an infinity of the
    truth is missed, or where a row of zeros is not zero.
    """
    result, truth = result.double(), truth.double()
    finite = torch.isfinite(truth)
    if not torch.equal(result[~finite], truth[~finite]) or not torch.isfinite(result[finite]).all():
        return float("inf")
    difference = torch.where(finite, result - truth, 0.0).norm(dim=-1)
    size = torch.where(finite, truth, 0.0).norm(dim=-1)
    if (difference[size == 0] > 0).any():
        return float("inf")
    ratio = torch.where(size > 0, difference / size.clamp(min=1e-300), 0.0)
    return float(ratio.max()) if ratio.numel() else 0.0


def compare(
    result: Tensor, truth: Tensor, plain: Tensor, dtype: torch.dtype, multiple: float, floor: float
) -> Verdict:
    """Judges `result` against float64 `truth`; `multiple` x plain torch's error + floor passes."""
    if problem := wrong_form(result, truth.shape, dtype):
        return Verdict(float("inf"), 0.0, problem)
    error, allowed = relative_error(result, truth), multiple * relative_error(plain, truth) + floor
    problem = (
        None if error <= allowed < float("inf") else f"error {error:.3g}, allowed {allowed:.3g}"
    )
    return Verdict(error, allowed, problem)


def wrong_form(result: Any, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Returns what is wrong with a result's type, shape or dtype, or None."""
    if not isinstance(result, Tensor):
        return f"returned {type(result).__name__}, not a tensor"
    if tuple(result.shape) != tuple(shape):
        return f"shape {tuple(result.shape)}, expected {tuple(shape)}"
    return None if result.dtype == dtype else f"dtype {result.dtype}, expected {dtype}"


def worst(verdicts: list[Verdict]) -> Verdict:
    """Returns the first with a problem, else the one nearest to its bound."""
    for verdict in verdicts:
        if verdict.problem:
            return verdict
    return max(verdicts, key=lambda v: v.error / v.allowed if v.allowed else v.error)


def matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a @ b as torch does it in `dtype`: operands rounded, sums wider, result rounded.

    bfloat16 goes through float32, which holds its products exactly: torch's own bfloat16 product is
    a hundred times slower on CPUs without it.
    """
    if dtype == torch.bfloat16:
        return (a.to(dtype).float() @ b.to(dtype).float()).to(dtype)
    return a.to(dtype) @ b.to(dtype)


def strided(x: Tensor) -> Tensor:
    """Returns x's values with gaps between rows and the first two dimensions swapped in memory."""
    wide = torch.zeros((*x.shape[:-1], x.shape[-1] + 5), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    if x.dim() < 3:
        return wide[..., : x.shape[-1]]
    return wide.transpose(0, 1).contiguous().transpose(0, 1)[..., : x.shape[-1]]


def bounds(lengths: tuple[int, ...]) -> Tensor:
    """Returns int64 offsets [len(lengths) + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def paged(
    rows: Tensor, lengths: tuple[int, ...], page: int, source: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Scatters packed rows over shuffled pages: (cache [pages, page, ...], table [sequences, n]).

    Unused slots hold values that would be noticed, unused table entries -1.
    """
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=source)
    cache = torch.full((sum(counts) + 2, page, *rows.shape[1:]), 77, dtype=torch.float32)
    cache = cache.to(rows.dtype) if rows.dtype != torch.uint8 else cache.byte()
    table = torch.full((len(lengths), max([*counts, 1])), -1, dtype=torch.int32)
    starts, used = bounds(lengths).tolist(), 0
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[sequence, :count] = order[used : used + count].int()
        position = torch.arange(length)
        pages = table[sequence].long()[position // page]
        cache[pages, position % page] = rows[starts[sequence] : starts[sequence] + length]
        used += count
    return cache, table
