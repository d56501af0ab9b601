"""Long-range documents: facts stated early and asked late, and passages repeated.

A window is real text with planted pieces. Weights tell the loss what matters: 0 for what nobody
can know (the value in a fact), 1 for ordinary tokens, `ANSWER` for the digits of an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

ANSWER = 4
DIGITS = 4
FACTS = (
    ("\nThe code of", " is ", ".\n"),
    ("\nNote: the number of", " is ", ".\n"),
    ("\n# code of", " = ", "\n"),
    ("\nRemember", " as ", ".\n"),
    ("\n    set code for", " to ", "\n"),
)
ASKS = (
    ("\nThe code of", " is ", ".\n"),
    ("\nQuestion: what is the code of", "? Answer: ", ".\n"),
    ("\n# code of", " = ", "\n"),
    ("\nRecall", " as ", ".\n"),
    ("\n    assert code for", " == ", "\n"),
)
REPEAT = "\n\nRepeated from above:\n"


@dataclass
class Planter:
    """Plants pieces into token windows; every piece is encoded once."""

    tokenizer: Tokenizer
    cache: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        vocab = self.tokenizer.get_vocab()
        self.words = sorted(w[1:] for w in vocab if re.fullmatch("Ġ[a-z]{4,9}", w))
        newline = {i for w, i in vocab.items() if "Ċ" in w}
        self.is_newline = np.zeros(self.tokenizer.get_vocab_size(), dtype=bool)
        self.is_newline[list(newline)] = True

    def ids(self, text: str) -> list[int]:
        """Tokens of a piece that starts at a boundary of the pre-tokenizer."""
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.cache[text]

    def keys(self, rng: np.random.Generator, count: int) -> list[str]:
        """Different words, each with a two-digit number."""
        words = rng.choice(len(self.words), count, replace=False)
        numbers = rng.integers(10, 100, count)
        return [f" {self.words[w]}-{n}" for w, n in zip(words, numbers, strict=True)]

    def sentence(self, form: tuple[str, str, str], key: str, value: str) -> tuple[list[int], int]:
        """Tokens of a sentence and where its value starts."""
        head = self.ids(form[0]) + self.key_ids(key) + self.ids(form[1])
        return head + [self.ids(d)[0] for d in value] + self.ids(form[2]), len(head)

    def key_ids(self, key: str) -> list[int]:
        """Tokens of a key, put together from the word and the digits."""
        word, number = key.split("-")
        return self.ids(word) + self.ids("-") + [self.ids(d)[0] for d in number]

    def places(self, text: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Fractions [n] of the text -> the next line starts [n]."""
        starts = np.flatnonzero(self.is_newline[text]) + 1
        at = (wanted * len(text)).astype(np.int64)
        if len(starts) == 0:
            return at
        return starts[np.minimum(np.searchsorted(starts, at), len(starts) - 1)]

    def facts(
        self, text: np.ndarray, length: int, rng: np.random.Generator, count: int, spread: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """A window with `count` facts, each asked once: tokens [length], weights [length].

        spread "far": facts in the first quarter, questions in the last; "any": all distances;
        "block": the facts in one run, the questions in another.
        """
        keys = self.keys(rng, count)
        first = rng.uniform(0, {"far": 0.25, "any": 0.8, "block": 0.0}[spread], count)
        last = rng.uniform(0.75, 1, count) if spread == "far" else rng.uniform(first + 0.02, 1)
        if spread == "block":
            first[:], last[:] = np.sort(rng.uniform(0, 1, 2))
        said, asked = [], []
        for key in keys:
            value = f"{rng.integers(10**DIGITS):0{DIGITS}d}"
            said.append(self.sentence(FACTS[rng.integers(len(FACTS))], key, value))
            asked.append(self.sentence(ASKS[rng.integers(len(ASKS))], key, value))
        room = length - sum(len(s[0]) for s in said + asked)
        text = text[:room]
        pieces = [(p, 0, *s) for p, s in zip(self.places(text, first), said, strict=True)]
        pieces += [(p, 1, *s) for p, s in zip(self.places(text, last), asked, strict=True)]
        order = rng.permutation(len(pieces))
        return self.weave(text, sorted((pieces[i] for i in order), key=lambda p: (p[0], p[1])))

    @staticmethod
    def weave(
        text: np.ndarray, pieces: list[tuple[int, int, list[int], int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Text with pieces put in at their places; kind 0 fact, 1 question, 2 neither."""
        tokens: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        at = 0
        for place, kind, ids, value in pieces:
            tokens += [text[at:place], np.asarray(ids, dtype=text.dtype)]
            weight = np.ones(len(ids), dtype=np.uint8)
            if kind < 2:
                weight[value : value + DIGITS] = ANSWER if kind else 0
            weights += [np.ones(max(0, place - at), dtype=np.uint8), weight]
            at = max(at, place)
        tokens.append(text[at:])
        weights.append(np.ones(len(text) - at, dtype=np.uint8))
        return np.concatenate(tokens), np.concatenate(weights)

    def copies(
        self, text: np.ndarray, length: int, rng: np.random.Generator, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A window in which `count` earlier passages come again: tokens and weights [length]."""
        spans = rng.integers(24, max(25, min(200, length // (3 * count))), count)
        head = self.ids(REPEAT)
        text = text[: length - int(spans.sum()) - count * len(head)]
        pieces = []
        for span in spans:
            begin = int(self.places(text, rng.uniform(0, 0.5, 1))[0])
            begin = min(begin, len(text) // 2)
            after = (begin + span) / len(text)
            place = int(self.places(text, rng.uniform(min(after, 0.98), 1, 1))[0])
            again = head + text[begin : begin + span].tolist()
            pieces.append((max(place, begin + int(span)), 2, again, 0))
        tokens, weights = self.weave(text, sorted(pieces, key=lambda p: p[0]))
        return tokens[:length], weights[:length]

    def window(
        self, text: np.ndarray, rng: np.random.Generator, planted: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """A training window of len(text) tokens; a share `planted` has far pieces."""
        length = len(text)
        kind = rng.uniform()
        if kind < 0.75 * planted:
            count = int(rng.integers(max(2, length // 512), max(4, length // 80)))
            spread = ("far", "any", "block")[rng.integers(3)]
            return self.facts(text, length, rng, count, spread)
        if kind < planted:
            return self.copies(text, length, rng, int(rng.integers(2, 3 + length // 512)))
        return text, np.ones(length, dtype=np.uint8)

    def question_window(
        self, text: np.ndarray, rng: np.random.Generator, distance: int, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Facts asked exactly `distance` tokens later: tokens [T], answer starts [count].

        text holds 2 T tokens.
        """
        length = len(text) // 2
        keys = self.keys(rng, count)
        values = [f"{rng.integers(10**DIGITS):0{DIGITS}d}" for _ in keys]
        out: list[int] = []
        used = 0
        gap = (min(distance, length - distance) - 40) // count - 20
        starts = []
        for key, value in zip(keys, values, strict=True):
            ids, at = self.sentence(FACTS[rng.integers(len(FACTS))], key, value)
            out += text[used : used + gap].tolist()
            used += gap
            starts.append(len(out) + at)
            out += ids
        for key, value, start in zip(keys, values, starts, strict=True):
            ids, at = self.sentence(ASKS[rng.integers(len(ASKS))], key, value)
            fill = start + distance - at - len(out)
            if fill < 0:
                raise ValueError(f"questions overlap: {fill}")
            out += text[used : used + fill].tolist()
            used += fill
            out += ids
        out += text[used : used + length].tolist()
        return np.asarray(out[:length], dtype=text.dtype), np.asarray(starts) + distance
