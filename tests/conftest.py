"""Shared small checkpoints, and an honest count of what could not be run here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fused_ops import npu_support
from targets.ascend import environment
from tests import small
from tests.fused_ops import npu_wheel

ASCEND = Path(__file__).parents[1] / "build" / "ascend"  # where `make test-ascend` puts compilers

# One thread a test process: tests are small, and `make test` runs several processes.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)  # what a test draws does not depend on those before it
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("not run: no NVIDIA GPU here")
    if item.get_closest_marker("npu") and (why := npu_support.no_npu()):
        pytest.skip(f"not run: {why}")
    if item.get_closest_marker("ascend") and (lacking := environment.missing(ASCEND)):
        pytest.skip(f"not run: {lacking[0]}")
    if item.get_closest_marker("torch_npu_wheel") and (why := npu_wheel.absent()):
        pytest.skip(f"not run: {why}")


@pytest.fixture(scope="session")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random small GLM-5 in bfloat16."""
    return small.write_checkpoint(tmp_path_factory.mktemp("glm5"))


@pytest.fixture(scope="session")
def glm52(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random small GLM-5.2: layers share indexers."""
    return small.write_checkpoint(tmp_path_factory.mktemp("glm52"), small.GLM52)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Calibration and evaluation text for the small checkpoints' tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    calibration = small.write_text(folder / "calibration.jsonl", 24000)
    return calibration, small.write_text(folder / "evaluation.jsonl", 8000, seed=1)
