"""The replayed rules against what the engines' own matching functions answered.

data/resolved.json was made by running find_matched_target and should_ignore_layer of the vLLM and
SGLang wheels it names, taken out of their files, on each case's config and names: a group of the
config, null for unquantized, "refused" where the engine raises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5q.verify import ct_rules

DATA = json.loads((Path(__file__).parent / "data" / "resolved.json").read_text())
RULES = {"vllm": ct_rules.vllm, "sglang": ct_rules.sglang}


def answer(engine: str, config: dict[str, Any], name: str) -> str | None:
    try:
        found = RULES[engine](config, name)
    except ct_rules.RefusedError:
        return "refused"
    groups = config["config_groups"].items()
    return found and next(k for k, g in groups if ct_rules.claim(g, config["format"]) == found)


@pytest.mark.parametrize("engine", RULES)
@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["label"])
def test_same_answer_as_the_engine(engine: str, case: dict[str, Any]) -> None:
    for name, wanted in case[engine].items():
        assert answer(engine, case["config"], name) == wanted, name


def test_cases_have_every_kind_of_answer() -> None:
    answers = {a for case in DATA["cases"] for engine in RULES for a in case[engine].values()}
    assert answers == {None, "refused", "group_0", "group_1"}
