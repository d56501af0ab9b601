"""A checkpoint's chat template, with the names and filters that transformers gives templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm5q.errors import DataError

OUGHT = "give 'text' lines, or a checkpoint with chat_template.jinja"


def load(root: Path) -> Template:
    """Returns the template in `root`. Raises DataError where there is none or it does not parse."""
    file, source = _source(root)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, **_special_tokens(root)}
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DataError(f"{file}: not a Jinja template ({error})", OUGHT) from None


def _source(root: Path) -> tuple[Path, str]:
    file = root / "chat_template.jinja"
    try:
        if file.exists():
            return file, file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error})", OUGHT) from None
    template = _tokenizer_config(root).get("chat_template")
    if isinstance(template, list):  # several by name
        named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    if not isinstance(template, str):
        raise DataError(f"{root}: no chat template, and the data has 'messages'", OUGHT)
    return root / "tokenizer_config.json", template


def _tokenizer_config(root: Path) -> dict[str, Any]:
    file = root / "tokenizer_config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: not readable JSON ({error})", "fetch it again") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(root: Path) -> dict[str, str]:
    found = {}
    for key, value in _tokenizer_config(root).items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML and takes no `ensure_ascii`, which GLM's template passes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
