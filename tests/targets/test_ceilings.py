"""Ceilings: figures are what was done over how long it took, by products that are right."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm5q.pipeline.bench import BenchOptions, _Run
from targets import base, ceilings
from tests.fused_ops.conftest import one_thread  # noqa: F401 - for every test here

SMALL = ceilings.Sizes(64, 1 << 20)
Timed = Callable[..., tuple[Any, tuple[float, float]]]


def seconds(*pairs: tuple[float, float]) -> Timed:
    """A clock that shows these (wall, CPU) seconds in turn, over and over."""
    shown = 0

    def timed(call: Callable[[], Any], _device: str) -> tuple[Any, tuple[float, float]]:
        nonlocal shown
        shown += 1
        return call(), pairs[(shown - 1) % len(pairs)]

    return timed


def test_figures_are_work_over_the_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is left out; one CPU thread is timed by its process's time."""
    pairs = [(0.1, 0.1), (5.0, 4.0), (3.0, 2.0), (9.0, 8.0), (7.0, 6.0), (5.0, 5.0)]
    monkeypatch.setattr(ceilings, "timed", seconds(*pairs))
    found = ceilings.measure(base.load("a100"), "cpu", SMALL, "here")
    for dtype in ("bf16", "int8"):
        assert found.peak_ops_s[dtype].value == 2 * 64 * 64 * 64 / 2.0
        assert found.peak_ops_s[dtype].grade == "measured"
    assert found.bandwidth_bytes_s.value == 2 * (1 << 20) / 2.0
    assert found.bandwidth_bytes_s.source == "a copy of 1 MiB, read + write, here"
    assert found.peak_ops_s["int8"].source == "torch._int_mm 64 x 64 x 64, here"


def test_what_is_not_multiplied_here_keeps_its_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "timed", seconds((1.0, 1.0)))
    chip = base.load("h200")
    found = ceilings.measure(chip, "cpu", SMALL, "here")
    assert found.peak_ops_s["fp8"] == chip.peak_ops_s["fp8"]
    assert set(found.peak_ops_s) == set(chip.peak_ops_s)
    assert found.memory_bytes == chip.memory_bytes


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)  # fmt: skip
def test_the_timed_products_are_products(device: str) -> None:
    products = ceilings._products(device, 64)
    for dtype, (_, call) in products.items():
        result = call()
        assert result.shape == (64, 64)
        assert result.dtype == (torch.int32 if dtype == "int8" else torch.bfloat16)
        assert result.float().std() > 1  # of random numbers, not constants
    closure = products["int8"][1].__closure__
    assert closure is not None
    codes = closure[0].cell_contents.long().cpu()
    assert torch.equal(products["int8"][1]().long().cpu(), codes @ codes.t())


def test_a_gpu_is_measured_by_its_events_at_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be seen without one: which device and sizes it asks for, and which seconds count."""
    asked: list[tuple[str, ceilings.Sizes]] = []

    def measure(chip: base.Target, device: str, sizes: ceilings.Sizes, _how: str) -> base.Target:
        asked.append((device, sizes))
        return chip

    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    ceilings.measured(base.load("h200"))
    ceilings.measured(base.load("cpu"))
    assert asked == [("cuda", ceilings.CUDA), ("cpu", ceilings.CPU)]
    assert (ceilings.CUDA.side, ceilings.CUDA.copy_bytes) == (8192, 4 * 2**30)
    monkeypatch.setattr(ceilings, "timed", seconds((3.0, 1.0)))
    assert ceilings._best(lambda: None, "cuda") == 3.0
    assert ceilings._best(lambda: None, "cpu") == 1.0


def test_a_bench_draws_its_floors_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU as on a CPU, and its notes say so."""
    seen = []

    def measured(chip: base.Target) -> base.Target:
        seen.append(chip.name)
        monkeypatch.setattr(ceilings, "timed", seconds((1.0, 1.0)))
        return ceilings.measure(chip, "cpu", SMALL, "measured in this run")

    monkeypatch.setattr(ceilings, "measured", measured)
    bench = _Run(base.load("h200"), BenchOptions("h200"), lambda *_: None)
    assert seen == ["h200"]
    (floors,) = [note for note in bench._all_notes() if note.startswith("floors")]
    assert "torch.matmul 64 x 64 x 64, measured in this run" in floors
    assert "a copy of 1 MiB, read + write, measured in this run" in floors


@pytest.mark.gpu
def test_a_gpus_ceilings_take_three_seconds_at_most() -> None:
    start = time.perf_counter()
    found = ceilings.measured(base.load("h200"))
    assert time.perf_counter() - start < 3
    measured = {dtype for dtype, peak in found.peak_ops_s.items() if peak.grade == "measured"}
    assert measured >= {"bf16", "int8"}
    assert ("fp8" in measured) == (torch.cuda.get_device_capability() >= ceilings.FP8_FROM)
    assert found.bandwidth_bytes_s.value is not None
    assert 1e11 < found.bandwidth_bytes_s.value < 2e13
