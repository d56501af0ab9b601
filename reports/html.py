"""RunRecord to one self-contained HTML page: templates, styles and scripts become one file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from pydantic import BaseModel

from reports import text, view
from reports.record import RunRecord

_SCRIPTS = (
    "core", "tables", "strips", "curves", "layers", "experts", "indexer", "budget", "report",
)  # fmt: skip
_STYLES = ("base", "verdict", "charts", "tables")


def render(record: RunRecord) -> str:
    """Returns the whole page. Needs no network: a policy in the page itself forbids it."""
    return fill("report.html.j2", {"record": record}, view.page_data(record), _SCRIPTS)


def write_page(record: RunRecord, path: Path) -> None:
    """Writes the page, whole or not at all."""
    write_text(path, render(record))


def write_text(path: Path, content: str) -> None:
    """Writes UTF-8 by rename, so that no half page is ever seen."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def fill(template: str, values: dict[str, Any], data: Any, scripts: tuple[str, ...]) -> str:
    """Returns `template` rendered with `values`; `data` is what its `scripts` draw from.

    The script's hash goes into the page's Content-Security-Policy, so nothing that a record holds
    can ever run, even if escaping failed.
    """
    code = _script(scripts)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode("ascii")
    return (
        _environment()
        .get_template(template)
        .render(
            **values,
            number=_number_in(values),
            signed=_number_in(values, text.signed),
            view=view,
            styles=Markup(_styles()),
            script=Markup(code),
            script_hash=digest,
            data=view.packed({"data": data, "strings": _script_strings()}),
        )
    )


def resolve(root: Any, path: str) -> Any:
    """The value at `path`, such as `record/accuracy/layers/3/kl`."""
    value = root
    for step in path.split("/"):
        if isinstance(value, dict):
            value = value[step]
        elif isinstance(value, list | tuple):
            value = value[int(step)]
        else:
            value = getattr(value, step)
    return value


def _plainly(value: float, form: str) -> str:
    return text.FORMATS[form](value)


def _number_in(
    values: dict[str, Any], shown: Callable[[float, str], str] = _plainly
) -> Callable[[str, str], Markup]:
    """Returns `number(path, format)`, which shows a value and where it stands in the record."""

    def number(path: str, form: str) -> Markup:
        value = resolve(values, path)
        if value is None:
            return Markup('<span class="none">—</span>')
        return Markup('<data value="{}" data-path="{}" data-form="{}">{}</data>').format(
            repr(value), path, form, shown(value, form)
        )

    return number


@cache
def _strings() -> dict[str, tuple[str, str]]:
    raw = json.loads(_read("strings.json"))
    return {key: (english, chinese) for key, (english, chinese) in raw.items()}


def _script_strings() -> dict[str, tuple[str, str]]:
    return {key: both for key, both in _strings().items() if key.startswith("js.")}


def translate(key: str, **values: Any) -> Markup:
    """Both languages, one of which the page's style hides; `values` fill {names}, escaped."""
    english, chinese = _strings()[key]
    safe = {name: escape(value) for name, value in values.items()}
    return Markup('<span lang="en">{}</span><span lang="zh-CN">{}</span>').format(
        Markup(english).format(**safe), Markup(chinese).format(**safe)
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        time=text.seconds, decade=text.decade, size=text.size, thousands=text.count
    )
    environment.filters["yaml"] = _yaml
    environment.globals["t"] = translate
    environment.globals["has_text"] = _strings().__contains__
    return environment


def _yaml(value: Any) -> str:
    """A recipe's content as YAML that `glm5q recipes validate` takes."""
    content = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


@cache
def _read(name: str) -> str:
    return (files("reports") / "templates" / name).read_text(encoding="utf-8")


@cache
def _styles() -> str:
    return "\n".join([_read("vendor/uPlot.min.css"), *(_read(f"css/{n}.css") for n in _STYLES)])


@cache
def _script(names: tuple[str, ...]) -> str:
    own = "\n".join(_read(f"js/{name}.js") for name in names)
    return f'{_read("vendor/uPlot.iife.min.js")}\n(async () => {{\n"use strict";\n{own}\n}})();\n'
