"""Codes in bytes on Hopper: compiled where there is no GPU, held to the definition on one."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product as product_of
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.expert_gemm.reference import expert_gemm, quantize_rows
from fused_ops.testkit import bounds, generator
from fused_ops.triton_support import no_gluon
from glm5q.quant import FP8

if find_spec("triton") is None:
    pytest.skip("not run: triton is not installed", allow_module_level=True)

from fused_ops.expert_gemm import gluon_launch
from targets import lower_cuda
from tests.launches import assembled, noted

RAGGED = ((0, 1, 200, 128, 0, 517), (5,), (0, 0, 129))
SHAPES = ((384, 264), (128, 256), (2048, 1536), (768, 512))  # (in, out); 264 is no whole tile
# Rounding to bfloat16 alone errs by 1.6587e-3, the kernel on an H200 by 1.6598e-3: a step's sum of
# about 14 bits adds little.
ALLOWED = 1.8e-3


@pytest.fixture
def hopper() -> None:
    if why := no_gluon():
        pytest.skip(f"not run: {why}")


def inputs(
    rows: tuple[int, ...], columns: int, features: int, groups: int, dtype: torch.dtype = FP8
) -> dict[str, Tensor]:
    """Arguments of code_gemm on the GPU, and int8 `codes`, of four bits for float8."""
    source = generator(rows, columns, features, groups)
    reach = 8 if dtype == FP8 else 128
    values = torch.randn((sum(rows), columns), generator=source).bfloat16()
    shape = (len(rows), features, columns)
    codes = torch.randint(-reach, reach, shape, generator=source).to(torch.int8)
    scale = torch.rand((len(rows), groups, features), generator=source) * 0.02 + 1e-3
    x, x_scale = gluon_launch.round_rows(values.cuda(), dtype)
    return {
        "x": x, "x_scale": x_scale, "codes": codes.cuda(), "offsets": bounds(rows).cuda(),
        "weight": gluon_launch.code_bytes(codes.cuda(), dtype),
        "weight_scale": scale.bfloat16().float().cuda(),
    }  # fmt: skip


def product(given: dict[str, Tensor], **tiles: int) -> Tensor:
    return gluon_launch.code_gemm(
        given["x"], given["weight"], given["offsets"], x_scale=given["x_scale"],
        weight_scale=given["weight_scale"], tiles=gluon_launch.TILES | tiles,
    )  # fmt: skip


def truth(given: dict[str, Tensor]) -> Tensor:
    """The reference's [rows, out] in float32, whose groups are summed in float64."""
    return expert_gemm(
        given["x"], given["codes"], given["offsets"], x_scale=given["x_scale"],
        weight_scale=given["weight_scale"].transpose(1, 2), out_dtype=torch.float32,
    )  # fmt: skip


def error(found: Tensor, right: Tensor) -> float:
    """Of all outputs together, relative."""
    return float((found.float() - right).norm() / right.norm())


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("rows", RAGGED)
@pytest.mark.parametrize(("columns", "features"), SHAPES)
@pytest.mark.parametrize(("channel", "dtype"), [(False, FP8), (True, FP8), (True, torch.int8)])
def test_it_is_the_reference(
    rows: tuple[int, ...], columns: int, features: int, channel: bool, dtype: torch.dtype
) -> None:
    given = inputs(rows, columns, features, 1 if channel else columns // 128, dtype)
    assert gluon_launch.takes(given["x"], given["weight"], given["weight_scale"])
    found, right = product(given), truth(given)
    assert found.dtype == torch.bfloat16
    assert error(found, right) < ALLOWED
    assert torch.equal(found, product(given, GROUP=2))  # 5 row tiles in groups of 2, 2 and 1


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_neighbours_scales_are_seen() -> None:
    given = inputs((300, 64, 3, 700), 2048, 1536, 16)
    right = truth(given)
    given["weight_scale"] = given["weight_scale"].roll(1, 1)
    assert error(product(given), right) > 100 * ALLOWED


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_what_it_does_not_take_it_says() -> None:
    given = inputs((5,), 256, 256, 2)
    x, weight, scale = given["x"], given["weight"], given["weight_scale"]
    assert gluon_launch.takes(x, weight, scale)
    assert not gluon_launch.takes(x.bfloat16(), weight, scale)
    assert not gluon_launch.takes(x, weight[:, :128].contiguous(), scale[..., :128].contiguous())
    assert not gluon_launch.takes(x, weight, scale.transpose(1, 2))
    assert not gluon_launch.takes(x.cpu(), weight, scale)


@pytest.mark.gpu
def test_rows_are_rounded_as_defined() -> None:
    x = torch.randn((300, 6144), generator=generator("rows")).bfloat16().cuda()
    x[3] = 0
    x[4] *= 1e-30
    x[6] *= 1e-38
    x[5, 1:] = 0
    for one, dtype in product_of((x, x[:, :1000], x.T), (FP8, torch.int8)):
        found, right = gluon_launch.round_rows(one, dtype), quantize_rows(one, dtype)
        assert torch.equal(found[0].float(), right[0].float())
        assert torch.equal(found[1], right[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_code_bytes_are_exact(device: str) -> None:
    codes = torch.arange(-16, 17, dtype=torch.int8, device=device).repeat(500, 3)[:, 1:]
    for dtype in (FP8, torch.int8):
        assert torch.equal(gluon_launch.code_bytes(codes, dtype).float(), codes.float())


def recorded(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]
) -> dict[str, lower_cuda.Launch]:
    """What `call` would launch on an H200, on tensors without memory."""
    kernels = ("multiply", "list_tiles", "round_row", "to_float8")
    found = noted(monkeypatch, dict.fromkeys(kernels, gluon_launch))
    monkeypatch.setattr(gluon_launch, "processors", lambda _: 132)
    with torch.device("meta"):
        call()
    return found


@pytest.mark.parametrize(
    ("channel", "dtype", "named"),
    [(False, FP8, "f32.e4m3.e4m3"), (True, FP8, "f32.e4m3.e4m3"), (True, torch.int8, "s32.s8.s8")],
)
def test_hopper_code_keeps_its_sums_in_registers(
    channel: bool, dtype: torch.dtype, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def call() -> None:
        groups = 1 if channel else 48
        gluon_launch.code_gemm(
            torch.empty((4096, 6144), dtype=dtype), torch.empty((256, 4096, 6144), dtype=dtype),
            torch.empty(257, dtype=torch.int64), x_scale=torch.empty(4096),
            weight_scale=torch.empty((256, groups, 4096)),
        )  # fmt: skip

    launches = recorded(monkeypatch, call)
    compiled, _ = lower_cuda.compile_launch(launches["multiply"], "h200")
    assert compiled.metadata.shared <= lower_cuda.CHIPS["h200"].shared_bytes
    ptx = compiled.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n128k32.{named}" in ptx
    assert "setmaxnreg.dec" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    nothing = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    assert nothing in assembled(ptx, tmp_path)


def test_rounding_a_row_divides_as_ieee(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        gluon_launch.round_rows(torch.empty((64, 6144), dtype=torch.bfloat16))

    launches = recorded(monkeypatch, call)
    compiled, _ = lower_cuda.compile_launch(launches["round_row"], "h200")
    ptx = compiled.asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
