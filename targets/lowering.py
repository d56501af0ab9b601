"""What lowering an op for a target gives: a stage's outcome, its artefacts, what it does not prove.

Each target's own module makes them; `glm5q lower` prints them and writes the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """One stage of one op's lowering for one chip.

    `artefacts` are paths within the output folder. `usage` is on-chip memory or registers by name,
    in bytes unless the name says otherwise. `error` is None where the stage passed, else the
    compiler's own line. `deviation` is the largest relative error of a stage that computes, None of
    others. `proves` says in words what a pass shows, and what it does not.
    """

    op: str
    implementation: str
    chip: str
    stage: str
    error: str | None
    artefacts: tuple[str, ...] = ()
    usage: Mapping[str, int] = field(default_factory=dict)
    proves: str = ""
    deviation: float | None = None
