"""Recipes from YAML, the package's own by name: read without surprises, errors on one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from glm5q.errors import RecipeError
from glm5q.types import Role
from recipes.checks import problems
from recipes.schema import Recipe

EXAMPLE = "`glm5q recipes show h200` prints one to compare with"


def shipped() -> list[str]:
    """Returns the names of the recipes in the package."""
    folder = resources.files(__package__)
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def load(name_or_path: str) -> Recipe:
    """Returns a shipped recipe by name, or one from a file. Raises RecipeError on one line."""
    if name_or_path in shipped():
        return parse(text(name_or_path), f"recipes/{name_or_path}.yaml")
    return unverified(parse(text(name_or_path), name_or_path))


def unverified(recipe: Recipe) -> Recipe:
    """Returns `recipe`; if it is a shipped one with changes, what was checked of that is unsaid.

    A shipped recipe's copy is known by its name, or by the words of its `verification`. What a
    recipe of somebody's own says there is said to be theirs; a chip nobody saw stays declared.
    """
    own = {name: parse(text(name), f"recipes/{name}.yaml") for name in shipped()}
    same_words = [n for n, other in own.items() if other.verification == recipe.verification]
    origin = recipe.name if recipe.name in own else next(iter(same_words), None)
    renamed = recipe if origin is None else recipe.model_copy(update={"name": origin})
    if origin is None:
        return recipe.model_copy(update={"verification": _own_words(recipe, own)})
    if renamed.content_hash() == own[origin].content_hash():
        return recipe
    declared = "declared; " if own[origin].verification.startswith("declared") else ""
    words = f"{declared}edited from {origin}; not verified"
    return recipe.model_copy(update={"verification": words})


def _own_words(recipe: Recipe, own: Mapping[str, Recipe]) -> str:
    if recipe.verification.startswith("declared"):
        return recipe.verification
    same_chip = [other for other in own.values() if other.target == recipe.target]
    unseen = all(other.verification.startswith("declared") for other in same_chip)
    return f"{'declared; ' if unseen else ''}its author says: {recipe.verification}"


def text(name_or_path: str) -> str:
    """Returns the YAML of a shipped recipe or of a file. Raises RecipeError."""
    if name_or_path in shipped():
        return resources.files(__package__).joinpath(f"{name_or_path}.yaml").read_text("utf-8")
    path = Path(name_or_path)
    known = f"give a YAML file or one of {', '.join(shipped())}"
    try:
        if not path.is_file():
            raise RecipeError(f"{name_or_path}: no such recipe", known)
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})", known) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would let win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} twice", problem_mark=node.start_mark
                )
        return dict(super().construct_mapping(node, deep=deep))


def parse(text: str, where: str) -> Recipe:
    """Returns the recipe in YAML `text`; `where` names it in errors."""
    try:
        raw = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise RecipeError(f"{where}: nested too deeply", EXAMPLE) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{where}:{line} not YAML ({problem})", "mend that line") from None
    return validated(raw, where)


def validated(raw: object, where: str) -> Recipe:
    """Returns the recipe in what YAML gave; `where` names it in errors. Raises RecipeError."""
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: not a recipe", EXAMPLE)
    try:
        recipe = Recipe.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        raise RecipeError(f"{where}: {_first(error)}", EXAMPLE) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: {error}", "use texts, numbers, lists and tables") from None
    for problem, fix in problems(recipe):
        raise RecipeError(f"{where}: {problem}", fix)
    return recipe


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        message = "unknown key"
    if first["type"] == "enum" and ("weights" in place or "role" in place):
        message = f"unknown role; roles are {', '.join(Role)}"
    if isinstance(first["input"], str) and _is_number(first["input"]):
        message += " (YAML takes 1e-2 for text and 0.01 for a number)"
    return f"{place}: {message}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
