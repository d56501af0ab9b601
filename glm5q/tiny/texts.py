"""Calibration and held-out documents that ship with the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from glm5q.tiny.recall import Planter

SHIPPED = {
    "python documentation": "prose",
    "sqlite documentation": "prose",
    "python standard library": "code",
}
LARGEST = 20_000
LONG_TOKENS = 4_000


def pieces(text: str) -> list[str]:
    """A file cut at line ends into parts of at most LARGEST characters."""
    out: list[str] = []
    part: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if size + len(line) > LARGEST:
            out.append("".join(part))
            part, size = [], 0
        part.append(line)
        size += len(line)
    return [*out, "".join(part)]


def documents(stored: Path, tokenizer: Tokenizer, seed: int, target: int) -> list[dict[str, str]]:
    """About `target` bytes: prose and code in equal parts, 15 % of it with far pieces."""
    rng = np.random.default_rng(seed)
    planter = Planter(tokenizer)
    pools: dict[str, list[dict[str, str]]] = {"prose": [], "code": []}
    for line in stored.open():
        file = json.loads(line)
        if file["source"] in SHIPPED:
            parts = [p for p in pieces(file["text"]) if len(p) > LARGEST // 3]
            for part in parts[:2]:
                pools[SHIPPED[file["source"]]].append({"text": part, "source": file["source"]})
    chosen: list[dict[str, str]] = []
    for kind, pool in pools.items():
        used = 0
        for i in rng.permutation(len(pool)):
            if used > 0.425 * target:
                break
            chosen.append({**pool[i], "kind": kind})
            used += len(pool[i]["text"].encode())
        pools[kind] = [pool[i] for i in rng.permutation(len(pool))]
    far, used, turn = [], 0, 0
    base = [p["text"] for pair in zip(pools["prose"], pools["code"], strict=False) for p in pair]
    while used < 0.15 * target:
        text = "".join(base[(turn + j) % len(base)] for j in range(3))
        ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids[:LONG_TOKENS])
        turn += 3
        if len(ids) < LONG_TOKENS:
            continue
        if turn % 4 == 0:
            ids, _ = planter.copies(ids, LONG_TOKENS, rng, 8)
        else:
            spread = ("far", "any")[turn % 2]
            ids, _ = planter.facts(ids, LONG_TOKENS, rng, 30, spread)
        far.append(
            {
                "text": tokenizer.decode(ids.tolist(), skip_special_tokens=False),
                "source": "python and sqlite, planted",
                "kind": "long-range",
            }
        )
        used += len(far[-1]["text"].encode())
    mixed = chosen + far
    return [mixed[i] for i in rng.permutation(len(mixed))]


def write(path: Path, rows: list[dict[str, str]]) -> dict[str, object]:
    """One JSON object a line -> counts."""
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    kinds = [r["kind"] for r in rows]
    return {
        "documents": len(rows),
        "bytes": path.stat().st_size,
        **{k: kinds.count(k) for k in ("prose", "code", "long-range")},
    }
