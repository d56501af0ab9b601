"""On a GPU: the same bytes twice, and an accuracy near the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from calibrate import guidance
from calibrate.guidance import guide
from glm5q import pipeline
from glm5q.checkpoint import open_checkpoint
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


@pytest.mark.gpu
def test_guidance_on_a_gpu_is_repeatable_and_near_the_cpus(
    glm5: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 and several windows at a time, from one gradient of the loss."""

    def slope(_source: object, hidden: Tensor, *_: object) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(hidden.shape, generator=generator).to(hidden.device)

    monkeypatch.setattr(guidance, "_loss_gradient", slope)
    source = open_checkpoint(glm5)
    tokens = torch.randint(0, 256, (24, 64), generator=torch.Generator().manual_seed(0))
    first, again, cpu = (guide(source, tokens, device=d) for d in ("cuda", "cuda", "cpu"))
    assert any(first)
    for one, other, exact in zip(first, again, cpu, strict=True):
        if one is None or other is None or exact is None:
            assert one is other is exact
            continue
        assert torch.equal(one.experts, other.experts)
        assert (one.experts.sort().values == exact.experts.sort().values).float().mean() > 0.97
        for path, weight in one.weights.items():
            assert torch.equal(weight, other.weights[path])
            both = torch.stack((weight.mean(1), exact.weights[path].mean(1))).log()
            assert torch.corrcoef(both)[0, 1] > 0.97
