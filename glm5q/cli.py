"""The command line: parse, call, print. Heavy imports wait inside the commands."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from glm5q.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

FOLDER = click.Path(path_type=Path)
FORMATS_HELP = "compressed-tensors, sglang-w4afp8, modelslim"
DATA_HELP = "JSONL (text, messages or input_ids) or plain text."
EPS_HELP = (
    "eps of q_a_layernorm and kv_a_layernorm; default: config's rms_norm_eps, as vLLM and SGLang "
    "use (transformers: 1e-6)."
)


class _Finite(click.FloatRange):
    """A number in a range; click's own lets nan by, and infinity where there is no end."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class _Positive(_Finite):
    """A number above 0."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)


class _Tokens(click.ParamType[int]):
    """A number of tokens, as 202752, 200k or 1m."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", str(value).lower().replace(",", ""))
        count = float(found[1]) * {"": 1, "k": 1_000, "m": 1_000_000}[found[2]] if found else 0
        if not 1 <= count <= 1e9 or count != int(count):
            self.fail(f"{value} is no number of tokens, as 200k", param, ctx)
        return int(count)


class _Group(click.Group):
    """Turns a UserError into one line and exit code 1; other exceptions keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"glm5q: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="glm5q")
def main() -> None:
    """Quantize GLM-5 layer by layer, and show what was lost and won."""


@main.command()
@click.argument("checkpoint", type=FOLDER, required=False)
@click.option(
    "--recipe", "recipes", multiple=True, required=True, help="Name or YAML file; may repeat."
)
@click.option(
    "--output", type=FOLDER, required=True, help="New folder for the checkpoint and report."
)
@click.option("--data", type=FOLDER, help=f"Calibration text. {DATA_HELP}")
@click.option(
    "--eval-data", type=FOLDER, help="Evaluation text; default: windows kept back from --data."
)
@click.option("--windows", type=click.IntRange(min=2), help="Calibration windows at most.")
@click.option("--sequence-length", type=click.IntRange(min=16), help="Tokens a window.")
@click.option("--eval-windows", type=click.IntRange(min=2), default=16, show_default=True)
@click.option("--latent-norm-eps", type=_Positive(), help=EPS_HELP)
@click.option("--format", help=f"{FORMATS_HELP}; default: the recipe's.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--effort", type=click.Choice(["fast", "best"]), default="fast", show_default=True)
@click.option(
    "--budget-gb", type=_Positive(), help="Mix schemes by layer: all weights' bytes / 1e9 at most."
)
@click.option(
    "--budget-bits", type=_Positive(),
    help="The same by mean bits as written (codes, scales, padding; floats if kept) of the weights "
    "that the recipe quantizes outside MTP layers and its overrides.",
)  # fmt: skip
@click.option(
    "--hidden-gb", type=_Positive(),
    help="Memory for hidden states, GB; more lie in files in the output folder. Default: half of "
    "the machine's.",
)  # fmt: skip
@click.option("--budget-check", is_flag=True, help="Measure every choice on evaluation text too.")
@click.option("--json", "as_json", is_flag=True, help="Print the record; a list for several.")
def calibrate(
    as_json: bool,
    checkpoint: Path | None,
    eval_data: Path | None,
    eval_windows: int,
    budget_gb: float | None,
    budget_bits: float | None,
    budget_check: bool,
    **options: Any,
) -> None:
    """Quantize CHECKPOINT (default: the small one in the package) by each recipe.

    Repeat an interrupted command to resume it.
    """
    from glm5q import pipeline, progress

    asked = pipeline.CalibrateOptions(
        source=checkpoint or pipeline.embedded_checkpoint(),
        evaluation_data=eval_data, evaluation_windows=eval_windows,
        budget=pipeline.BudgetOptions.asked(budget_gb, budget_bits, budget_check), **options,
    )  # fmt: skip
    with progress.bar() as update:
        finished = pipeline.calibrate(asked, update)
    if as_json and len(finished) > 1:
        records = [one.run.model_dump(mode="json") for one in finished]
        click.echo(json.dumps(records, indent=1))
        return
    for one in finished:
        _show(one.run, as_json)
        if not as_json:
            _places(
                ("quantized checkpoint", one.checkpoint),
                ("record", one.record),
                ("report", one.page),
            )


@main.command()
@click.argument("checkpoint", type=FOLDER, required=False)
@click.option("--recipe", default="h200", show_default=True, help="Name or YAML file.")
@click.option("--output", type=FOLDER, required=True, help="New folder for variants and runs.")
@click.option("--data", type=FOLDER, help=f"Calibration text. {DATA_HELP}")
@click.option("--eval-data", "evaluation_data", type=FOLDER, help="Evaluation text.")
@click.option("--windows", type=click.IntRange(min=2), help="Calibration windows at most.")
@click.option("--sequence-length", type=click.IntRange(min=16), help="Tokens a window.")
@click.option("--eval-windows", "evaluation_windows", type=click.IntRange(min=2), default=16)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
def ablate(checkpoint: Path | None, recipe: str, as_json: bool, **options: Any) -> None:
    """Switch each calibration step of a recipe alone, and say what it is worth in KL."""
    from glm5q import pipeline, progress
    from reports import compare as comparing

    source = checkpoint or pipeline.embedded_checkpoint()
    asked = pipeline.CalibrateOptions(source=source, recipes=(recipe,), **options)
    with progress.bar() as update:
        found = pipeline.ablate(asked, update)
    if as_json:
        click.echo(json.dumps(comparing.as_json(found, ()), indent=1))
    else:
        comparing.show(found, _console())


@main.command()
@click.argument("checkpoint", type=FOLDER, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(checkpoint: Path | None, as_json: bool) -> None:
    """Say what CHECKPOINT is: variant, layers, roles, dtypes, bytes."""
    from glm5q import pipeline, views

    found = pipeline.inspect(checkpoint or pipeline.embedded_checkpoint())
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        views.inspection(found, _console())


@main.command()
@click.argument("source", type=FOLDER)
@click.argument("quantized", type=FOLDER)
@click.option("--data", type=FOLDER, help=f"Text that calibration did not see. {DATA_HELP}")
@click.option("--output", type=FOLDER, help="Write the record here (.json) and its page beside it.")
@click.option("--windows", type=click.IntRange(min=2), default=16, show_default=True)
@click.option("--sequence-length", type=click.IntRange(min=16), default=2048, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--latent-norm-eps", type=_Positive(), help=EPS_HELP)
@click.option("--weights-only", is_flag=True, help="Leave activations unquantized.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def evaluate(weights_only: bool, as_json: bool, **options: Any) -> None:
    """Measure how far QUANTIZED is from SOURCE."""
    from glm5q import pipeline, progress

    with progress.bar() as update:
        run, page = pipeline.compare_checkpoints(
            quantize_activations=not weights_only, progress=update, **options
        )
    _show(run, as_json)
    if page is not None and not as_json:
        _places(("record", options["output"]), ("report", page))


@main.command()
@click.argument("source", type=FOLDER, required=False)
@click.argument("quantized", type=FOLDER, required=False)
@click.option(
    "--only", multiple=True, type=click.Choice(["caches", "topk", "needle"]),
    help="These alone; may repeat.",
)  # fmt: skip
@click.option("--data", type=FOLDER, help=f"Text that calibration did not see. {DATA_HELP}")
@click.option("--output", type=FOLDER, help="Write the record here (.json) and its page beside it.")
@click.option("--windows", type=click.IntRange(min=2), default=8, show_default=True)
@click.option("--sequence-length", type=click.IntRange(min=16), default=2048, show_default=True)
@click.option("--needle-windows", type=click.IntRange(min=1), default=2, show_default=True)
@click.option(
    "--needle-length", type=click.IntRange(min=16), help="Longest; default: the model's positions."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--latent-norm-eps", type=_Positive(), help=EPS_HELP)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def effects(source: Path | None, only: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure what serving can switch, each alone: cache formats, index_topk; and retrieval.

    On SOURCE (default: the small one in the package); retrieval of QUANTIZED too, if given.
    """
    from glm5q import effects_view, pipeline, progress

    asked = pipeline.EffectsOptions(
        source=source or pipeline.embedded_checkpoint(), only=only, **options
    )
    with progress.bar() as update:
        run, page = pipeline.measure_effects(asked, update)
    if as_json:
        click.echo(run.model_dump_json(indent=1))
        return
    effects_view.show(run, _console())
    if page is not None:
        _places(("record", options["output"]), ("report", page))


@main.command()
@click.argument("checkpoint", type=FOLDER)
@click.option("--source", type=FOLDER, help="The unquantized checkpoint, to hold weights against.")
@click.option("--json", "as_json", is_flag=True, help="Print every row as JSON.")
def verify(checkpoint: Path, source: Path | None, as_json: bool) -> None:
    """Prove that an engine will load a quantized CHECKPOINT; exit 1 if a check fails."""
    from glm5q import views
    from glm5q.verify import verify as run_checks

    report = run_checks(checkpoint, source)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=1))
    else:
        views.verification(report, _console())
    sys.exit(0 if report.ok else 1)


@main.command()
@click.argument("checkpoint", type=FOLDER)
@click.option("--format", "name", required=True, help=f"{FORMATS_HELP} or onnx.")
@click.option("--output", type=FOLDER, required=True, help="New folder.")
@click.option("--vllm-only", is_flag=True, help="compressed-tensors: a config not for SGLang.")
@click.option("--copy-mtp", is_flag=True, help="Give MTP layers the embedding and head again.")
@click.option("--layers", help="onnx: layers alone, as 0,3-5; default: the whole model.")
def export(checkpoint: Path, name: str, output: Path, **options: Any) -> None:
    """Write a quantized CHECKPOINT in another format, without calibrating again."""
    from glm5q import pipeline, progress

    with progress.bar() as update:
        pipeline.export(checkpoint, name, output, progress=update, **options)
    _places((name, output))


@main.command()
@click.argument("record", type=FOLDER)
@click.option(
    "--output", type=FOLDER, help="Page to write; default: report.html beside the record."
)
@click.option("--latency", type=FOLDER, help="A record of `glm5q bench` whose times to show.")
@click.option("--card", is_flag=True, help="Print the Markdown model card instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def report(
    record: Path, output: Path | None, latency: Path | None, card: bool, as_json: bool
) -> None:
    """Make the HTML page of RECORD (a report.json, or its folder)."""
    from glm5q import pipeline

    if card:
        click.echo(pipeline.model_card(record), nl=False)
        return
    run, page = pipeline.render(record, output, latency)
    _show(run, as_json)
    if not as_json:
        _places(("report", page))


@main.command()
@click.argument("records", type=FOLDER, nargs=-1, required=True)
@click.option("--output", type=FOLDER, help="Write a page that lays the runs side by side.")
@click.option("--force", is_flag=True, help="Compare runs on other data or another source.")
@click.option("--fail-if", help="Exit 1 if true, as 'kl_mean>1.05x,top1_agreement<0.95'.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
@click.option("--json", "as_json", is_flag=True, help="Print the metrics as JSON.")
def compare(
    records: tuple[Path, ...],
    output: Path | None,
    force: bool,
    fail_if: str | None,
    markdown: bool,
    as_json: bool,
) -> None:
    """Say what moved between RECORDS (report.json files or folders), the first the baseline."""
    from glm5q import pipeline
    from reports import compare as comparing

    found = pipeline.compare(records, output, force)
    breaches = comparing.check(found, fail_if) if fail_if else ()
    if as_json:
        click.echo(json.dumps(comparing.as_json(found, breaches), indent=1))
    elif markdown:
        click.echo(comparing.markdown(found), nl=False)
    else:
        comparing.show(found, _console())
    for breach in breaches:
        click.echo(f"glm5q: {breach}", err=True)
    sys.exit(1 if breaches else 0)


@main.command()
@click.argument("model", required=False)
@click.option("--recipe", required=True, help="Name or YAML file.")
@click.option("--chip", help="Target; default: the recipe's.")
@click.option("--count", type=click.IntRange(min=1), help="Devices; default: one machine's.")
@click.option("--context", type=_Tokens(), help="Tokens a request, as 200k; default: 200k.")
@click.option("--concurrency", type=click.IntRange(1, 1_000_000), default=1, show_default=True)
@click.option("--kv", type=click.Choice(["bf16", "fp8", "int8"]), default="bf16", show_default=True)
@click.option("--mtp/--no-mtp", default=True, help="With the MTP layer's weights and caches.")
@click.option(
    "--reserve",
    type=_Finite(0, 0.9),
    default=0.1,
    show_default=True,
    help="Share of a device's memory left to the runtime.",
)
@click.option(
    "--disk",
    "disk_bytes_s",
    type=_Finite(min=1e6),
    default=2e9,
    show_default=True,
    help="Bytes a second, for calibration's time.",
)
@click.option("--markdown", is_flag=True, help="Print the layouts as Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def plan(model: str | None, markdown: bool, as_json: bool, **options: Any) -> None:
    """Say what MODEL (a checkpoint's folder, glm-5, glm-5.1 or glm-5.2) needs on a chip."""
    from glm5q import pipeline, plan_view
    from glm5q.pipeline import plan_json

    asked = pipeline.PlanOptions(model or str(pipeline.embedded_checkpoint()), **options)
    found = pipeline.plan(asked)
    if as_json:
        click.echo(json.dumps(plan_json.as_json(found), indent=1, allow_nan=False))
    elif markdown:
        click.echo(plan_view.markdown(found), nl=False)
    else:
        plan_view.show(found, _console())


@main.command()
@click.argument("checkpoint", type=FOLDER, required=False)
@click.option("--target", help="As recipes name it; default: what this machine is.")
@click.option("--source", type=FOLDER, help="CHECKPOINT's source; default: its record's.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor(checkpoint: Path | None, target: str | None, source: Path | None, as_json: bool) -> None:
    """Say what this machine has, what a target lacks here, and the fix; exit 1 if it cannot run."""
    from glm5q import doctor as doctoring

    found = doctoring.doctor(target, checkpoint, source, Path.cwd())
    click.echo(json.dumps(found.as_json(), indent=1) if as_json else "\n".join(found.lines()))
    sys.exit(0 if found.ok else 1)


@main.command()
@click.option("--target", required=True, help="As recipes name it: cpu, h200, ascend-910c ...")
@click.option("--recipe", help="Name or YAML file; its formats and tiles are lowered.")
@click.option("--output", type=FOLDER, help="New folder for PTX, cubin, IR or .so, and a manifest.")
@click.option("--setup", is_flag=True, help="Ascend: install Huawei's open compilers first.")
@click.option(
    "--environment", type=FOLDER, help="Ascend: where they are; default: the user's cache."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def lower(as_json: bool, **options: Any) -> None:
    """Say what runs each op on a target, and compile it ahead of time; exit 1 if one fails."""
    from glm5q import pipeline

    found = pipeline.lower(**options)
    click.echo(json.dumps(found.as_json(), indent=1) if as_json else "\n".join(found.lines()))
    sys.exit(0 if found.ok else 1)


@main.command()
@click.option("--target", default="cpu", show_default=True, help="What this machine is.")
@click.option("--recipe", help="Name or YAML file: its experts' formats, its kernels' tiles.")
@click.option("--shape", default="glm-5", show_default=True, help="A release, or a checkpoint.")
@click.option("--sweep", help="Batch sizes of the decode step, as batch=1,4,16,64.")
@click.option("--context", help="Tokens of context, as 8k,64k,128k,200k.")
@click.option("--ops", help="These ops alone, by name, with commas; no whole passes.")
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Calls of each; default: cpu 30, gpu 50."
)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads; default: torch's.")
@click.option("--warm", is_flag=True, help="CPU: leave caches as they are between calls.")
@click.option("--output", type=FOLDER, help="Folder for report.json and report.html.")
@click.option("--check-only", is_flag=True, help="Run --impl through --op's test matrix instead.")
@click.option("--impl", help="module:function with the reference's arguments, found from here.")
@click.option("--op", help="The op that --impl implements.")
@click.option("--device", default="cpu", show_default=True, help="Where --impl runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the record, or the failures, as JSON.")
def bench(
    check_only: bool, impl: str | None, op: str | None, device: str, as_json: bool, **options: Any
) -> None:
    """Time ops and whole passes on this machine; or check an implementation of one's own."""
    from glm5q import bench_view, pipeline, progress

    if check_only or impl or op:
        sys.exit(bench_view.checked(*pipeline.check_implementation(op, impl, device), as_json))
    with progress.bar() as update:
        run = pipeline.bench(pipeline.bench_options(**options), update)
    click.echo(run.model_dump_json(indent=1) if as_json else "\n".join(bench_view.lines(run)))
    if options["output"] is not None and not as_json:
        _places(*((name, options["output"] / name) for name in ("report.json", "report.html")))
    sys.exit(1 if any(row.problem for row in run.latency) else 0)


@main.command()
@click.option("--shape", default="glm-5", show_default=True, help="A release, or embedded.")
@click.option("--tokens", type=click.IntRange(min=32), default=1 << 20, show_default=True)
@click.option("--sequence-length", type=click.IntRange(min=16), default=2048, show_default=True)
@click.option("--experts", type=click.IntRange(min=1), help="Default: the shape's.")
@click.option("--recipe", default="h200", show_default=True, help="Name or YAML file.")
@click.option("--effort", type=click.Choice(["fast", "best"]), default="fast", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--disk-rate", "disk_bytes_s", type=_Positive(), default=7e9, show_default=True,
    help="Bytes a second, for the projection.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def bench_calibrate(as_json: bool, **options: Any) -> None:
    """Time the calibration of one random MoE layer of a release's shape against its floor."""
    from glm5q import pipeline

    found = pipeline.bench_calibrate(pipeline.BenchOptions(**options))
    if found is not None:
        click.echo(json.dumps(found.as_json(), indent=1) if as_json else "\n".join(found.lines()))


@main.group()
def recipes() -> None:
    """List, show and check recipes."""


@recipes.command("list")
@click.option("--json", "as_json", is_flag=True)
def list_recipes(as_json: bool) -> None:
    """List the shipped recipes."""
    from glm5q import views
    from recipes import files

    found = [files.load(name) for name in files.shipped()]
    if as_json:
        click.echo(json.dumps([recipe.model_dump(mode="json") for recipe in found], indent=1))
    else:
        views.recipe_list(found, _console())


@recipes.command("show")
@click.argument("name")
def show_recipe(name: str) -> None:
    """Print a recipe's YAML, to start one's own from."""
    from recipes import files

    click.echo(files.text(name), nl=False)


@recipes.command("validate")
@click.argument("file", type=FOLDER)
def validate_recipe(file: Path) -> None:
    """Check a recipe FILE: keys, roles, and what its chip can do."""
    from glm5q import pipeline

    recipe = pipeline.validate_recipe(file)
    click.echo(f"{file}: {recipe.name} is a valid recipe for {recipe.target}")


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def _show(run: Any, as_json: bool) -> None:
    if as_json:
        click.echo(run.model_dump_json(indent=1))
        return
    from reports import terminal

    terminal.show(run, _console())


def _places(*places: tuple[str, Path]) -> None:
    width = max(len(label) for label, _ in places)
    for label, path in places:
        click.echo(f"{label:<{width}}  {path}")
