"""The record of one comparison: rows side by side, and how they came about."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from calibrate.data import Windows
from glm5q.pipeline import describe
from tests.peers import rare, table
from tests.peers.peers import GROUPS, OURS
from tests.peers.session import Session


def finished(
    session: Session, held_out: Windows, rows: list[dict[str, Any]], failed: list[dict[str, str]]
) -> dict[str, Any]:
    """Returns the record of rows that were made and of rows that could not be."""
    compare(rows)
    machine = describe.machine("cpu")
    return {
        "what": "routed experts in symmetric int4, the rest as it was, weights only: "
        "KL(source || quantized) in nats a token on held-out text",
        "how": "measured",
        "command": "make peers" + asked_for(),
        "created": describe.now(),
        "machine": machine.model_dump(),
        "threads": os.environ.get("OMP_NUM_THREADS", "not limited"),
        "source": str(session.model),
        **({"rare": rare.described(session.source)} if session.model.rare else {}),
        **trained(session.model.folder),
        "calibration": described(session.calibration),
        "evaluation": described(held_out),
        "latent_norm_eps": "config.json's in calibrating ours and in judging; peers calibrate "
        "through transformers, which has 1e-6",
        "rows": sorted(rows, key=lambda row: (str(row["group"]), row["kl_mean"])),
        "not_had": failed,
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Puts into each row its differences to ours of the same group size."""
    for label, group in GROUPS.items():
        same = {row["name"]: row["window_kl"] for row in rows if row["group"] == group}
        ours = [f"{name} {label}" for name in OURS if f"{name} {label}" in same]
        differences = table.against(same, ours)
        on_rare = {
            row["name"]: row["rare"]["window_kl"]
            for row in rows
            if row["name"] in same and "rare" in row
        }
        apart = table.against(on_rare, [name for name in ours if name in on_rare])
        for row in rows:
            if row["name"] in same:
                row["against"] = differences[row["name"]]
            if row["name"] in on_rare:
                row["rare"]["against"] = apart[row["name"]]


def trained(folder: Path) -> dict[str, Any]:
    """Returns what glm5q.tiny.train said of a checkpoint; nothing of one that it did not make."""
    file = folder / "train.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    return {"trained": {key: value for key, value in found.items() if key != "log"}}


def asked_for() -> str:
    """Returns how `make` is given this call's options, the record's own name left out."""
    options = sys.argv[2:]
    while "--output" in options:
        at = options.index("--output")
        del options[at : at + 2]
    return f' PEERS_ARGS="{shlex.join(options)}"' if options else ""


def described(windows: Windows) -> dict[str, Any]:
    count, length = windows.tokens.shape
    return {
        "file": windows.name,
        "windows": count,
        "sequence_length": length,
        "tokens": count * length,
        "content_hash": windows.content_hash,
    }
