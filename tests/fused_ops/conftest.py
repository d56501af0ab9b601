"""What the ops' tests share.

One thread: on two shared cores a second one waits on barriers longer than it computes.
"""

from collections.abc import Iterator

import pytest
import torch

from fused_ops.npu_support import find_spec
from tests.fused_ops import npu_emulator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def npu_ops() -> torch.library.Library:
    """torch.ops.npu on the CPU: torch_npu's schemas, our functions."""
    if find_spec("torch_npu"):
        pytest.skip("not run: torch_npu is installed, its own ops are there")
    return npu_emulator.register(npu_emulator.committed_schemas())
