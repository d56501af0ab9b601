"""What a peer's run cost and needed, kept beside what it wrote; imported by the peers' scripts."""

from __future__ import annotations

import json
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import torch

FILE = "outcome.json"


class Outcome:
    """Seconds of the quantizing call, and what had to be done to make the tool run."""

    def __init__(self) -> None:
        self.needed: list[str] = []
        self.quantize_s = 0.0
        self.device = "cpu"
        self._start = 0.0

    def on(self, device: str) -> None:
        """Says which device quantizes, by its chip's name."""
        self.device = torch.cuda.get_device_name(device) if device.startswith("cuda") else device

    def started(self) -> None:
        self._start = time.perf_counter()

    def finished(self) -> None:
        self.quantize_s = time.perf_counter() - self._start

    def note(self, text: str) -> None:
        self.needed.append(text)


@contextmanager
def recorded(output: Path, packages: Sequence[str]) -> Iterator[Outcome]:
    """Writes outcome.json into `output` once the body is through; nothing if it raises."""
    outcome, began = Outcome(), time.perf_counter()
    yield outcome
    found = {
        "versions": {name: metadata.version(name) for name in (*packages, "torch", "transformers")},
        "python": platform.python_version(),
        "device": outcome.device,
        "quantize_s": round(outcome.quantize_s, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "needed": outcome.needed,
    }
    (output / FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
