"""On a GPU: the same bytes twice, and an accuracy near the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5q import pipeline
from tests.calibrate.test_gpu_route import files
from tests.calibrate.test_run import Texts, options


@pytest.mark.gpu
def test_two_runs_on_a_gpu_are_byte_equal_and_near_the_cpus(
    glm52: Path, texts: Texts, tmp_path: Path
) -> None:
    found = []
    for name, device in (("a", "cuda"), ("b", "cuda"), ("c", "cpu")):
        asked = vars(options(glm52, tmp_path / name, texts)) | {"device": device}
        found.append(pipeline.calibrate(pipeline.CalibrateOptions(**asked))[0])
    assert files(tmp_path / "a") == files(tmp_path / "b")
    kl = [one.run.accuracy.kl_mean for one in found]  # type: ignore[union-attr]
    assert kl[0] == kl[1]
    assert kl[0] < 1.1 * kl[2]
