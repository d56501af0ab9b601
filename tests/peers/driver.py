"""`make peers`: public quantizers and ours on the same tokens, judged by our evaluator.

    python -m tests.peers.driver build/peers [--windows N] ...

Every tool runs in an environment of its own (build/peers/TOOL/venv) and is not run again while its
output stands and was made from the same tokens at the same setting.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import yaml
from safetensors.torch import save_file
from torch import Tensor

from calibrate.data import Windows, load_windows
from calibrate.logits import Head, compare_predictions
from calibrate.states import FLOAT32_CHUNK_TOKENS, advance, embed
from glm5q.checkpoint import open_checkpoint
from glm5q.formats.quantized import open_any
from glm5q.layer import runnable
from glm5q.pipeline import describe
from glm5q.pipeline.ablate import VARIANTS
from glm5q.pipeline.common import embedded_checkpoint
from glm5q.stream import LayerSource, layers
from recipes import schema
from tests.peers import reader, table
from tests.peers.outcome import FILE as OUTCOME
from tests.peers.peers import GROUPS, OURS, PEERS, Peer

HERE = Path(__file__).parent
IDENTITY = "identity.json"  # what a kept output was made from
PLAIN = "plain"
JUDGED = "judged.json"  # removed with the output, so it is of this output
CHECKPOINT = ("*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer*",
              "special_tokens_map.json", "chat_template.jinja")  # fmt: skip
RECIPE = "a100"  # int4 with activations as they are, scales of either sign
DEFAULT_LENGTH = 512


class NotHadError(Exception):
    """A row that cannot be had; the text is what its tool said last."""


@dataclass(frozen=True)
class Session:
    """One comparison: its folder, and calibration tokens as the peers read them."""

    folder: Path
    calibration: Windows
    time_limit_s: int

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def runs(self) -> Path:
        windows, length = self.calibration.tokens.shape
        return self.folder / f"runs-{windows}x{length}"

    @property
    def tokens(self) -> Path:
        return self.runs / "tokens.safetensors"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--windows", default=64, help="Calibration windows, the same for every row.")
@click.option("--sequence-length", default=DEFAULT_LENGTH, help="Tokens of one of them.")
@click.option("--eval-windows", default=24)
@click.option("--eval-length", default=DEFAULT_LENGTH)
@click.option("--time-limit", default=5400, help="Seconds that one row may take; 0 makes none.")
@click.option("--only", default=".", help="Rows whose names match this regular expression.")
@click.option("--judged", is_flag=True, help="Take what was judged before on the same tokens.")
@click.option("--output", type=click.Path(path_type=Path), default=None)
def main(
    folder: Path,
    windows: int,
    sequence_length: int,
    eval_windows: int,
    eval_length: int,
    time_limit: int,
    only: str,
    judged: bool,
    output: Path | None,
) -> None:
    """Runs every row of tests/peers/peers.py, judges them, and writes the record."""
    source = embedded_checkpoint()
    vocabulary = open_checkpoint(source).config.vocab_size
    calibration = load_windows(
        source / "calibration.jsonl", source, vocabulary, sequence_length, windows, 0
    )
    held_out = load_windows(
        source / "heldout.jsonl", source, vocabulary, eval_length, eval_windows, 0
    )
    session = Session(folder.resolve(), calibration, time_limit)
    stage(session, source)
    judge = Judge(held_out, source, judged)
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for name, make in rows_of(session).items():
        if not re.search(only, name):
            continue
        click.echo(name, err=True)
        try:
            rows.append({"name": name} | make() | judge.row(session.runs / slug(name)))
        except NotHadError as problem:
            click.echo(f"  not had: {problem}", err=True)
            failed.append({"name": name, "error": str(problem)})
    record = finished(session, held_out, rows, failed)
    for line in table.lines(record["rows"]):
        click.echo(line)
    if output is not None:
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def slug(name: str) -> str:
    """A row's name as a folder's."""
    return name.lower().replace(" ", "-")


def rows_of(session: Session) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns, by row, what makes its output and describes it; ours first."""

    def ours(name: str, variant: str, group: int | None) -> Callable[[], dict[str, Any]]:
        return lambda: run_ours(session, name, variant, group)

    def peers(peer: Peer) -> Callable[[], dict[str, Any]]:
        return lambda: run_peer(session, peer)

    made = {
        f"{name} {label}": ours(f"{name} {label}", variant, group)
        for label, group in GROUPS.items()
        for name, variant in OURS.items()
    }
    return made | {peer.name: peers(peer) for peer in PEERS}


def stage(session: Session, source: Path) -> None:
    """Puts the checkpoint's own files and the calibration tokens where the peers find them."""
    session.source.mkdir(parents=True, exist_ok=True)
    session.runs.mkdir(exist_ok=True)
    for pattern in CHECKPOINT:
        for file in source.glob(pattern):
            if not (session.source / file.name).exists():  # a tool may have it mapped
                shutil.copy(file, session.source)
    save_file({"input_ids": session.calibration.tokens}, session.tokens)


def run_peer(session: Session, peer: Peer) -> dict[str, Any]:
    """Quantizes by a peer unless its output stands; returns its half of the row."""
    output, asked = session.runs / slug(peer.name), peer.asked()
    script = HERE / f"with_{peer.tool}.py"
    python = session.folder / peer.tool / "venv" / "bin" / "python"
    settings = {"tool": peer.tool, **asked}
    if not fresh(session, output, settings):
        installed = session.folder / peer.tool
        if not (installed / "installed").exists():
            problem = last_error(installed / "install.log")
            raise NotHadError(f"{peer.tool} could not be installed: {problem}")
        command = [str(python), str(script), str(session.source), str(session.tokens)]
        launch(session, [*command, str(output), json.dumps(asked)], output)
        keep(session, output, settings)
    kept = reader.write_plain(output, session.source, output / PLAIN)
    found = json.loads((output / OUTCOME).read_text(encoding="utf-8"))
    return {
        "tool": peer.tool,
        "group": peer.group,
        "settings": peer.settings,
        **found,
        "mtp": kept.mtp,
        "changed_tensors": len(kept.changed),
        "changed_for_example": list(kept.changed[:4]),
    }


def run_ours(session: Session, name: str, variant: str, group: int | None) -> dict[str, Any]:
    """Quantizes by one of our variants unless its output stands; returns its half of the row."""
    output = session.runs / slug(name)
    recipe = weight_only(name, variant, group)
    settings = {"tool": "glm5q", "recipe": recipe}
    if not fresh(session, output, settings):
        file = session.runs / f"{slug(name)}.yaml"
        file.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
        windows, length = session.calibration.tokens.shape
        command = [sys.executable, "-m", "glm5q", "calibrate", "--recipe", str(file)]
        command += ["--windows", str(windows), "--sequence-length", str(length)]
        launch(session, [*command, "--eval-windows", "2", "--output", str(output)], output)
        keep(session, output, settings)
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    assert report["calibration"]["content_hash"] == session.calibration.content_hash
    return {
        "tool": "glm5q",
        "group": group,
        "settings": {"variant": variant, **recipe["efforts"]["fast"], **of_scales(recipe)},
        "versions": report["machine"]["versions"],
        "quantize_s": round(report["times_s"]["layers"], 1),
        "peak_rss_bytes": report["peak_memory_bytes"],
        "needed": [],
        "mtp": "kept",
        "changed_tensors": 0,
    }


def weight_only(name: str, variant: str, group: int | None) -> dict[str, Any]:
    """Returns the recipe with routed experts in int4 and nothing else, activations as they are."""
    raw: dict[str, Any] = yaml.safe_load(schema.text(RECIPE))
    experts = raw["weights"]["routed_expert"]
    VARIANTS[variant](experts, raw["efforts"]["fast"], raw["efforts"]["best"])
    experts.update(group_size=group, activation=None)
    weights = {role: {"method": "keep"} for role in raw["weights"]}
    return raw | {"name": slug(name), "weights": weights | {"routed_expert": experts}}


def of_scales(recipe: dict[str, Any]) -> dict[str, Any]:
    """What else a row's settings are, which efforts do not say."""
    experts = recipe["weights"]["routed_expert"]
    signed = bool(experts["clip"].get("signed"))
    return {"signed_scales": signed, "ridge": experts.get("ridge", 0.0)}


def identity(session: Session, settings: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": session.calibration.content_hash, **settings}


def fresh(session: Session, output: Path, settings: dict[str, Any]) -> bool:
    file = output / IDENTITY
    if not file.exists():
        return False
    return bool(json.loads(file.read_text(encoding="utf-8")) == identity(session, settings))


def keep(session: Session, output: Path, settings: dict[str, Any]) -> None:
    """Says what a finished output was made from, so that it is not made again."""
    text = json.dumps(identity(session, settings), indent=1)
    (output / IDENTITY).write_text(text, encoding="utf-8")


def launch(session: Session, command: list[str], output: Path) -> None:
    """Runs a command that fills `output`; raises NotHadError with what it said last."""
    log = output.with_suffix(".log")
    if not session.time_limit_s:
        raise NotHadError(last_error(log) if errors(said(log)) else "not run here")
    shutil.rmtree(output, ignore_errors=True)
    with log.open("w", encoding="utf-8") as stream:
        try:
            ended = subprocess.run(
                command,
                cwd=session.runs,  # tools leave logs where they run
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=session.time_limit_s,
            )
        except subprocess.TimeoutExpired:
            raise NotHadError(f"not done after {session.time_limit_s} s") from None
    if ended.returncode:
        raise NotHadError(last_error(log))


def last_error(log: Path) -> str:
    """Returns the last line of a log that names an error, or its last line."""
    lines = said(log)
    return (errors(lines) or lines or ["no output"])[-1][:300]


def said(log: Path) -> list[str]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]


def errors(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"(ERROR\b|[\w.]*(Error|Exception)\b)", line)]


class Judge:
    """The evaluator's own streams and predictions, the source's stream run once for all rows."""

    def __init__(self, held_out: Windows, source: Path, reuse: bool) -> None:
        self.tokens, self._hash = held_out.tokens, held_out.content_hash
        self.source = open_checkpoint(source)
        self._reuse = reuse

    @cached_property
    def _stream(self) -> Tensor:
        return final_states(self.source, self.tokens)

    def row(self, output: Path) -> dict[str, Any]:
        """Returns the judged half of a row, which is also kept beside the output."""
        file = output / JUDGED
        if self._reuse and file.exists():
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if found.pop("evaluation") == self._hash:
                return found
        found = self._judged(output)
        text = json.dumps(found | {"evaluation": self._hash})
        file.write_text(text, encoding="utf-8")
        return found

    def _judged(self, output: Path) -> dict[str, Any]:
        """Judges what lies in `output`, or in `output`/plain."""
        plain = output / PLAIN
        quantized = open_any(plain if plain.exists() else output)
        streams = self._stream, final_states(quantized, self.tokens)
        heads = Head(self.source, "cpu"), Head(quantized, "cpu")
        found = compare_predictions(heads, streams, self.tokens)
        windows = found.kl.double().mean(1).tolist()
        average = table.mean(windows)
        return {
            "kl_mean": average.mean,
            "kl_se": average.standard_error,
            "top1_agreement": float((found.argmax[0] == found.argmax[1]).double().mean()),
            "nll": float(found.nll[1].double().mean()),
            "window_kl": windows,
        }


def final_states(source: LayerSource, tokens: Tensor) -> Tensor:
    """Returns the states after the last layer [windows, length, hidden], as `evaluate` makes them.

    Weights in float32, activations never rounded.
    """
    config = source.config
    states = embed(source, tokens, chunk_tokens=FLOAT32_CHUNK_TOKENS)
    for layer in layers(source.layer, range(config.num_hidden_layers)):
        weights = runnable(layer, quantize_activations=False)
        states = advance(config, layer.number, weights, states)
    return states.hidden


def finished(
    session: Session, held_out: Windows, rows: list[dict[str, Any]], failed: list[dict[str, str]]
) -> dict[str, Any]:
    """Returns the record; rows of one group size are compared with ours of the same."""
    for label, group in GROUPS.items():
        same = {row["name"]: row["window_kl"] for row in rows if row["group"] == group}
        ours = [f"{name} {label}" for name in OURS if f"{name} {label}" in same]
        differences = table.against(same, ours)
        for row in rows:
            if row["name"] in differences:
                row["against"] = differences[row["name"]]
    machine = describe.machine("cpu")
    return {
        "what": "routed experts in symmetric int4, the rest as it was, weights only: "
        "KL(source || quantized) in nats a token on held-out text",
        "how": "measured",
        "command": "make peers",
        "created": describe.now(),
        "machine": machine.model_dump(),
        "threads": os.environ.get("OMP_NUM_THREADS", "not limited"),
        "source": "the embedded checkpoint",
        "calibration": described(session.calibration),
        "evaluation": described(held_out),
        "latent_norm_eps": "config.json's in calibrating ours and in judging; peers calibrate "
        "through transformers, which has 1e-6",
        "rows": sorted(rows, key=lambda row: (str(row["group"]), row["kl_mean"])),
        "not_had": failed,
    }


def described(windows: Windows) -> dict[str, Any]:
    count, length = windows.tokens.shape
    return {
        "file": windows.name,
        "windows": count,
        "sequence_length": length,
        "tokens": count * length,
        "content_hash": windows.content_hash,
    }


if __name__ == "__main__":
    main()
