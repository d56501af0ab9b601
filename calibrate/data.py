"""Text to windows of token ids: seeded, hashed, packed without padding."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from calibrate import chat
from glm5q.errors import DataError

MINIMUM_WINDOWS = 4


@dataclass(frozen=True)
class Windows:
    """Packed text: `tokens` int64 [windows, sequence_length], cut from `documents` documents."""

    name: str
    tokens: Tensor
    documents: int
    seed: int

    @property
    def content_hash(self) -> str:
        """Hash of the token ids and their shape; the same text packed otherwise differs."""
        digest = hashlib.sha256(str(list(self.tokens.shape)).encode())
        digest.update(self.tokens.contiguous().numpy().data)
        return digest.hexdigest()

    def take(self, start: int, stop: int) -> Windows:
        return replace(self, tokens=self.tokens[start:stop])


def load_windows(
    path: Path, checkpoint: Path, vocab_size: int, sequence_length: int, windows: int, seed: int
) -> Windows:
    """Returns at most `windows` windows of `sequence_length` tokens from a JSONL or text file.

    JSONL lines hold `text`, `messages` (through the checkpoint's chat template) or `input_ids`;
    anything else is one plain text. Documents are shuffled by `seed`, joined by the end-of-sequence
    token and cut without padding; the ragged end is dropped. Raises DataError naming file and line.
    """
    tokenize = _Tokenize(checkpoint, vocab_size)
    rows = list(_rows(path))
    random.Random(seed).shuffle(rows)
    stream: list[int] = []
    used = 0
    for row in rows:
        if len(stream) >= windows * sequence_length:
            break
        document = tokenize.row(row)
        if document:
            stream.extend(document)
            stream.extend(tokenize.end)
            used += 1
    count = min(windows, len(stream) // sequence_length)
    if count < min(MINIMUM_WINDOWS, windows):
        raise DataError(
            f"{path}: {len(stream)} tokens, too few for {min(MINIMUM_WINDOWS, windows)} windows of "
            f"{sequence_length}",
            "give more text or a smaller --sequence-length",
        )
    tokens = torch.tensor(stream[: count * sequence_length], dtype=torch.int64)
    return Windows(path.name, tokens.view(count, sequence_length), used, seed)


@dataclass(frozen=True)
class _Row:
    """One document as its file has it; `where` is file and line."""

    where: str
    kind: Literal["text", "messages", "input_ids"]
    content: Any
    tools: Any = None


def _rows(path: Path) -> Iterator[_Row]:
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: not a file", "give one JSONL or plain text file with --data")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", "give JSONL or plain text with --data") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}", "convert the file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})", "check the file") from None
    if not text.strip():
        raise DataError(f"{path}: empty", "give a file with text")
    if path.suffix not in (".jsonl", ".json"):
        yield _Row(str(path), "text", text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _row(line, f"{path}:{number}")


def _row(line: str, where: str) -> _Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})", "mend or delete the line") from None
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return _Row(where, "text", row["text"])
        if isinstance(row.get("messages"), list):
            if not all(isinstance(m, dict) and "role" in m for m in row["messages"]):
                raise DataError(f"{where}: a message has no 'role'", "mend or delete the line")
            return _Row(where, "messages", row["messages"], row.get("tools"))
        if isinstance(row.get("input_ids"), list):
            return _Row(where, "input_ids", row["input_ids"])
    raise DataError(
        f"{where}: no 'text' (a string), 'messages' or 'input_ids' (lists)",
        "give one of them on every line",
    )


class _Tokenize:
    """The checkpoint's own tokenizer and chat template."""

    def __init__(self, checkpoint: Path, vocab_size: int) -> None:
        self._root, self._vocab_size = checkpoint, vocab_size
        file = checkpoint / "tokenizer.json"
        if not file.exists():
            raise DataError(f"{file}: missing", "put the model's tokenizer beside its weights")
        self._file = file
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{file}: not a tokenizer ({error})", "fetch it again") from None
        self.end = self._end_of_sequence()
        self._template: Any = None

    def row(self, row: _Row) -> list[int]:
        """Returns the document's token ids."""
        if row.kind == "input_ids":
            return self._checked(row.content, row.where, "give ids of this checkpoint's tokenizer")
        text = row.content if row.kind == "text" else self._rendered(row)
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeError):  # half of a surrogate pair, which JSON can spell
            raise DataError(f"{row.where}: not valid Unicode", "mend or delete the line") from None
        fix = f"{self._file} does not belong to this checkpoint"
        return self._checked(ids, row.where, fix)

    def _rendered(self, row: _Row) -> str:
        if self._template is None:
            self._template = chat.load(self._root)
        try:
            text = self._template.render(messages=row.content, tools=row.tools)
        except Exception as error:  # whatever a template does wrong
            raise DataError(
                f"{row.where}: the chat template fails on these messages "
                f"({type(error).__name__}: {error})",
                "mend the line, or give 'text'",
            ) from None
        return str(text)

    def _checked(self, ids: list[Any], where: str, fix: str) -> list[int]:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise DataError(f"{where}: {str(token)[:40]} is not a token id", fix)
            if not 0 <= token < self._vocab_size:
                raise DataError(
                    f"{where}: token id {token} is outside the vocabulary of {self._vocab_size}",
                    fix,
                )
        return ids

    def _end_of_sequence(self) -> list[int]:
        for name in ("generation_config.json", "config.json"):
            try:
                value = json.loads((self._root / name).read_text(encoding="utf-8"))["eos_token_id"]
            except (OSError, ValueError, LookupError, TypeError):
                continue
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, int):
                fix = "its eos_token_id does not belong to this checkpoint"
                return self._checked([first], str(self._root / name), fix)
        return []
