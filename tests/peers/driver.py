"""`make peers`: public quantizers and ours on the same tokens, judged by our evaluator.

    python -m tests.peers.driver build/peers [--windows N] ...

Every tool runs in an environment of its own (build/peers/TOOL/venv) and is not run again while its
output stands and was made from the same tokens at the same setting.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml

from calibrate.data import load_windows
from glm5q.checkpoint import open_checkpoint
from glm5q.pipeline.ablate import VARIANTS
from glm5q.pipeline.common import embedded_checkpoint
from recipes import files
from tests.peers import reader, table
from tests.peers.judge import PLAIN, Judge
from tests.peers.outcome import FILE as OUTCOME
from tests.peers.peers import GROUPS, OURS, PEERS, Peer
from tests.peers.record import finished
from tests.peers.session import Model, Session, fresh, keep, stage

HERE = Path(__file__).parent
CALIBRATION, HELD_OUT = "calibration.jsonl", "heldout.jsonl"  # the embedded checkpoint's
RECIPE = "a100"  # int4 with activations as they are, scales of either sign
DEFAULT_LENGTH = 512


class NotHadError(Exception):
    """A row that cannot be had; the text is what its tool said last."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--windows", default=64, help="Calibration windows, the same for every row.")
@click.option("--sequence-length", default=DEFAULT_LENGTH, help="Tokens of one of them.")
@click.option("--eval-windows", default=24)
@click.option("--eval-length", default=DEFAULT_LENGTH)
@click.option("--time-limit", default=5400, help="Seconds that one row may take; 0 makes none.")
@click.option(
    "--source",
    default=None,
    type=click.Path(path_type=Path, exists=True),
    help="Checkpoint in place of the embedded one, whose tokenizer it has.",
)
@click.option("--rare", "share", default=0.0, help="Share of each MoE layer's experts made rare.")
@click.option("--device", default="cpu", help="Where AutoRound tunes; all else is on the CPU.")
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
    source: Path | None,
    share: float,
    device: str,
    only: str,
    judged: bool,
    output: Path | None,
) -> None:
    """Runs every row of tests/peers/peers.py, judges them, and writes the record."""
    text = embedded_checkpoint()
    vocabulary = open_checkpoint(text).config.vocab_size
    calibration, held_out = (
        load_windows(text / file, text, vocabulary, length, count, 0)
        for file, length, count in (
            (CALIBRATION, sequence_length, windows),
            (HELD_OUT, eval_length, eval_windows),
        )
    )
    model = Model(source.resolve() if source else text, share)
    session = Session(folder.resolve(), model, calibration, time_limit, device)
    stage(session)
    judge = Judge(held_out, session.source, judged)
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
        where = {"device": session.device} if session.device != "cpu" else {}
        launch(session, [*command, str(output), json.dumps(asked | where)], output)
        keep(session, output, settings)
    kept = reader.write_plain(output, session.source, output / PLAIN)
    found = json.loads((output / OUTCOME).read_text(encoding="utf-8"))
    return {
        "tool": peer.tool,
        "group": peer.group,
        "settings": peer.settings,
        "device": "cpu",
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
        if session.model.label:
            data, held_out = (str(embedded_checkpoint() / name) for name in (CALIBRATION, HELD_OUT))
            command += [str(session.source), "--data", data, "--eval-data", held_out]
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
        "device": "cpu",
        "quantize_s": round(report["times_s"]["layers"], 1),
        "peak_rss_bytes": report["peak_memory_bytes"],
        "needed": [],
        "mtp": "kept",
        "changed_tensors": 0,
    }


def weight_only(name: str, variant: str, group: int | None) -> dict[str, Any]:
    """Returns the recipe with routed experts in int4 and nothing else, activations as they are."""
    raw: dict[str, Any] = yaml.safe_load(files.text(RECIPE))
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


if __name__ == "__main__":
    main()
