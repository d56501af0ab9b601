"""Text to windows: nothing lost, padded or invented, whatever the file is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calibrate.data import Windows, load_windows
from glm5q.errors import DataError
from tests import small

VOCABULARY = 256
END = 0
TEXT = "".join(chr(33 + i) for i in range(1, 90))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token a character (chr(33 + id)); 0 ends a document."""
    folder = tmp_path_factory.mktemp("tokenizer")
    small.write_tokenizer(folder, VOCABULARY)
    return folder


def jsonl(path: Path, *rows: Any) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load(path: Path, root: Path, length: int = 8, windows: int = 100, seed: int = 0) -> Windows:
    return load_windows(path, root, VOCABULARY, length, windows, seed)


def refusal(path: Path, root: Path, length: int = 8) -> str:
    with pytest.raises(DataError) as refused:
        load(path, root, length)
    line = str(refused.value)
    assert "\n" not in line
    assert ";" in line, f"no fix is offered: {line}"
    return line


def ids(text: str) -> list[int]:
    return [ord(character) - 33 for character in text]


# Packing


documents_of_ids = st.lists(
    st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=40), min_size=1, max_size=30
)


@given(documents_of_ids, st.integers(1, 24), st.integers(1, 12), st.integers(0, 5))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_windows_are_whole_documents_in_a_row(
    root: Path, tmp_path: Path, documents: list[list[int]], length: int, windows: int, seed: int
) -> None:
    """No padding, no token twice, no token between documents but the end of sequence."""
    file = jsonl(tmp_path / "d.jsonl", *({"input_ids": document} for document in documents))
    everything = sum(len(document) + 1 for document in documents)
    if everything // length < min(4, windows):
        assert "too few" in refusal(file, root, length) or windows < 4
        return
    found = load(file, root, length, windows, seed)
    assert found.tokens.dtype == torch.int64
    assert found.tokens.shape == (min(windows, everything // length), length)
    left = [[*document, END] for document in documents]
    stream = found.tokens.flatten().tolist()
    used = 0
    while stream:
        head = next(d for d in left if d[: len(stream)] == stream[: len(d)])
        left.remove(head)
        stream = stream[len(head) :]
        used += 1
    assert used <= found.documents  # more may lie in the ragged end


def test_seed_and_hash(root: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "d.jsonl", *({"text": TEXT[i : i + 20]} for i in range(60)))
    one, again, other = load(file, root), load(file, root), load(file, root, seed=1)
    assert torch.equal(one.tokens, again.tokens)
    assert one.content_hash == again.content_hash
    assert one.content_hash != other.content_hash
    assert sorted(one.tokens.flatten().tolist()) != one.tokens.flatten().tolist()
    reshaped = Windows(one.name, one.tokens.view(-1, 4), one.documents, 0)
    assert reshaped.content_hash != one.content_hash
    assert one.take(0, 3).content_hash != one.content_hash


def test_one_document_longer_than_all_windows(root: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "d.jsonl", {"text": TEXT * 1000})
    found = load(file, root, length=16, windows=5)
    assert found.tokens.flatten().tolist() == ids(TEXT * 1000)[:80]


def test_text_only_as_needed_is_tokenized(root: Path, tmp_path: Path) -> None:
    rows = [{"text": TEXT} for _ in range(50)]
    assert load(jsonl(tmp_path / "d.jsonl", *rows), root, windows=4).documents == 1


def test_empty_documents_leave_no_trace(root: Path, tmp_path: Path) -> None:
    full = [{"text": TEXT}]
    empty = [{"text": ""}, {"input_ids": []}, {"messages": []}]
    found = load(jsonl(tmp_path / "d.jsonl", *empty, *full, *empty), root)
    assert found.tokens.flatten().tolist() == [*ids(TEXT), END][:88]
    assert found.documents == 1
    assert "0 tokens" in refusal(jsonl(tmp_path / "e.jsonl", *empty), root)


# Kinds of file


def test_plain_text_is_one_document(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "d.txt"
    file.write_text(TEXT)
    assert load(file, root).tokens.flatten().tolist() == ids(TEXT)[:88]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_line_ends_and_marks_of_other_systems(root: Path, tmp_path: Path, name: str) -> None:
    rows = [{"text": TEXT[i : i + 30]} for i in range(40)]
    plain = load(jsonl(tmp_path / "plain.jsonl", *rows), root)
    lines = "\r\n".join(json.dumps(row) for row in rows) + "\r\n\r\n"
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert torch.equal(load(file, root).tokens, plain.tokens)


def test_unicode_line_separators_do_not_end_a_row(root: Path, tmp_path: Path) -> None:
    text = TEXT + "\u2028\x85\u00b5" * 3
    row = json.dumps({"text": text}, ensure_ascii=False)
    found = load(jsonl(tmp_path / "d.jsonl", row), root)
    assert found.tokens.numel() == 96


def test_messages_go_through_the_template(root: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "yes"}]
    rendered = f"user: {TEXT}\nassistant: yes\n"
    found = load(jsonl(tmp_path / "d.jsonl", {"messages": messages}), root)
    as_text = load(jsonl(tmp_path / "t.jsonl", {"text": rendered}), root)
    assert torch.equal(found.tokens, as_text.tokens)


def test_input_ids_are_taken_as_they_are(root: Path, tmp_path: Path) -> None:
    values = list(range(1, 101))
    found = load(jsonl(tmp_path / "d.jsonl", {"input_ids": values}), root)
    assert found.tokens.flatten().tolist() == values[:96]


TEMPLATES = {
    "tools as GLM writes them": (
        "{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}{% endfor %}"
        "{{ messages[0].content }}",
        {"tools": [{"name": "<é>"}]},
        '{"name": "<é>"}hello',
    ),
    "loop control": (
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", {}, "hello",
    ),
    "no tools": ("{% if tools %}bad{% endif %}{{ messages[0].content }}", {}, "hello"),
    "special tokens": ("{{ bos_token }}{{ eos_token }}", {}, "<b><e>"),
}  # fmt: skip


@pytest.mark.parametrize("place", ["file", "config", "named"])
@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_as_transformers_runs_them(tmp_path: Path, case: str, place: str) -> None:
    from transformers import PreTrainedTokenizerFast

    template, extra, wanted = TEMPLATES[case]
    small.write_tokenizer(tmp_path, 512)
    config: dict[str, Any] = {"bos_token": "<b>", "eos_token": {"content": "<e>"}}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        (tmp_path / "chat_template.jinja").unlink()
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
        config["chat_template"] = template if place == "config" else named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    row = {"messages": [{"role": "user", "content": "hello"}], **extra}
    found = load_windows(jsonl(tmp_path / "d.jsonl", row), tmp_path, 512, 1, 100, 0)
    text = "".join(chr(33 + token) for token in found.tokens.flatten().tolist()[:-1])
    assert text == wanted.replace(" ", "!")  # the unknown character's token
    file = str(tmp_path / "tokenizer.json")
    library: Any = PreTrainedTokenizerFast
    judge = library(tokenizer_file=file, bos_token="<b>", eos_token="<e>")
    rendered = judge.apply_chat_template(
        row["messages"], tools=extra.get("tools"), chat_template=template, tokenize=False
    )
    assert rendered == wanted
