"""What a target is: a frozen description of one chip, and the choice of implementations for it.

A description says where each figure comes from. `TARGETS` is the whole list; a module is imported
only when its chip is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from glm5q.errors import UserError

if TYPE_CHECKING:
    from fused_ops.op import Choice, OpRequest

# press: a named page or file says it; hearsay: commonly said, and nobody is known to have said it
Grade = Literal["measured", "vendor", "press", "hearsay", "unknown"]
Kind = Literal["cpu", "cuda", "ascend", "declared"]
Answer = Literal["yes", "no", "unknown"]
Verification = Literal["run", "lowered", "declared"]

# name a recipe uses -> module whose CHIPS holds it
TARGETS: dict[str, str] = {
    "cpu": "targets.cpu",
    "h200": "targets.cuda",
    "h20": "targets.cuda",
    "a100": "targets.cuda",
    "rtx-4090": "targets.cuda",
    "ascend-910b": "targets.ascend.chips",
    "ascend-910c": "targets.ascend.chips",
    "mthreads-s5000": "targets.declared",
    "cambricon-mlu590": "targets.declared",
    "kunlunxin-p800": "targets.declared",
    "metax-c500": "targets.declared",
    "enflame-s60": "targets.declared",
    "hygon-bw1000": "targets.declared",
}


@dataclass(frozen=True)
class Figure:
    """A number with its origin. `value` is None where none is known (`grade` "unknown")."""

    value: float | None
    grade: Grade
    source: str


@dataclass(frozen=True)
class Support:
    """Whether a chip's matrix product takes a dtype, and who says so."""

    answer: Answer
    source: str


UNKNOWN = Figure(None, "unknown", "no source found")


@dataclass(frozen=True)
class Target:
    """One chip, one device of it.

    `weights` and `activations` map a dtype name (bf16, int8, int4, fp8) to whether the chip's own
    matrix product, as we lower it, takes that operand; a dtype that is not listed is unknown.
    `memory_bytes` a device, `bandwidth_bytes_s` of its main memory, `peak_ops_s` dense operations a
    second by operand dtype (a multiply-add is two). `verification` is what of ours was done on it:
    "run" tested there, "lowered" taken by its own compiler as far as that is open and never run,
    "declared" neither.
    """

    name: str
    title: str
    kind: Kind
    verification: Verification
    weights: Mapping[str, Support]
    activations: Mapping[str, Support]
    memory_bytes: Figure
    bandwidth_bytes_s: Figure
    peak_ops_s: Mapping[str, Figure]
    notes: tuple[str, ...] = field(default=())

    def support(self, dtype: str) -> Support:
        """Returns the better of what weights and activations say about `dtype`."""
        found = [table[dtype] for table in (self.weights, self.activations) if dtype in table]
        for answer in ("yes", "unknown", "no"):
            for support in found:
                if support.answer == answer:
                    return support
        return Support("unknown", "no source found")

    def choose(self, request: OpRequest) -> Choice:
        """Returns what runs `request` on this chip, and why each other implementation does not."""
        from fused_ops.op import choose

        return choose(request, self.kind, self.name)


def load(name: str) -> Target:
    """Returns the target a recipe names. Raises UserError for a name that is not in TARGETS."""
    if name not in TARGETS:
        raise UserError(f"{name}: no such target", f"use one of {', '.join(TARGETS)}")
    chips: dict[str, Target] = import_module(TARGETS[name]).CHIPS
    return chips[name]


def check_recipe_dtypes(target: str, wanted: set[str]) -> list[str]:
    """Returns one line for each wanted dtype the target is known to lack; empty if it has all."""
    chip = load(target)
    return [
        f"{chip.title} has no {dtype}: {support.source}"
        for dtype in sorted(wanted)
        if (support := chip.support(dtype)).answer == "no"
    ]


def unverified_recipe_dtypes(target: str, wanted: set[str]) -> list[str]:
    """Returns one line for each wanted dtype that is allowed but that nobody could confirm."""
    chip = load(target)
    return [
        f"{chip.title}: {dtype} is not confirmed ({support.source})"
        for dtype in sorted(wanted)
        if (support := chip.support(dtype)).answer == "unknown"
    ]
