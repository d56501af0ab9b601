"""The batched kernels round as the loops do: the interpreter here, the same source on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from calibrate import candidates
from calibrate.candidates import Candidates, LayerPlan, find_candidates
from calibrate.observe import Moments
from glm5q import names
from recipes.schema import Gptq
from tests.calibrate.interpreted import answer

pytest.importorskip("triton", reason="not run: no Triton here")

GRIDS: dict[str, dict[str, object]] = {
    "group": {"bits": 4, "group_size": 128, "clip": {"steps": 8, "lowest": 0.5}},
    "signed": {"bits": 4, "group_size": 128, "clip": {"steps": 8, "lowest": 0.5, "signed": True}},
    "channel": {"bits": 8, "group_size": None, "clip": {"steps": 8, "lowest": 0.5}},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return answer("interpret_rounding.py")


@pytest.mark.parametrize("grid", ["group", "signed", "channel"])
def test_scales_and_gptq_codes_are_the_loops(found: dict[str, Any], grid: str) -> None:
    assert found[grid]["scales"] == 0
    assert found[grid]["codes"] == 0
    assert (found[grid]["below zero"] > 5) == (grid == "signed")
    assert found[grid]["rounded"] == found[grid]["turned"] == 0
    assert found[grid]["difference"] < 1e-7


@pytest.mark.parametrize("grid", ["group", "signed", "channel"])
def test_descent_is_as_good_as_the_loops(found: dict[str, Any], grid: str) -> None:
    """A round refits a group's scale as it leaves the group, so codes may differ, errors not."""
    errors = found[grid]
    assert errors["moved"] == 0  # against its meaning, one code at a time
    assert errors["stored"] == 0
    assert errors["batched"] < errors["gptq"] < errors["rtn"]
    assert errors["batched"] <= 1.02 * errors["descent"]


def test_a_gram_without_a_factor_is_damped_as_in_the_loop(found: dict[str, Any]) -> None:
    loop, batched = found["failing"]["loop"], found["failing"]["batched"]
    assert loop[0] == pytest.approx(0.5)
    assert math.isnan(loop[1])
    assert batched[0] == pytest.approx(loop[0])
    assert math.isnan(batched[1])
    assert found["failing"]["codes"] == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("grid", GRIDS)
def test_a_gpu_rounds_as_well_as_the_loops_and_twice_the_same(
    grid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five matrices, two at a time: factored beside the rounding of those before."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(5, 200, 640, generator=generator)).bfloat16()
    x = torch.randn(5, 900, 640, generator=generator)
    x = x + 0.7 * x.roll(1, -1)
    x[:, :, 3::97] *= 8
    gram = x.transpose(1, 2) @ x
    tokens = torch.full((5,), 900)
    monkeypatch.setattr(candidates, "DEVICE_STACK_ELEMENTS", 2 * weight[0].numel())
    plan = Gptq.model_validate(
        {
            "method": "gptq", "scale_dtype": "bfloat16", "activation": None, "damping": 0.05,
            "ridge": 0.3, "act_order": True, "pooling": 0.5, **GRIDS[grid],
        }
    )  # fmt: skip

    def found(device: str, descent: int) -> Candidates:
        sums = gram.to(device)
        moments = Moments(sums.diagonal(dim1=1, dim2=2).clone(), tokens, sums)
        return find_candidates(
            1, names.DOWN, weight.to(device), moments, plan, LayerPlan(descent=descent)
        )

    def errors(one: Candidates, method: str) -> torch.Tensor:
        difference = (one.weight(method).cpu() - weight.float()).double()
        return ((difference @ gram.double()) * difference).sum((1, 2))

    for descent, method in ((0, "rtn"), (0, "gptq"), (2, "descent")):
        mine, loop = found("cuda", descent), found("cpu", descent)
        assert float((errors(mine, method) / errors(loop, method)).max()) < 1.02, method
        again = found("cuda", descent)
        assert torch.equal(mine.codes[method], again.codes[method])
        assert torch.equal(mine.scales[method], again.scales[method])


def test_row_kernels_are_torchs(found: dict[str, Any]) -> None:
    assert found["rows"]["int8"] == 0
    assert found["rows"]["fp8"] == 0
    assert len(found["rows"]) == 14
    for name, difference in found["rows"].items():
        assert difference < 1e-5, name
