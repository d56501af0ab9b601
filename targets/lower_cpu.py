"""`glm5q lower` for CPUs: the C++ of every instruction set, compiled into the user's cache."""

from __future__ import annotations

import shutil
from pathlib import Path

from fused_ops import build
from fused_ops.op import OPS, load
from targets.lowering import Stage


def lower(folder: Path) -> tuple[Stage, ...]:
    """Compiles the library, copies it to `folder`, and returns a stage an op and instruction set.

    An instruction set that this CPU lacks is compiled and not run; its stage says so.
    """
    try:
        file = build.library_file()
    except build.CannotBuild as problem:
        return (Stage("all", "cpp", "cpu", "c++", str(problem)),)
    shutil.copyfile(file, folder / file.name)
    stages = []
    for op in OPS:
        for implementation in load(op).implementations:
            if not implementation.name.startswith("cpp-"):
                continue
            why = implementation.unavailable()
            proves = (
                f"compiled; {why}, so not run here" if why else "compiled, and this CPU runs it"
            )
            stages.append(
                Stage(op, implementation.name, "cpu", "c++", None, (file.name,), proves=proves)
            )
    return tuple(stages)
