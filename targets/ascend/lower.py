"""`glm5q lower` for Ascend: every op through three stages, their artefacts, what each shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm5q.errors import UserError
from targets.ascend import environment as compilers
from targets.ascend.chips import DIES, Die
from targets.ascend.kernels import TILES, VARIANTS, Tiles, Variant
from targets.ascend.numeric import IMPLEMENTATION, judge
from targets.ascend.toolchain import Hivm, Linalg, StageError, to_hivm, to_linalg
from targets.ascend.x86 import kernel_file, specialize
from targets.lowering import Stage

L1 = "L1 linalg"
L2 = "L2 HIVM"
L3 = "L3 x86"
PROVES = {
    L1: "triton-ascend takes the kernel; nothing yet of whether it fits a chip",
    L2: (
        "Huawei's open compiler fused it, split it over cube and vector cores and planned UB, L1 "
        "and L0C within this die; a stub stood in for the closed hivmc, so there is no NPU object "
        "code, and it never ran on an NPU"
    ),
    L3: (
        "what the compiler fused on the way to L2, before it maps it to cores, run on this CPU and "
        "not on an NPU, passes the op's test matrix; nothing of the mapping, the NPU's exp, its "
        "order of sums, its synchronisation or speed"
    ),
}


def lower(
    chip: str, folder: Path, environment: Path, tiles: Mapping[str, Tiles] | None = None
) -> tuple[Stage, ...]:
    """Returns every stage of every op for the dies of target `chip`; artefacts go to `folder`.

    `tiles` (op -> constexpr -> value) is a recipe's choice; ops it does not name use their own.
    Raises UserError where the compilers are not there. Where only L3's tools are missing, its
    stages fail and say so.
    """
    if chip not in DIES:
        raise UserError(f"{chip}: no Ascend target", f"use one of {', '.join(DIES)}")
    if lacking := compilers.missing_compilers(environment):
        problem, _, fix = lacking[0].partition("; ")
        raise UserError(problem, fix)
    chosen = TILES | dict(tiles or {})
    stages: list[Stage] = []
    for variant in VARIANTS:
        stages += _compile(variant, chosen[variant.op], DIES[chip], folder, environment)
    for op in dict.fromkeys(variant.op for variant in VARIANTS):
        stages.append(_run(op, chosen[op], chip, folder, environment))
    return tuple(stages)


def problem(hivm: Hivm, linalg: Linalg, die: Die) -> str | None:
    """Returns why a final module is not what `die` can hold, or None."""
    planned = {"UB": die.ub_bytes, "L1": die.l1_bytes, "L0C": die.l0c_bytes}
    table = planned | {"cube": die.cube_cores, "vector": die.vector_cores}
    if dict(hivm.sizes) != table:
        return f"planned for {dict(hivm.sizes)}, {die.name} is {table}"
    for memory, size in planned.items():
        if hivm.usage[memory] > size:
            return f"{memory}: {hivm.usage[memory]} bytes used, {size} there"
    suffixes = ("_mix_aic", "_mix_aiv") if linalg.cube else ("",)
    wanted = sorted(linalg.kernel + suffix for suffix in suffixes)
    if sorted(hivm.functions) != wanted:
        return f"device functions {', '.join(hivm.functions)}, expected {', '.join(wanted)}"
    if not hivm.usage["UB"] or (linalg.cube and not (hivm.usage["L1"] and hivm.usage["L0C"])):
        return f"no memory planned: {dict(hivm.usage)}"
    return None


def linalg_of(variant: Variant, tiles: Tiles, die: Die, environment: Path) -> Linalg:
    """Stage L1 of one variant for one die. Raises StageError."""
    launch = variant.launch(tiles)
    source = kernel_file(launch.module)
    signature, constants = specialize(launch, source)
    return to_linalg(environment, source, launch.kernel, signature, constants, die.name)


def hivm_of(linalg: Linalg, die: Die, environment: Path) -> Hivm:
    """Stage L2 of what `linalg_of` gave. Raises StageError, also for a module that does not fit."""
    hivm = to_hivm(environment, linalg, die.name)
    if why := problem(hivm, linalg, die):
        raise StageError(why)
    return hivm


def _compile(
    variant: Variant, tiles: Tiles, dies: tuple[Die, ...], folder: Path, environment: Path
) -> Iterator[Stage]:
    name = f"{variant.op}-{variant.name}"
    for die in dies:
        file = f"{name}.{die.name}"
        try:
            linalg = linalg_of(variant, tiles, die, environment)
        except StageError as error:
            yield _stage(variant, die.name, L1, error=str(error))
            continue
        _write(folder / f"{file}.linalg.mlir", linalg.text)
        yield _stage(variant, die.name, L1, artefacts=(f"{file}.linalg.mlir",))
        try:
            hivm = hivm_of(linalg, die, environment)
        except StageError as error:
            yield _stage(variant, die.name, L2, error=str(error))
            continue
        _write(folder / f"{file}.hivm.mlir", hivm.text)
        cores = "cube and vector functions" if linalg.cube else "a vector function alone"
        yield _stage(
            variant,
            die.name,
            L2,
            artefacts=(f"{file}.hivm.mlir",),
            usage=hivm.usage,
            proves="; ".join([PROVES[L2], cores, *hivm.notes]),
        )


def _run(op: str, tiles: Tiles, chip: str, folder: Path, environment: Path) -> Stage:
    """Stage L3, once a chip: the linalg is the same for each of its dies."""
    if lacking := compilers.missing_numeric():
        return _numeric_stage(op, chip, error=f"not run: {lacking[0]}")
    judged = judge(op, environment, DIES[chip][0].name, tiles=tiles)
    file = f"{op}.x86.json"
    _write(folder / file, json.dumps([asdict(case) for case in judged], indent=1))
    failed = next((case for case in judged if case.problem), None)
    return _numeric_stage(
        op,
        chip,
        error=f"{failed.case}: {failed.problem}" if failed else None,
        artefacts=(file,),
        usage={"cases": len(judged)},
        deviation=max(case.error for case in judged),
    )


def _numeric_stage(op: str, chip: str, **found: Any) -> Stage:
    return Stage(
        op=op, implementation=IMPLEMENTATION, chip=chip, stage=L3, proves=PROVES[L3], **found
    )


def _stage(variant: Variant, die: str, stage: str, **found: Any) -> Stage:
    return Stage(
        op=variant.op,
        implementation=f"{IMPLEMENTATION} {variant.name}",
        chip=die,
        stage=stage,
        **{"error": None, "proves": PROVES[stage]} | found,
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
