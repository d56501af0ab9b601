"""Triton kernels in Triton's interpreter, at sizes it manages: the source, not its lowering."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.fused_ops.interpret import SMALL

if find_spec("triton") is None:
    pytest.skip("not run: triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a GPU runs the whole matrix, test_all_ops.py", allow_module_level=True)


@pytest.mark.parametrize("name", [*SMALL, "lists"])
def test_kernel_passes_in_the_interpreter(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fused_ops.interpret", name]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
