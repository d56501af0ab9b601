"""`glm5q report` and `glm5q compare`: pages, cards and verdicts made from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glm5q.errors import UserError
from glm5q.writer import write_error
from reports import card, comparison, html
from reports import compare as comparing
from reports import record as records


def render(
    path: Path, output: Path | None, latency: Path | None = None
) -> tuple[records.RunRecord, Path]:
    """Returns the record in `path` and the page written from it.

    `latency` is a record of `glm5q bench` whose times the page shows; the record keeps its own.
    """
    found = records.read_record(path)
    if latency is not None:
        found = with_latency(found, records.read_record(latency))
    folder = path if path.is_dir() else path.parent
    page = output or folder / "report.html"
    try:
        html.write_page(found, page)
    except OSError as error:
        raise write_error(page, error) from None
    return found, page


def with_latency(run: records.RunRecord, timed_run: records.RunRecord) -> records.RunRecord:
    """Returns `run` with the latency section of a bench's record, and a note of whose it is."""
    if not (timed_run.latency or timed_run.sweeps or timed_run.assembled):
        raise UserError("--latency: the record has no op times", "give one of `glm5q bench`")
    timed = {row.target for row in timed_run.latency}
    timed |= {row.target for row in timed_run.sweeps} | {row.target for row in timed_run.assembled}
    if run.recipe is not None and timed != {run.recipe.target}:
        raise UserError(
            f"--latency: times of {', '.join(sorted(timed))}; the run is for {run.recipe.target}",
            f"give a record of `glm5q bench --target {run.recipe.target}`",
        )
    machine = timed_run.machine
    note = (
        f"latency: `{timed_run.command}`, {timed_run.created}, {machine.device} "
        f"({machine.processor}), torch {machine.versions.get('torch', '?')}"
    )
    fields = {
        "latency": timed_run.latency,
        "sweeps": timed_run.sweeps,
        "assembled": timed_run.assembled,
        "notes": [*run.notes, note, *(f"latency: {text}" for text in timed_run.notes)],
    }
    return run.model_copy(update=fields)


def model_card(path: Path) -> str:
    """Returns the Markdown card of the record in `path`."""
    return card.model_card(records.read_record(path))


def compare(paths: Sequence[Path], page: Path | None, force: bool = False) -> comparison.Comparison:
    """Returns how the runs recorded in `paths` differ from the first; writes a page if asked.

    Raises UserError naming what differs when they are not comparable, unless `force`.
    """
    found = [records.read_record(path) for path in paths]
    result = comparison.compare(found, [str(path) for path in paths], force)
    if page is not None:
        try:
            comparing.write_page(result, page)
        except OSError as error:
            raise write_error(page, error) from None
    return result
