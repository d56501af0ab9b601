"""Stages L1 and L2: every kernel lowers, fits each die, and would be caught if it did not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from recipes import files
from targets.ascend import lower, tiles
from targets.ascend.chips import DIES
from targets.ascend.kernels import TILES, VARIANTS, Variant, _gemm, _indexer
from targets.ascend.toolchain import STUB, StageError
from tests.conftest import ASCEND

ALL = tuple(die for dies in DIES.values() for die in dies)
FIRST = ALL[0]
# Besides GLM-5's: other head counts share a score tile differently, other groups a step of the sum.
OTHERS = (
    *(
        Variant("lightning_indexer", f"{heads}-heads", partial(_indexer, torch.int8, True, heads))
        for heads in (1, 8, 13, 64)
    ),
    *(
        Variant("expert_gemm", f"int{bits}-g{group}", partial(_gemm, bits, group, 64))
        for bits, group in ((4, 32), (4, 256), (8, 32))
    ),
)

pytestmark = pytest.mark.ascend


def named(variant: Variant) -> str:
    return f"{variant.op}-{variant.name}"


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_a_kernel_is_planned_within_every_die(variant: Variant) -> None:
    linalg = lower.linalg_of(variant, TILES[variant.op], FIRST, ASCEND)
    assert linalg.cube == (variant.op != "select_topk")
    for die in ALL:
        hivm = lower.hivm_of(linalg, die, ASCEND)
        sides = ("_mix_aic", "_mix_aiv") if linalg.cube else ("",)
        assert sorted(hivm.functions) == [linalg.kernel + side for side in sides]
        assert 0 < hivm.usage["UB"] <= 192 << 10
        assert hivm.usage["L1"] <= 512 << 10
        assert hivm.usage["L0C"] <= 128 << 10
        assert (hivm.usage["L1"] > 0) == (hivm.usage["L0C"] > 0) == linalg.cube
        assert (hivm.sizes["cube"], hivm.sizes["vector"]) == (die.cube_cores, die.vector_cores)
        assert not hivm.notes, "fits only without double buffering"


@pytest.mark.parametrize("variant", OTHERS, ids=named)
def test_other_heads_and_groups_that_the_table_allows_fit_too(variant: Variant) -> None:
    linalg = lower.linalg_of(variant, TILES[variant.op], FIRST, ASCEND)
    assert lower.hivm_of(linalg, FIRST, ASCEND).usage["UB"] <= FIRST.ub_bytes


def test_linalg_is_the_same_for_every_die() -> None:
    """So that the numeric stage, run on one, speaks for all."""
    variant = VARIANTS[0]
    texts = {lower.linalg_of(variant, TILES[variant.op], die, ASCEND).text for die in ALL}
    assert len(texts) == 1


@pytest.mark.parametrize("die", ALL, ids=lambda die: die.name)
def test_64_heads_in_one_program_overflow(die: lower.Die) -> None:
    whole = TILES["sparse_attention"] | {"H": 64}
    linalg = lower.linalg_of(VARIANTS[0], whole, die, ASCEND)
    with pytest.raises(StageError, match=r"ub overflow, requires \d+ bits while 1572864 bits"):
        lower.hivm_of(linalg, die, ASCEND)


def test_the_recipe_keeps_the_tiles_that_are_lowered() -> None:
    assert files.load("atlas-800t-a3").tiles == TILES


@pytest.mark.parametrize("op", TILES)
def test_one_step_larger_does_not_fit(op: str) -> None:
    """Not past the largest candidates: those are where the scan was ended."""
    chosen = files.load("atlas-800t-a3").tiles[op]
    bigger = tiles.larger(op, chosen)
    assert bigger
    for step in bigger:
        assert tiles.refuse(op, step, DIES["ascend-910c"][:1], ASCEND), f"{step} fits too"


def test_lower_writes_every_artefact_and_says_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "VARIANTS", [v for v in VARIANTS if v.op == "select_topk"])
    stages = lower.lower("ascend-910c", tmp_path, ASCEND)
    assert [(stage.stage, stage.chip) for stage in stages] == [
        (lower.L1, "Ascend910_9382"),
        (lower.L2, "Ascend910_9382"),
        (lower.L1, "Ascend910_9362"),
        (lower.L2, "Ascend910_9362"),
        (lower.L3, "ascend-910c"),
    ]
    for stage in stages:
        assert stage.error is None
        assert all((tmp_path / file).stat().st_size for file in stage.artefacts)
    assert {path.name for path in tmp_path.iterdir()} == {f for s in stages for f in s.artefacts}
    assert all("no NPU object code" in s.proves for s in stages if s.stage == lower.L2)
    assert "NO object code" in STUB
    assert stages[-1].deviation == 0.0
    assert stages[-1].usage["cases"] > 50


def test_a_tile_that_does_not_fit_is_a_stage_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower, "VARIANTS", VARIANTS[:1])
    monkeypatch.setattr(lower, "judge", lambda *_, **__: [lower_ok()])
    whole = {"sparse_attention": {"H": 64, "N": 32}}
    stages = lower.lower("ascend-910b", tmp_path, ASCEND, whole)
    failed = [stage for stage in stages if stage.error]
    assert {stage.stage for stage in failed} == {lower.L2}
    assert all("ub overflow" in str(stage.error) for stage in failed)
    assert not list(tmp_path.glob("*.hivm.mlir"))


def lower_ok() -> object:
    from targets.ascend.numeric import Judged

    return Judged("none", 0.0, 0.0, None)
