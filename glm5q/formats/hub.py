"""What a model hub wants to know of a checkpoint: whose it is, under which licence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a hub client's cache folder
PUBLISHER = "zai-org"  # of GLM-5, 5.1 and 5.2, each under its own name, with -FP8 for that form
_PUBLISHED = re.compile(r"GLM-5(\.\d+)?(-(FP8|BF16))?")


@dataclass(frozen=True)
class Origin:
    """A source checkpoint's name on the hub and its licence; None where it does not say."""

    base_model: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


def origin(root: Path, raw_config: Mapping[str, Any]) -> Origin:
    """Returns what the folder's place, config.json and README.md say of where it is from."""
    stated = front_matter(root / "README.md")
    keys = ("license", "license_name", "license_link")
    licence = {key: stated[key] for key in keys if isinstance(stated.get(key), str)}
    return Origin(_hub_name(root, raw_config), **licence)


def front_matter(file: Path) -> dict[str, Any]:
    """Returns the YAML between the first two `---` lines of a README; empty if it has none."""
    try:
        head, _, rest = file.read_text(encoding="utf-8").partition("\n")
        block, found, _ = rest.partition("\n---")
        raw = yaml.safe_load(block) if head.strip() == "---" and found else None
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
        return {}  # a README is for people: one that no program can read is no fault of the weights
    return raw if isinstance(raw, dict) else {}


def _hub_name(root: Path, raw_config: Mapping[str, Any]) -> str | None:
    """`owner/name` by the cache folder, by the config, or by GLM-5's own published names."""
    folder = root.resolve()
    for part in reversed(folder.parts):
        if cached := _CACHED.fullmatch(part):
            return f"{cached[1]}/{cached[2]}"
    named = raw_config.get("_name_or_path")
    if isinstance(named, str) and _NAME.fullmatch(named) and named.split("/")[0] != "models":
        return named
    return published(folder.name)


def published(folder: str) -> str | None:
    """Returns the hub name of a folder named as GLM-5's publisher names it; None for others."""
    return f"{PUBLISHER}/{folder}" if _PUBLISHED.fullmatch(folder) else None
