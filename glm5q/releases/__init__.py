"""config.json of the published releases, for plans made before a checkpoint is at hand."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

NAMES = ("glm-5", "glm-5.1", "glm-5.2")


def raw_config(name: str) -> dict[str, Any]:
    """Returns the published config.json of one of NAMES. GLM-5.3 has GLM-5.2's shape."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text("utf-8")
    raw: dict[str, Any] = json.loads(text)
    return raw
