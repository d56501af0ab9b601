"""What a wrong text, tokenizer or chat template gets: one line with file and line, and a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import small
from tests.test_data import END, TEXT, VOCABULARY, jsonl, load, refusal


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    small.write_tokenizer(folder, VOCABULARY)
    return folder


GOOD = {"text": TEXT}
ROWS: dict[str, tuple[Any, str]] = {
    "cut off": ('{"text": "abc', "not JSON"),
    "no JSON": ("hello", "not JSON"),
    "trailing": ('{"text": "a"} {"text": "b"}', "not JSON"),
    "nested without end": ("[" * 100_000, "not JSON"),
    "a number too long": ('{"input_ids": [' + "9" * 5000 + "]}", "not JSON"),
    "a list": (["text"], "no 'text'"),
    "a string": ('"text"', "no 'text'"),
    "null": ("null", "no 'text'"),
    "another key": ({"content": "abc"}, "no 'text'"),
    "text a list": ({"text": ["abc"]}, "no 'text'"),
    "text null": ({"text": None}, "no 'text'"),
    "messages a string": ({"messages": "abc"}, "no 'text'"),
    "half a surrogate pair": ('{"text": "\\ud800"}', "not valid Unicode"),
    "id too large": ({"input_ids": [1, VOCABULARY]}, f"token id {VOCABULARY} is outside"),
    "id negative": ({"input_ids": [-1]}, "token id -1 is outside"),
    "id a float": ({"input_ids": [1.5]}, "1.5 is not a token id"),
    "id a text": ({"input_ids": ["1"]}, "1 is not a token id"),
    "id true": ({"input_ids": [True]}, "True is not a token id"),
    "ids nested": ({"input_ids": [[1, 2]]}, "[1, 2] is not a token id"),
    "messages not tables": ({"messages": ["hello"]}, "no 'role'"),
    "message without a role": ({"messages": [{"content": "hello"}]}, "no 'role'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_broken_row_is_named_by_line(root: Path, tmp_path: Path, case: str) -> None:
    row, says = ROWS[case]
    line = refusal(jsonl(tmp_path / "d.jsonl", GOOD, "", row, GOOD), root, length=50)
    assert f"{tmp_path}/d.jsonl:3: " in line
    assert says in line
    assert len(line) < 400


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "blank": (b"\n \n", "empty"),
    "binary": (bytes(range(256)), "not UTF-8 at byte 128"),
    "utf-16": ("hello".encode("utf-16"), "not UTF-8 at byte 0"),
    "gzip": (b"\x1f\x8b\x08\x00", "not UTF-8 at byte 1"),
    "short": (b"hello", "5 tokens, too few"),
}


@pytest.mark.parametrize("case", FILES)
def test_broken_file(root: Path, tmp_path: Path, case: str) -> None:
    content, says = FILES[case]
    file = tmp_path / "d.txt"
    file.write_bytes(content)
    line = refusal(file, root)
    assert line.startswith(f"{file}: ")
    assert says.replace("5 tokens", "6 tokens") in line


def test_what_is_no_file(root: Path, tmp_path: Path) -> None:
    assert "not a file" in refusal(tmp_path, root)
    assert "no such file" in refusal(tmp_path / "absent.jsonl", root)
    assert "cannot be read" in refusal(tmp_path / ("x" * 5000), root)


def _tokenizer_folder(tmp_path: Path, **files: str | None) -> Path:
    small.write_tokenizer(tmp_path, VOCABULARY)
    for name, content in files.items():
        file = tmp_path / name.replace("__", ".")
        file.unlink() if content is None else file.write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "missing"), ("{}", "not a tokenizer"), ("garbage", "not a tokenizer")],
)
def test_tokenizer_file(tmp_path: Path, content: str | None, says: str) -> None:
    folder = _tokenizer_folder(tmp_path, tokenizer__json=content)
    line = refusal(jsonl(tmp_path / "d.jsonl", GOOD), folder)
    assert "tokenizer.json" in line
    assert says in line


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    small.write_tokenizer(tmp_path, 400)
    line = refusal(jsonl(tmp_path / "d.jsonl", GOOD, {"text": chr(33 + 300)}), tmp_path, 44)
    assert "d.jsonl:2: token id 300 is outside the vocabulary of 256" in line
    assert "tokenizer.json does not belong to this checkpoint" in line


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template"),
        ("{% for %}", "not a Jinja template"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.nope.deeper }}", "UndefinedError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_broken_template(tmp_path: Path, template: str | None, says: str) -> None:
    folder = _tokenizer_folder(tmp_path, chat_template__jinja=template)
    rows = jsonl(tmp_path / "d.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    assert says in refusal(rows, folder)


def test_tokenizer_config_that_is_no_json(tmp_path: Path) -> None:
    folder = _tokenizer_folder(tmp_path, chat_template__jinja=None, tokenizer_config__json="{")
    line = refusal(
        jsonl(tmp_path / "d.jsonl", {"messages": [{"role": "a", "content": "b"}]}), folder
    )
    assert "tokenizer_config.json: not readable JSON" in line


@pytest.mark.parametrize("content", ["[]", "{", '{"eos_token_id": null}', '{"eos_token_id": []}'])
def test_odd_generation_configs_mean_no_end_token(tmp_path: Path, content: str) -> None:
    folder = _tokenizer_folder(tmp_path, generation_config__json=content)
    found = load(jsonl(tmp_path / "d.jsonl", GOOD, GOOD), folder)
    assert END not in found.tokens


def test_end_token_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = _tokenizer_folder(tmp_path, generation_config__json='{"eos_token_id": 9999}')
    assert "generation_config.json" in refusal(jsonl(tmp_path / "d.jsonl", GOOD), folder)
