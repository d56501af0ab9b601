"""A shipped recipe with changes doesn't inherit what was checked of the shipped one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5q import pipeline
from recipes import files, schema
from reports import html
from reports.card import model_card
from tests.runs import small_run


def edited(folder: Path, shipped: str, name: str | None = None, **changes: Any) -> schema.Recipe:
    """The recipe in a file made from a shipped one's text, with other values by key."""
    raw = yaml.safe_load(files.text(shipped)) | changes
    raw["name"] = name or shipped
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return files.load(str(file))


@pytest.mark.parametrize("shipped", files.shipped())
def test_a_copy_keeps_what_was_checked(tmp_path: Path, shipped: str) -> None:
    assert edited(tmp_path, shipped) == files.load(shipped)
    renamed = edited(tmp_path, shipped, name="mine")
    assert renamed.verification == files.load(shipped).verification


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("shipped", files.shipped())
def test_a_change_loses_it(tmp_path: Path, shipped: str, name: str | None) -> None:
    plan = yaml.safe_load(files.text(shipped))["calibration"] | {"seed": 17}
    found = edited(tmp_path, shipped, name, calibration=plan)
    words = f"edited from {shipped}; not verified"
    assert found.verification.removeprefix("declared; ") == words
    # What was only ever declared is not less so for being edited.
    was_declared = files.load(shipped).verification.startswith("declared")
    assert found.verification.startswith("declared") is was_declared


def test_ones_own_words_are_kept_as_ones_own(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"verification": "served for a week", "mtp": "quantize"}
    own = edited(tmp_path, "h200", "mine", **changes)
    assert own.verification == "its author says: served for a week"
    unseen = edited(tmp_path, "atlas-800t-a3", "mine", **changes)
    assert unseen.verification == "declared; its author says: served for a week"


def test_it_is_said_in_record_page_card_and_readme(tmp_path: Path) -> None:
    (finished,) = pipeline.calibrate(small_run(tmp_path))
    words = "edited from h200; not verified"
    assert finished.run.recipe is not None
    assert finished.run.recipe.verification == words
    assert words in html.render(finished.run).split('<section id="accuracy"')[0]
    assert f"> **{words}.**" in model_card(finished.run)
    assert words[1:] in (finished.checkpoint / "README.md").read_text(encoding="utf-8")
    shipped_words = files.load("h200").verification
    assert shipped_words not in finished.page.read_text(encoding="utf-8")


def test_another_format_is_not_the_one_that_was_checked(tmp_path: Path) -> None:
    asked = replace(small_run(tmp_path), recipes=("cpu",), format="modelslim")
    kept = replace(asked, format="compressed-tensors")
    from glm5q.pipeline.calibrate import _adjusted

    cpu = files.load("cpu")
    assert _adjusted(cpu, asked).verification == "edited from cpu; not verified"
    assert _adjusted(cpu, kept).verification == cpu.verification
