"""Gather permissively licensed text, train the byte-level BPE and split whole files.

The text itself is not kept in the repository. Unpack the documentation packages of Debian 12
(python3.11-doc, postgresql-doc-15, python-django-doc, sqlite3-doc, apache2-doc, llvm-14-doc,
python-sqlalchemy-doc, nodejs-doc, rust-doc) below ``--docs``, point ``--site`` at folders that hold
installed packages (see PACKAGES), and run

    python -m glm5q.tiny.collect --docs DIR --site DIR [DIR ...] --out DIR

Written below ``--out``: ``tokenizer.json``, ``train.npy.xz`` and ``heldout.npy`` (uint16 tokens,
files separated by token 0), ``train_text.jsonl``, ``heldout_text.jsonl`` and ``data.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import io
import json
import lzma
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4032
SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
DOCS = (
    # part of the path, name, licence, ending, most bytes taken
    ("python3.11", "python documentation", "PSF-2.0", ".rst.txt", 12_000_000),
    ("postgresql-doc", "postgresql documentation", "PostgreSQL", ".html", 12_000_000),
    ("django-doc", "django documentation", "BSD-3-Clause", ".html", 8_000_000),
    ("/sqlite3/", "sqlite documentation", "public domain", ".html", 10_000_000),
    ("apache2-doc/manual/en", "apache httpd documentation", "Apache-2.0", ".html", 8_000_000),
    ("llvm-14-doc", "llvm documentation", "Apache-2.0 WITH LLVM-exception", ".rst.txt", 8_000_000),
    ("sqlalchemy-doc/html", "sqlalchemy documentation", "MIT", ".html", 8_000_000),
    ("/nodejs/", "nodejs documentation", "MIT", ".html", 6_000_000),
    *(
        (f"rust-doc/html/{book}/", "rust books", "MIT OR Apache-2.0", ".html", 10_000_000)
        for book in (
            "book",
            "reference",
            "nomicon",
            "rust-by-example",
            "cargo",
            "rustc",
            "edition-guide",
            "embedded-book",
            "rustdoc",
        )
    ),
)
PACKAGES = (
    # name, licence, most bytes taken
    ("scipy", "BSD-3-Clause", 16_000_000),
    ("numpy", "BSD-3-Clause", 6_000_000),
    ("sklearn", "BSD-3-Clause", 12_000_000),
    ("pandas", "BSD-3-Clause", 14_000_000),
    ("django", "BSD-3-Clause", 8_000_000),
    ("networkx", "BSD-3-Clause", 4_000_000),
    ("sympy", "BSD-3-Clause", 14_000_000),
    ("transformers", "Apache-2.0", 10_000_000),
    ("torch", "BSD-3-Clause", 18_000_000),
)
SKIPPED_PARTS = {
    "test",
    "tests",
    "testing",
    "idlelib",
    "lib2to3",
    "locale",
    "__pycache__",
    "encodings",
    "_vendor",
    "ensurepip",
}


class _Text(html.parser.HTMLParser):
    """Visible text of a page; block elements end a line."""

    BLOCK = frozenset(
        {"p", "div", "pre", "li", "h1", "h2", "h3", "h4", "tr", "dt", "dd", "br", "table"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.hidden += tag in {"script", "style", "head"}
        self.pre += tag == "pre"
        if tag in self.BLOCK:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in {"script", "style", "head"}
        self.pre -= tag == "pre"
        if tag in self.BLOCK:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.pre else " ".join(data.split("\n")))


def html_text(page: str) -> str:
    """The visible text of a page, at most one blank line in a row."""
    parser = _Text()
    parser.feed(page)
    lines, blank = [], 0
    for line in "".join(parser.parts).split("\n"):
        blank = 0 if line.strip() else blank + 1
        if blank < 2:
            lines.append(line.rstrip())
    return "\n".join(lines).strip()


def sources(docs: Path, sites: list[Path]) -> Iterator[tuple[str, str, Path, int]]:
    """(source, licence, file, byte limit of the source) of every candidate file."""
    for path in sorted(docs.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        for part, name, licence, ending, limit in DOCS:
            if part in str(path) and path.name.endswith(ending):
                yield name, licence, path, limit
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield "python standard library", "PSF-2.0", path, 12_000_000
    for name, licence, limit in PACKAGES:
        for site in sites:
            for path in sorted((site / name).rglob("*.py")):
                yield name, licence, path, limit


def gather(docs: Path, sites: list[Path]) -> list[dict[str, str]]:
    """Shuffled files of 1 to 400 KB; a file whose long lines were mostly seen before is dropped."""
    candidates = list(sources(docs, sites))
    random.Random(0).shuffle(candidates)
    taken: dict[str, int] = {}
    seen: set[int] = set()
    files = []
    for source, licence, path, limit in candidates:
        if SKIPPED_PARTS & set(path.parts[-6:-1]) or path.name.startswith("test_"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        text = html_text(text) if path.suffix == ".html" else text
        text = text.replace("\r\n", "\n").strip() + "\n"
        size = len(text.encode())
        if not 1_000 <= size <= 400_000 or taken.get(source, 0) + size > limit:
            continue
        lines = {hash(s) for line in text.split("\n") if len(s := line.strip()) > 30}
        if len(lines) < 8 or len(lines & seen) > 0.3 * len(lines):
            continue
        seen |= lines
        taken[source] = taken.get(source, 0) + size
        files.append({"source": source, "licence": licence, "name": path.name, "text": text})
    return files


def train_bpe(texts: list[str]) -> Tokenizer:
    """Byte-level BPE in which every digit is its own token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts in order, token 0 after each: uint16 [tokens]."""
    parts = []
    for start in range(0, len(texts), 256):
        for item in tokenizer.encode_batch(texts[start : start + 256], add_special_tokens=False):
            parts.append(np.asarray([*item.ids, 0], dtype=np.uint16))
    return np.concatenate(parts)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--site", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="file to take instead of training one")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = gather(args.docs, args.site)
    sides: dict[str, list[dict[str, str]]] = {"train": [], "heldout": []}
    for file in files:
        digest = int(hashlib.sha1(file["text"].encode()).hexdigest(), 16)
        sides["heldout" if digest % 40 == 0 else "train"].append(file)
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_bpe([f["text"] for f in sides["train"][::3]])
    tokenizer.save(str(args.out / "tokenizer.json"))
    data: dict[str, object] = {}
    for side, chosen in sides.items():
        tokens = encode(tokenizer, [f["text"] for f in chosen])
        if side == "train":
            buffer = io.BytesIO()
            np.save(buffer, tokens)
            (args.out / "train.npy.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=1))
        else:
            np.save(args.out / "heldout.npy", tokens)
        with (args.out / f"{side}_text.jsonl").open("w") as handle:
            handle.writelines(json.dumps(f) + "\n" for f in chosen)
        data[side] = {
            "files": len(chosen),
            "tokens": int(tokens.size),
            "bytes": sum(len(f["text"].encode()) for f in chosen),
        }
    by_source: dict[str, dict[str, object]] = {}
    for file in files:
        entry = by_source.setdefault(file["source"], {"licence": file["licence"], "bytes": 0})
        entry["bytes"] = int(str(entry["bytes"])) + len(file["text"].encode())
    data["sources"] = by_source
    (args.out / "data.json").write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
