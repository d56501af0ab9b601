"""`glm5q ablate`: what each calibration step is worth, switched one at a time on the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from calibrate.states import Progress, silent
from glm5q.pipeline.calibrate import calibrate
from glm5q.pipeline.calibrate_options import CalibrateOptions
from recipes import files
from reports import comparison

Change = Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]

# name -> what it does to (the routed experts' plan, the fast steps, the best steps)
VARIANTS: dict[str, Change] = {
    "fast": lambda _plan, _fast, _best: None,
    "rtn": lambda plan, _fast, _best: plan.update(_rounding(plan)),
    "gptq-alone": lambda _plan, fast, _best: fast.update(descent=0, guidance=False),
    "no-clip-search": lambda plan, _fast, _best: plan.update(clip={"steps": 1, "lowest": 1.0}),
    "no-act-order": lambda plan, _fast, _best: plan.update(act_order=False),
    "no-pooling": lambda plan, _fast, _best: plan.update(pooling=0.0),
    "guidance-alone": lambda _plan, fast, _best: fast.update(descent=0, guidance=True),
    "token-cap": lambda _plan, fast, _best: fast.update(token_cap=True),
    "up-down": lambda plan, fast, _best: fast.update(up_down=_alphas(plan)),
    "smooth": lambda _plan, fast, _best: fast.update(smooth=[0.5]),
    "inner": lambda _plan, fast, _best: fast.update(inner=True),
    "correction": lambda _plan, fast, _best: fast.update(correction=True),
    "no-ridge": lambda plan, _fast, _best: plan.update(ridge=0.0),
    "positive-scales": lambda plan, fast, _best: _positive(plan, fast, {}),
    "best": lambda _plan, fast, best: fast.update(best),
    "best-no-top-up": lambda _plan, fast, best: fast.update(best, top_up=None),
    "best-no-inner": lambda _plan, fast, best: fast.update(best, inner=False),
    "best-no-correction": lambda _plan, fast, best: fast.update(best, correction=False),
    "best-positive-scales": lambda plan, fast, best: _positive(plan, fast, best),
}
ROUNDING_KEYS = ("bits", "group_size", "scale_dtype", "activation", "clip")


def ablate(options: CalibrateOptions, progress: Progress = silent) -> comparison.Comparison:
    """Returns every variant of `options.recipes[0]` against its fast tier, intervals in pairs.

    Writes each variant's recipe, checkpoint and record into `options.output`.
    """
    recipe = options.recipes[0]
    folder = options.output / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    variants = [_variant(recipe, name, folder) for name in VARIANTS]
    runs = options.output / "runs"
    finished = calibrate(replace(options, recipes=tuple(variants), output=runs), progress)
    return comparison.compare([one.run for one in finished], list(VARIANTS))


def _positive(plan: dict[str, Any], fast: dict[str, Any], steps: dict[str, Any]) -> None:
    plan["clip"] = plan["clip"] | {"signed": False}
    fast.update(steps)


def _alphas(plan: dict[str, Any]) -> list[float]:
    """What up_down tries; nothing beside a static activation scale, which rules it out."""
    return [] if plan.get("activation") == "fp8_static" else [0.25, 0.5]


def _rounding(plan: dict[str, Any]) -> dict[str, Any]:
    """Turns a plan into plain rounding with the same scale search."""
    kept = {key: plan[key] for key in ROUNDING_KEYS}
    plan.clear()
    return kept | {"method": "rtn"}


def _variant(recipe: str, name: str, folder: Path) -> str:
    raw = yaml.safe_load(files.text(recipe))
    efforts = raw["efforts"]
    VARIANTS[name](raw["weights"]["routed_expert"], efforts["fast"], efforts["best"])
    raw["name"] = name
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return str(file)
