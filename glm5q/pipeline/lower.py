"""`glm5q lower`: which implementation runs each op on a target, compiled before it is asked for."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fused_ops import build
from fused_ops.op import OpRequest, Tiles, UnsupportedOp, load
from glm5q.errors import UserError
from glm5q.pipeline import describe
from glm5q.types import Role
from glm5q.writer import write_error
from recipes import files, schema
from targets import base, shapes
from targets.lowering import Stage

PACKAGES = ("glm5q", "torch", "triton")


@dataclass(frozen=True)
class Row:
    """What of ours runs one request on the target, or None where only an engine's kernel does.

    `not_here`: why this machine cannot run it, or None. `refused` is (name, why not) of every other
    implementation, in the op's order.
    """

    request: OpRequest
    chosen: str | None
    not_here: str | None
    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Lowered:
    """The choice for each request and every stage of the compilers; `output` holds artefacts."""

    target: str
    rows: tuple[Row, ...]
    stages: tuple[Stage, ...]
    output: Path | None
    tiles: str = ""  # whose tiles the kernels have; empty where there is but one set

    @property
    def ok(self) -> bool:
        return not any(stage.error for stage in self.stages)

    def as_json(self) -> dict[str, Any]:
        rows = [
            asdict(row)
            | {"request": {**asdict(row.request), "features": sorted(row.request.features)}}
            for row in self.rows
        ]
        stages = [asdict(stage) for stage in self.stages]
        return {
            "target": self.target, "ok": self.ok, "tiles": self.tiles, "ops": rows,
            "stages": stages,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Returns the table for people."""
        lines = []
        for row in self.rows:
            shape = " ".join(f"{name}={size}" for name, size in row.request.shape.items())
            lines.append(f"{row.request.op} {row.request.dtype} {shape}")
            here = f" (not on this machine: {row.not_here})" if row.not_here else ""
            lines.append(f"  {row.chosen or 'nothing of ours':<18} runs{here}")
            lines += [f"  {name:<18} no: {why}" for name, why in row.refused]
        for stage in self.stages:
            used = ", ".join(f"{name} {size:,}" for name, size in stage.usage.items())
            outcome = f"FAILED: {stage.error}" if stage.error else f"ok {used}".rstrip()
            lines.append(
                f"{stage.chip}: {stage.op} {stage.implementation}, {stage.stage}: {outcome}"
            )
        failed = sum(stage.error is not None for stage in self.stages)
        if self.stages:
            tiles = f"; tiles: {self.tiles}" if self.tiles else ""
            passed = f"{len(self.stages) - failed} of {len(self.stages)} stages passed"
            lines.append(passed + tiles)
        proofs = dict.fromkeys(stage.proves for stage in self.stages if stage.proves)
        return [*lines, *(f"A pass shows: {text}" for text in proofs)]


def lower(
    target: str,
    recipe: str | None = None,
    output: Path | None = None,
    setup: bool = False,
    environment: Path | None = None,
) -> Lowered:
    """Returns the choice and the compilers' outcome for GLM-5's ops on `target`.

    Dtypes and tiles are the recipe's where one is given. Artefacts and manifest.json go to
    `output`, a new folder; compiled code stays in the user's cache either way. Raises UserError,
    UnsupportedOp among them where nothing of ours runs any op there.
    """
    chip = base.load(target)
    if setup and chip.kind != "ascend":
        raise UserError("--setup: only Ascend targets have compilers of their own", "leave it out")
    wanted = files.load(recipe) if recipe else None
    rows = tuple(choose(request, chip) for request in requests(chip.kind, wanted))
    if not any(row.chosen for row in rows):
        raise unsupported(rows[0], chip)
    tiles, whose = tiles_for(chip, wanted, recipe)
    environment = environment or build.cache_folder() / "ascend"
    if setup:
        from targets.ascend import environment as compilers

        compilers.setup(environment)
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            stages = _compile(chip, rows, Path(folder), environment, tiles)
            return Lowered(target, rows, stages, None, whose)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise UserError(f"{output}: not empty", "give a new folder")
        stages = _compile(chip, rows, output, environment, tiles)
        lowered = Lowered(target, rows, stages, output, whose)
        manifest = json.dumps(_manifest(lowered), indent=1) + "\n"
        (output / "manifest.json").write_text(manifest, encoding="utf-8")
    except OSError as error:
        raise write_error(output, error) from None
    return lowered


def requests(kind: str, recipe: schema.Recipe | None) -> tuple[OpRequest, ...]:
    """Returns GLM-5's requests for a kind of target, experts in the recipe's number formats."""
    asked = shapes.DEFAULTS.get(kind, shapes.GLM5_CUDA)
    if recipe is None:
        return asked
    dtype, group = expert_dtype(recipe)
    found = [
        request
        if request.op != "expert_gemm"
        else replace(request, dtype=dtype, shape={**request.shape, "group": group})
        for request in asked
    ]
    kept: list[OpRequest] = []
    for request in found:  # two widths of one shape become one
        if request not in kept:
            kept.append(request)
    return tuple(kept)


def expert_dtype(recipe: schema.Recipe) -> tuple[str, int]:
    """Returns (dtype, group) of expert_gemm under the recipe; group 0 is per channel."""
    plan = recipe.weights[Role.ROUTED_EXPERT]
    if isinstance(plan, schema.Keep):
        return "bf16", 0
    if isinstance(plan, schema.Fp8):
        return "fp8+fp8", 0
    activation = (plan.activation or "bf16").removesuffix("_static")
    return f"int{plan.bits}+{activation}", plan.group_size or 0


def tiles_for(
    chip: base.Target, recipe: schema.Recipe | None, given: str | None
) -> tuple[Mapping[str, Tiles], str]:
    """Returns (the tiles for `chip`'s kernels, whose they are in words); none: the launches' own.

    `given` is the recipe as it was asked for: a copy that was edited keeps its name.

    A recipe's are for its own chip, or, of Ascend, whose cores are alike, for its kind.
    """
    if chip.kind not in ("cuda", "ascend"):
        return {}, ""
    if recipe is None or not recipe.tiles:
        return {}, "the launches' own"
    if recipe.target == chip.name or chip.kind == base.load(recipe.target).kind == "ascend":
        return recipe.tiles, f"{given}'s"
    return {}, f"the launches' own, as {given}'s are for {recipe.target}"


def choose(request: OpRequest, chip: base.Target) -> Row:
    """Returns what runs `request` on `chip`, whether or not this machine is one."""
    kind, chosen, not_here, refused = chip.kind, None, None, []
    for implementation in load(request.op).implementations:
        why = replace(implementation, available=None).refuse(request, kind, chip.name)
        if why is None and chosen is None:
            chosen, not_here = implementation.name, implementation.unavailable()
            if not_here and kind == "cpu":  # the target is this machine
                chosen, why = None, not_here
        elif why is None:
            why = f"fits too, {chosen} is preferred"
        if chosen != implementation.name:
            refused.append((implementation.name, why or ""))
    return Row(request, chosen, not_here, tuple(refused))


def unsupported(row: Row, chip: base.Target) -> UnsupportedOp:
    """Returns the error of a row that nothing of ours runs, with all reasons."""
    request, reasons = row.request, "; ".join(f"{name} {why}" for name, why in row.refused)
    return UnsupportedOp(f"{request.op} {request.dtype}: nothing runs it on {chip.kind}: {reasons}")


def _compile(
    chip: base.Target,
    rows: tuple[Row, ...],
    folder: Path,
    environment: Path,
    tiles: Mapping[str, Tiles],
) -> tuple[Stage, ...]:
    if chip.kind == "cpu":
        from targets import lower_cpu

        return lower_cpu.lower(folder)
    if chip.kind == "ascend":
        from targets.ascend import lower as ascend

        return ascend.lower(chip.name, folder, environment, tiles)
    if describe.package_version("triton") == "not installed":
        raise UserError("triton is not installed", "pip install glm5q[triton]")
    from targets import lower_cuda

    compiled = tuple(
        (row.request, row.chosen) for row in rows if row.chosen and row.chosen != "eager"
    )
    found: tuple[Stage, ...] = lower_cuda.lower(chip.name, compiled, folder, tiles)
    return found


def _manifest(lowered: Lowered) -> dict[str, Any]:
    assert lowered.output is not None
    stages: Mapping[str, list[Stage]] = {}
    for stage in lowered.stages:
        for file in stage.artefacts:
            stages = {**stages, file: [*stages.get(file, []), stage]}
    artefacts = [
        {
            "file": file,
            "sha256": hashlib.sha256((lowered.output / file).read_bytes()).hexdigest(),
            "bytes": (lowered.output / file).stat().st_size,
            "ops": sorted({stage.op for stage in made}),
            "implementations": sorted({stage.implementation for stage in made}),
            "constants": dict(made[0].usage),
        }
        for file, made in stages.items()
    ]
    versions = {package: describe.package_version(package) for package in PACKAGES}
    versions["c++"] = build.compiler_version() or "none found"
    return {"created": describe.now(), "versions": versions, "files": artefacts} | lowered.as_json()
