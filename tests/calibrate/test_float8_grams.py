"""Grams of float8 codes on Hopper: compiled where there is no GPU, held to float64 on one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calibrate import float8_grams
from calibrate.observe import _bound
from calibrate.rows import mirror_grams
from fused_ops.testkit import bounds, generator
from fused_ops.triton_support import GLUON, no_gluon
from glm5q.quant import FP8, FP8_MAX
from targets import lower_cuda
from tests.launches import assembled, noted

RAGGED = ((0, 1, 200, 128, 0, 517, 2048, 3), (5, 5000), (129,), (300, 64, 0))
COLUMNS = (128, 384, 1024)  # 128 and 384: a tile's last half lies past the Gram
# Of the geometric mean of both diagonals. The tensor cores cut a step of 128 rows to about 14 bits,
# which was 6e-4 of a trace; e4m3 is off by a sixteenth at most, so a sum of products by an eighth.
SUMMED, ROUNDED = 3e-3, 0.13
AVERAGED = 4e-3  # root mean square, of 2048 rows


@pytest.fixture
def hopper() -> None:
    if why := no_gluon():
        pytest.skip(f"not run: {why}")


def inputs(rows: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, offsets, Grams to add to) on the GPU; columns differ in size."""
    source = generator(rows, columns)
    size = torch.rand(columns, generator=source) + 0.1
    x = torch.randn((sum(rows), columns), generator=source) * size
    grams = torch.randn((len(rows), columns, columns), generator=source)
    return x.bfloat16().cuda(), bounds(rows).cuda(), grams.cuda()


def rounded(x: Tensor) -> Tensor:
    """float64 of x as the kernel rounds it."""
    absmax = x.abs().max().float()
    return (x.float() * (FP8_MAX / absmax)).to(FP8).double() * (absmax.double() / FP8_MAX)


def added(grams: Tensor, add: Callable[[Tensor], None]) -> Tensor:
    """What `add` adds to Grams, whole, float64 [experts, columns, columns]; twice the same bits."""
    found, again = grams.clone(), grams.clone()
    for one in (found, again):
        add(one)
        mirror_grams(one)
    assert torch.equal(found, again)
    return found.double() - (grams.tril() + grams.tril(-1).transpose(1, 2)).double()


def of(x: Tensor, offsets: Tensor, grams: Tensor, **more: Tensor) -> Tensor:
    def add(one: Tensor) -> None:
        held = float8_grams.HeldRows(1)
        held.add(x, offsets, one, **more)
        held.flush(one)

    return added(grams, add)


def truth(x: Tensor, offsets: Tensor) -> Tensor:
    """float64 Grams [experts, columns, columns] of x [rows, columns]."""
    parts = x.double().tensor_split(offsets[1:-1].cpu())
    return torch.stack([part.T @ part for part in parts])


def errors(found: Tensor, right: Tensor) -> Tensor:
    """|found - right| over the root of both diagonals' product, or over 1 where that is zero."""
    size = right.diagonal(dim1=1, dim2=2).sqrt()
    size = size[:, :, None] * size[:, None]
    return (found - right).abs() / torch.where(size > 0, size, 1.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", RAGGED)
@pytest.mark.parametrize("columns", COLUMNS)
def test_they_are_the_codes_and_nearly_the_inputs(rows: tuple[int, ...], columns: int) -> None:
    x, offsets, grams = inputs(rows, columns)
    assert float8_grams.takes(x, grams)
    found = of(x, offsets, grams)
    assert errors(found, truth(rounded(x), offsets)).max() < SUMMED
    assert errors(found, truth(x, offsets)).max() < ROUNDED + SUMMED
    assert not found[[index for index, count in enumerate(rows) if count == 0]].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_roundings_average_out_over_rows() -> None:
    x, offsets, grams = inputs((2048, 2048), 1024)
    right = truth(x, offsets)
    found = of(x, offsets, grams)
    assert errors(found, right).square().mean().sqrt() < AVERAGED
    trace = found.diagonal(dim1=1, dim2=2).sum(1) / right.diagonal(dim1=1, dim2=2).sum(1)
    assert (trace - 1).abs().max() < AVERAGED


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_row_of_the_next_expert_is_seen() -> None:
    x, offsets, grams = inputs((300, 64, 3, 700), 512)
    right = truth(rounded(x), offsets)
    offsets[2] += 1
    wrong = errors(of(x, offsets, grams), right)
    assert wrong[1].max() > 10 * SUMMED
    assert wrong[2].max() > 10 * SUMMED
    assert wrong[3].max() < SUMMED


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_larger_bound_serves() -> None:
    x, offsets, grams = inputs((300, 0, 65, 700), 256)
    # Four times the largest: all but the smallest keep their bits.
    found = of(x, offsets, grams, absmax=4 * x.abs().max().float())
    assert errors(found, truth(rounded(x), offsets)).max() < 2 * SUMMED


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("calls", [1, 2, 3, 20])
def test_held_rows_are_all_added_each_call_on_its_scale(calls: int) -> None:
    """Five calls: held for less than that, they are added in between; the third does not fit."""
    shapes = ((300, 0, 65), (150, 200, 0), (2000, 700, 3), (0, 0, 129), (300, 0, 65))
    forwards = [(*inputs(rows, 384)[:2], 1.5**power) for power, rows in enumerate(shapes)]
    forwards = [(x * scale, offsets, scale) for x, offsets, scale in forwards]
    grams = inputs((1, 1, 1), 384)[2]

    def add(one: Tensor) -> None:
        held = float8_grams.HeldRows(calls)
        for x, offsets, _ in forwards:
            held.add(x, offsets, one)
        held.flush(one)
        held.flush(one)

    right = sum(truth(rounded(x), offsets) for x, offsets, _ in forwards)
    assert errors(added(grams, add), right).max() < SUMMED


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_zeros_and_no_rows_add_nothing() -> None:
    x, offsets, grams = inputs((20, 0, 40), 256)
    assert not of(torch.zeros_like(x), offsets, grams).any()
    assert not of(x[:0], torch.zeros_like(offsets), grams).any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_what_it_does_not_take_it_says() -> None:
    x, _, grams = inputs((20,), 256)
    assert float8_grams.takes(x, grams)
    assert not float8_grams.takes(x.float(), grams)
    assert not float8_grams.takes(x.T, grams)
    assert not float8_grams.takes(x.cpu(), grams)
    assert not float8_grams.takes(x, grams.double())
    assert not float8_grams.takes(x, grams[:, :200, :200].contiguous())


@pytest.mark.parametrize("largest", [1.0, 1.01, 1.74, 1.75, 1.76, 3.5, 1e-3, 6e4])
def test_the_bound_uses_most_of_e4m3s_range(largest: float) -> None:
    x = torch.tensor([[-largest, largest / 3], [0.0, largest / 2]])
    for known in (None, torch.tensor(largest)):
        bound = float(_bound(x, known))
        assert math.frexp(bound / 1.75)[0] == 0.5  # a power of two
        assert 223 < largest * FP8_MAX / bound <= FP8_MAX


def test_a_cpu_is_not_taken() -> None:
    assert not float8_grams.takes(torch.zeros((2, 128)).bfloat16(), torch.zeros((1, 128, 128)))


@pytest.mark.parametrize("columns", [128, 384, 768, 2048, 6144])
def test_tiles_hold_what_is_on_and_below_the_diagonal_once(columns: int) -> None:
    side = columns // 128
    met = torch.zeros((side + 1, side), dtype=torch.int64)
    for row, column in float8_grams._tiles(columns, torch.device("cpu")).tolist():
        met[2 * row : 2 * row + 2, column] += 1
    below = torch.ones((side, side), dtype=torch.int64).tril()
    assert torch.equal(met[:side].tril(), below)
    assert int(met[:side].triu(1).sum()) == side // 2  # halves of tiles, which are not added


compiled = pytest.mark.skipif(
    find_spec("triton") is None or not version("triton").startswith(GLUON),
    reason=f"not run: triton {GLUON} is not installed",
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, lower_cuda.Launch]:
    """What is launched from here on, by name, and is not."""
    from calibrate.kernels import grams
    from fused_ops.expert_gemm import triton_kernel

    places = {"add_grams": grams, "turn_codes": grams, "list_tiles": triton_kernel}
    monkeypatch.setattr(float8_grams, "processors", lambda _: 132)
    return noted(monkeypatch, places)


@compiled
@pytest.mark.parametrize(("experts", "calls"), [(256, 4), (1, 1)])
def test_hopper_code_keeps_its_sums_in_registers(
    experts: int, calls: int, launches: dict[str, lower_cuda.Launch], tmp_path: Path
) -> None:
    with torch.device("meta"):
        x, grams = torch.empty((4096, 6144)).bfloat16(), torch.empty((experts, 6144, 6144))
        offsets = torch.empty(experts + 1, dtype=torch.int64)
        held = float8_grams.HeldRows(calls)
        for _ in range(calls):
            held.add(x, offsets, grams)
        assert "add_grams" not in launches
        held.flush(grams)
    ptx = {}
    for name in ("turn_codes", "add_grams"):
        made, _ = lower_cuda.compile_launch(launches[name], "h200")
        assert made.metadata.shared <= lower_cuda.CHIPS["h200"].shared_bytes
        ptx[name] = made.asm["ptx"]
        assert not re.search(r"\b(ld|st)\.local", ptx[name])
        assert "0 bytes spill stores, 0 bytes spill loads" in assembled(ptx[name], tmp_path)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx["turn_codes"]
    assert "div.rn.f32" in ptx["turn_codes"]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx["add_grams"]
    assert "setmaxnreg.dec" in ptx["add_grams"]
    assert "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add" in ptx["add_grams"]
