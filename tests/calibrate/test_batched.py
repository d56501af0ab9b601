"""The batched kernels round as the loops do: the interpreter here, the same source on a GPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="not run: no Triton here")

SCRIPT = Path(__file__).with_name("interpret_rounding.py")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


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


def test_row_kernels_are_torchs(found: dict[str, Any]) -> None:
    assert found["rows"]["int8"] == 0
    assert found["rows"]["fp8"] == 0
    assert len(found["rows"]) == 14
    for name, difference in found["rows"].items():
        assert difference < 1e-5, name
