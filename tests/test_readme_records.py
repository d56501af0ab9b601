"""README's tables of accuracy say what the records in reports/baselines do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.peers import table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
MINUS = "−"


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "reports" / "baselines" / name).read_text())
    return found


def after(start: str) -> list[list[str]]:
    """The cells of the first table at or after the line that starts so, without its head."""
    rest = README[next(n for n, line in enumerate(README) if line.startswith(start)) :]
    first = next(n for n, line in enumerate(rest) if line.startswith("|"))
    end = next((n for n, line in enumerate(rest) if n > first and not line.startswith("|")), None)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest[first:end]]
    assert set(rows[1][0]) <= set("-:")
    return rows[2:]


def thousandths(mean: float, error: float, sign: str = "") -> str:
    return f"{1e3 * mean:{sign}.2f} ± {1e3 * error:.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


PEERS = {
    "Group 128:": ("peers-cpu.json", "g128"),
    "One scale a row:": ("peers-cpu.json", "channel"),
    "With 8 calibration windows": ("peers-cpu-8-windows.json", "g128"),
    "With a quarter of each MoE layer's experts made rare": ("peers-rare.json", "g128"),
    "A sibling of the embedded checkpoint": ("peers-sibling.json", "g128"),
}


def peers(name: str, group: str) -> dict[str, list[str]]:
    """Returns (KL, less `fast`, less `best`, top-1) by row's name, best first."""
    found = record(name)["rows"]
    rows = {r["name"].removesuffix(f" {group}"): r for r in found if r["name"].endswith(group)}
    cells: dict[str, list[str]] = {}
    for tool, row in sorted(rows.items(), key=lambda item: float(item[1]["kl_mean"])):
        cells[tool] = [thousandths(row["kl_mean"], row["kl_se"])]
        for own in ("glm5q fast", "glm5q best"):
            difference = table.paired(row["window_kl"], rows[own]["window_kl"])
            less = thousandths(difference.mean, difference.standard_error, "+")
            cells[tool].append("" if tool == own else less)
        cells[tool].append(percent(row["top1_agreement"]))
    return cells


@pytest.mark.parametrize("start", PEERS)
def test_peers(start: str) -> None:
    shown = {
        row[0].removesuffix(" *").replace(", positive scales", " positive"): [*row[1:4], row[-1]]
        for row in after(start)
    }
    expected = peers(*PEERS[start])
    assert shown == expected
    assert list(shown) == list(expected)


VARIANTS = {
    "plain rounding with clip search": "rtn",
    "GPTQ alone": "gptq-alone",
    "GPTQ with guidance, no descent": "guidance-alone",
    "GPTQ + 2 rounds of descent = `fast`": "fast",
    "`fast` without clip search": "no-clip-search",
    "`fast` without activation order": "no-act-order",
    "`fast` without pooling": "no-pooling",
    "`fast` without ridge": "no-ridge",
    "`fast` + `correction`": "correction",
    "`fast` + `inner`": "inner",
    "`best` without `inner`": "best-no-inner",
    "`best` without `correction`": "best-no-correction",
    "`best`: 4 rounds, guidance, `correction`, `inner`": "best",
}


@pytest.mark.parametrize("recipe", ["h200", "atlas-800t-a3"])
def test_ablation(recipe: str) -> None:
    found = record(f"ablation-{recipe}.json")
    (metric,) = (one for one in found["metrics"] if one["key"] == "kl_mean")
    cells = dict(zip(found["runs"], metric["cells"], strict=True))
    shown = after(f"| variant (`{recipe}`")
    assert len(shown) > 4
    for label, kl, against in shown:
        cell = cells[VARIANTS[label]]
        assert kl == f"{cell['value']:.4f}"
        if label.endswith("= `fast`"):
            assert against == ""
            continue
        delta, low, high = (f"{cell[key]:+.4f}" for key in ("delta", "low", "high"))
        assert against == f"{delta} ({low} to {high})".replace("-", MINUS)


def test_budget() -> None:
    found = record("budget-cpu.json")
    runs = {f"{run['bytes']:,}": run for run in found["runs"]}
    against = {pair["run"]: pair for pair in found["pairs"]}
    shown = after("| recipe | weights | bytes |")
    assert {row[2] for row in shown} == set(runs)
    for recipe, weights, nbytes, kl, less, top1 in shown:
        run = runs[nbytes]
        assert run["name"].startswith(recipe.split(",")[0].strip("`"))
        assert kl == thousandths(run["kl_mean"], run["kl_error"])
        assert top1 == percent(run["top1_agreement"])
        if not weights.startswith("budget"):
            assert less == ""
            continue
        pair = against[run["name"]]
        change = f"({100 * (pair['ratio'] - 1):+.0f} %)"
        difference = thousandths(pair["difference"], pair["error"], "+")
        assert less == f"{difference} {change}".replace("-", MINUS)


def test_caches_and_topk() -> None:
    effects = record("effects-cpu.json")["effects"]
    caches = {f"{one['part']}, {one['grid']}": one for one in effects["caches"]}
    shown = after("| rounded alone |")
    assert [row[0] for row in shown] == list(caches)
    for label, kl, nbytes, plain in shown:
        cache = caches[label]
        assert kl == thousandths(cache["kl"], cache["kl_error"])
        assert [nbytes, plain] == [str(cache["nbytes"]), str(cache["plain_nbytes"])]
    shown = after("| `index_topk` |")
    for (k, share, mass, kl, flop), point in zip(shown, effects["sweep"], strict=True):
        assert k.removesuffix(", its own") == str(point["k"])
        assert share == f"{round(200 * point['share']) / 2:g} %"
        assert mass == percent(point["attention_mass"])
        own = k.endswith("its own")
        assert kl == ("0" if own else thousandths(point["kl"], point["kl_error"]))
        assert flop == f"{point['flop'] / 1e6:.1f}"


def test_stages_of_a_layer() -> None:
    found = record("calibrate-h200.json")
    one, two = found["result"], found["two_gpus"]["two"]
    *stages, last = after("| stage | one GPU |")
    for row, mine, theirs in zip(stages, one["stages"], two["stages"], strict=True):
        assert mine["stage"] == theirs["stage"]
        assert mine["stage"] in row[0]
        times = (mine["time_s"], mine["floor_s"], theirs["time_s"])
        assert row[1:] == [f"{time_s:.1f}" for time_s in times]
    whole = [f"{one['layer_s']:.1f}", f"{one['floor_s']:.1f}", f"{two['layer_s']:.1f}"]
    assert [cell.strip("*") for cell in last[1:]] == whole
