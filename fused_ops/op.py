"""An op, its implementations, and the choice among them. Reading the tables imports no torch.

Implementations stand in the order they are preferred; the first that fits runs, and every other one
is answered for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from glm5q.errors import UserError

# op -> "module:attribute" of its Op
OPS: dict[str, str] = {
    "lightning_indexer": "fused_ops.lightning_indexer.contract:OP",
    "select_topk": "fused_ops.lightning_indexer.contract:TOPK",
    "sparse_attention": "fused_ops.sparse_attention.contract:OP",
    "expert_gemm": "fused_ops.expert_gemm.contract:OP",
    "expert_swiglu": "fused_ops.expert_gemm.contract:SWIGLU",
}


Tiles = Mapping[str, int]  # sizes an implementation is launched with, by its constants' names


class UnsupportedOp(UserError):  # noqa: N818 - named for what it says, not for being an exception
    """No implementation runs what was asked on this target."""


@dataclass(frozen=True)
class Limit:
    """The whole numbers a dimension may take: minimum to maximum, in steps of `multiple`."""

    minimum: int = 0
    maximum: int | None = None
    multiple: int = 1

    def refuse(self, name: str, value: int) -> str | None:
        """Returns why `value` is outside, or None."""
        if value < self.minimum:
            return f"{name} {value} is below {self.minimum}"
        if self.maximum is not None and value > self.maximum:
            return f"{name} {value} is above {self.maximum}"
        if value % self.multiple:
            return f"{name} {value} is no multiple of {self.multiple}"
        return None


@dataclass(frozen=True)
class Cost:
    """What a call needs whatever runs it: `flop` (a multiply-add is two) and compulsory `bytes`."""

    flop: int
    bytes: int

    def floor_s(self, ops_s: float, bytes_s: float) -> float:
        """Returns the least seconds on a chip that does `ops_s` and moves `bytes_s`."""
        return max(self.flop / ops_s, self.bytes / bytes_s)


@dataclass(frozen=True)
class OpRequest:
    """A call to be made: sizes by name, the dtype by the op's own name for it, features it uses."""

    op: str
    dtype: str
    shape: Mapping[str, int]
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Implementation:
    """One way to run an op, named by string so that the table is readable without it.

    `entry` and `prepare` are "module:function"; `entry` takes the reference's arguments. `prepare`
    turns an op's weights into what `entry` wants, once. `allows` takes an OpRequest and returns
    None or why not, for what `limits` cannot say. `available` is "module:function" with an
    argument after a second colon if it has one; it returns None or why this machine cannot run it.
    `targets` are the chips it is for, by name; None: every one of its kinds. `tuned` names the
    tables of a recipe's `tiles` that `entry` takes: keyword -> table; `prepare` takes "tiles" too.
    """

    name: str
    entry: str
    kinds: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str]
    limits: Mapping[str, Limit] = field(default_factory=dict)
    prepare: str | None = None
    allows: str | None = None
    available: str | None = None
    targets: frozenset[str] | None = None
    tuned: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, request: OpRequest, kind: str, target: str | None = None) -> str | None:
        """Returns why this cannot run `request` on a target of `kind`, or None.

        `target` is the chip's name; without it only `available` tells chips of a kind apart.
        """
        if kind not in self.kinds:
            return f"is for {', '.join(sorted(self.kinds))}, not {kind}"
        if target is not None and self.targets is not None and target not in self.targets:
            return f"is for {', '.join(sorted(self.targets))}, not {target}"
        if request.dtype not in self.dtypes:
            return f"has no {request.dtype}"
        if missing := request.features - self.features:
            return f"lacks {', '.join(sorted(missing))}"
        for name, limit in self.limits.items():
            if name in request.shape and (why := limit.refuse(name, request.shape[name])):
                return why
        if self.allows is not None and (why := resolve(self.allows)(request)):
            return str(why)
        return self.unavailable()

    def unavailable(self) -> str | None:
        """Returns why this machine cannot run it at all, or None."""
        if self.available is None:
            return None
        module, function, *arguments = self.available.split(":")
        answer: str | None = getattr(import_module(module), function)(*arguments)
        return answer

    def tuning(self, tiles: Mapping[str, Tiles]) -> dict[str, Tiles]:
        """Returns the arguments for `entry` that a recipe's `tiles` has, by keyword."""
        return {keyword: tiles[table] for keyword, table in self.tuned.items() if table in tiles}


@dataclass(frozen=True)
class Op:
    """`error_multiple`: dtype -> how many times plain torch's own error is allowed."""

    name: str
    summary: str
    reference: str
    cost: str
    cases: str
    limits: Mapping[str, Limit]
    features: frozenset[str]
    error_multiple: Mapping[str, float]
    implementations: tuple[Implementation, ...]


@dataclass(frozen=True)
class Choice:
    """The implementation that runs, and (name, why not) of every other, in table order."""

    request: OpRequest
    chosen: Implementation
    refused: tuple[tuple[str, str], ...]


def resolve(entry: str) -> Callable[..., Any]:
    """Returns the function a "module:function" string names."""
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def load(name: str) -> Op:
    """Returns the op. Raises UserError for a name that is not in OPS."""
    if name not in OPS:
        raise UserError(f"{name}: no such op", f"use one of {', '.join(OPS)}")
    module, _, attribute = OPS[name].partition(":")
    op: Op = getattr(import_module(module), attribute)
    return op


def cost(request: OpRequest) -> Cost:
    """Returns what `request` costs at least, by the op's own formula."""
    result: Cost = resolve(load(request.op).cost)(request.shape, request.dtype)
    return result


def choose(request: OpRequest, kind: str, target: str | None = None) -> Choice:
    """Returns what runs `request` on a target of `kind`, or on `target` of that kind.

    Raises UnsupportedOp with all reasons.
    """
    op = load(request.op)
    for name, limit in op.limits.items():
        if name in request.shape and (why := limit.refuse(name, request.shape[name])):
            raise UnsupportedOp(f"{op.name}: {why}, outside the op's own limits")
    chosen: Implementation | None = None
    refused: list[tuple[str, str]] = []
    for implementation in op.implementations:
        why = implementation.refuse(request, kind, target)
        if chosen is not None:
            why = why or f"fits too, {chosen.name} is preferred"
            refused.append((implementation.name, why))
        elif why:
            refused.append((implementation.name, why))
        else:
            chosen = implementation
    if chosen is None:
        reasons = "; ".join(f"{name} {why}" for name, why in refused)
        raise UnsupportedOp(f"{op.name}: nothing runs it on {kind}: {reasons}")
    return Choice(request, chosen, tuple(refused))
