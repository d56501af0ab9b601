"""Systems of positive definite stacks, and the factoring kernels, interpreted or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from calibrate import solves
from tests.calibrate.interpreted import answer


def system(columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three matrices of condition near 1000, the second without a factor, and right sides."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(3, 2 * columns, columns, generator=generator)
    x[:, :, ::37] *= 8
    gram = x.transpose(1, 2) @ x / (2 * columns)
    gram.diagonal(dim1=1, dim2=2).add_(0.3)
    gram[1, 5, 5] = -1
    right = torch.randn(3, columns, 20, generator=generator)
    return gram.to(device), right.to(device)


@pytest.mark.parametrize(
    ("device", "columns", "bar"),
    [
        ("cpu", 60, 1e-5),
        pytest.param("cuda", 640, 1e-4, marks=pytest.mark.gpu),
        pytest.param("cuda", 60, 1e-5, marks=pytest.mark.gpu),
    ],
)
def test_systems_are_solved_and_what_has_no_factor_is_0(
    device: str, columns: int, bar: float
) -> None:
    gram, right = system(columns, device)
    found = solves.solve(gram, right)
    exact = torch.linalg.solve(gram.double(), right.double())
    for index in (0, 2):
        difference = (found[index] - exact[index]).norm() / exact[index].norm()
        assert float(difference) < bar
    assert not bool(found[1].any())
    assert torch.equal(found, solves.solve(gram, right))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("triton", reason="not run: no Triton here")
    return answer("interpret_solves.py")


@pytest.mark.parametrize("size", ["one panel", "panels"])
def test_factors_are_torchs(found: dict[str, Any], size: str) -> None:
    assert found[size]["failed"] == 0
    for name in ("upper", "corner", "solved"):
        assert found[size][name] < 1e-5, name


def test_every_missing_factor_is_seen(found: dict[str, Any]) -> None:
    assert found["failing"]["failed"] == [False, True, True, True]
    assert found["failing"]["finite"][0]


def test_mean_grams_made_on_use_are_gptqs(found: dict[str, Any]) -> None:
    for name, difference in found["mixtures"].items():
        assert difference < 1e-6, name
