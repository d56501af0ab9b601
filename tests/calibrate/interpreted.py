"""Scripts beside the tests that run kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def answer(script: str) -> dict[str, Any]:
    """Returns what a script prints as JSON; the interpreter is chosen before Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(FOLDER.parents[1])
    command = [sys.executable, str(FOLDER / script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
