"""What `glm5q plan` says calibration takes of main memory, against what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glm5q.config import parse_config
from recipes import files
from targets import base
from targets.plan import calibration
from tests import small
from tests.test_memory import MB, cheap_recipe, small_run
from tests.warm import Warm

NARROW = small.GLM5 | {"num_nextn_predict_layers": 0}
WIDE = NARROW | {"hidden_size": 768, "moe_intermediate_size": 512, "n_routed_experts": 24}


def planned(raw: dict[str, Any], recipe: Path) -> int:
    loaded = files.load(str(recipe))
    plan = loaded.calibration.model_copy(update={"windows": 4, "sequence_length": 64})
    asked = loaded.model_copy(update={"calibration": plan})
    return sum(calibration.needs(parse_config(raw), asked, base.load("cpu"), 0).cpu.values())


def test_main_memory_is_what_was_planned(tmp_path: Path) -> None:
    """A wide checkpoint beside a narrow one, so that the interpreter does not count."""
    recipe = cheap_recipe(tmp_path / "cheap.yaml")
    with Warm(tmp_path, MALLOC_MMAP_THRESHOLD_="131072") as warm:
        taken = [
            small_run(tmp_path / n, raw, recipe, warm).peak_bytes
            for n, raw in (("a", NARROW), ("b", WIDE))
        ]
    expected = planned(WIDE, recipe) - planned(NARROW, recipe)
    print(f"MB taken {(taken[1] - taken[0]) / MB:.0f}, planned {expected / MB:.0f}")
    assert taken[1] - taken[0] == pytest.approx(expected, rel=0.25)
