"""Tables for people: an inspection, the list of recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from glm5q.types import Role
from glm5q.verify.report import Fit, Report
from recipes.schema import Recipe


def inspection(found: dict[str, Any], console: Console) -> None:
    """Prints what `pipeline.inspect` returned."""
    config = found["config"]
    console.print(Text(found["path"]))
    console.print(
        Text(
            f"{found['variant']}: {found['parameters']:,} parameters, {found['bytes']:,} bytes, "
            f"{found['tensors']:,} tensors"
        )
    )
    console.print(
        Text(
            f"{config['num_hidden_layers']} layers + {found['mtp_layers']} MTP, hidden "
            f"{config['hidden_size']}, {config['n_routed_experts']} experts top-"
            f"{config['num_experts_per_tok']}, indexer top-{config['index_topk']}"
        )
    )
    layers = Table("layers", "kind", "indexer", "bytes each", box=None)
    for span, row in _runs(found["layers"]):
        layers.add_row(span, row["kind"], row["indexer"], f"{row['bytes']:,}")
    console.print(layers)
    _bytes_table("role", found["bytes_by_role"], found["bytes"], console)
    _bytes_table("dtype", found["bytes_by_dtype"], found["bytes"], console)


def _runs(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Joins neighbouring layers that are alike: `3-77`."""
    joined: list[tuple[int, int, dict[str, Any]]] = []
    for row in rows:
        alike = joined and all(joined[-1][2][k] == row[k] for k in ("kind", "indexer", "bytes"))
        if alike:
            joined[-1] = (joined[-1][0], row["layer"], joined[-1][2])
        else:
            joined.append((row["layer"], row["layer"], row))
    return [(str(a) if a == b else f"{a}-{b}", row) for a, b, row in joined]


def _bytes_table(label: str, sizes: dict[str, int], total: int, console: Console) -> None:
    table = Table(label, "bytes", "share", box=None)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{size:,}", f"{size / total:.1%}")
    console.print(table)


def recipe_list(recipes: Sequence[Recipe], console: Console) -> None:
    """Prints one line a recipe."""
    table = Table("recipe", "target", "engine", "experts", "checked", box=None)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for recipe in recipes:
        experts = recipe.weights[Role.ROUTED_EXPERT].scheme().label()
        checked = recipe.verification.partition(";")[0]
        cells = (recipe.name, recipe.target, recipe.engine, experts, checked)
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)


def verification(report: Report, console: Console) -> None:
    """Prints a row a check, problems a line each, and the sizes of parallelism that fit."""
    console.print(Text(f"{report.root}: {report.format}"))
    table = Table("check", "", "found", box=None)
    for row in report.rows:
        table.add_row(Text(row.check), Text(row.status), Text(row.detail))
    console.print(table)
    if not report.parallel:
        return
    sizes = Table("engine", "devices", "devices, expert parallel", box=None)
    for engine in dict.fromkeys(fit.engine for fit in report.parallel):
        mine = [fit for fit in report.parallel if fit.engine == engine]
        cells = (_sizes([f for f in mine if f.expert_parallel is ep]) for ep in (False, True))
        sizes.add_row(Text(engine), *(Text(cell) for cell in cells))
    console.print(sizes)


def _sizes(fits: Sequence[Fit]) -> str:
    """`1, 2, 4, 8`, or why not even one device fits."""
    good = [str(fit.size) for fit in fits if fit.fits]
    return ", ".join(good) if good else f"none: {fits[0].why}"
