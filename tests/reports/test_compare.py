"""Comparisons: verdicts against known truths, what is refused, and the same numbers everywhere."""

from __future__ import annotations

import io
import math
import re
from typing import get_args

import numpy as np
import pytest
from rich.console import Console

from glm5q.errors import UserError
from reports import compare, html, text
from reports.comparison import Cell, Comparison, Verdict
from reports.record import Accuracy, RunRecord
from tests.reports.made_up import record
from tests.reports.test_html import HOSTILE, numbers

SMALL = {"layers": 4, "experts": 4}


def run(**values: object) -> RunRecord:
    return record(**(SMALL | values))  # type: ignore[arg-type]


def with_accuracy(made: RunRecord, **fields: object) -> RunRecord:
    assert made.accuracy is not None
    return made.model_copy(update={"accuracy": made.accuracy.model_copy(update=fields)})


def accuracy(made: RunRecord) -> Accuracy:
    assert made.accuracy is not None
    return made.accuracy


def cell(comparison: Comparison, key: str, at: int = 1) -> Cell:
    return next(m for m in comparison.metrics if m.key == key).cells[at]


@pytest.fixture(scope="module")
def three() -> Comparison:
    runs = [run(kl=0.0135), run(kl=0.0123, seed=1), run(kl=0.01352, seed=2)]
    return compare.compare(runs, ["base [g128]", "better", "same"])


def test_a_real_gain_is_better_and_noise_is_not(three: Comparison) -> None:
    gain, noise = cell(three, "kl_mean", 1), cell(three, "kl_mean", 2)
    assert gain.verdict == "better"
    assert gain.high is not None
    assert gain.high < 0
    assert noise.verdict == "within noise"
    assert noise.low is not None
    assert noise.high is not None
    assert noise.low <= 0 <= noise.high


def test_deltas_are_differences(three: Comparison) -> None:
    for metric in three.metrics:
        base = metric.cells[0]
        assert (base.delta, base.verdict) == (None, None)
        for other in metric.cells[1:]:
            if other.value is not None and base.value is not None:
                assert other.delta == other.value - base.value
                if other.low is not None and other.high is not None:
                    assert other.low <= other.delta <= other.high


def test_paired_interval_covers_the_truth() -> None:
    """Of 200 pairs of runs with a known mean difference, about 95 % of intervals hold it."""
    rng = np.random.default_rng(0)
    base = run(windows=40)
    held = 0
    for _ in range(200):
        text_part = rng.lognormal(0, 0.5, 40)
        left = text_part + rng.normal(0, 0.05, 40)
        right = text_part + 0.02 + rng.normal(0, 0.05, 40)
        a = with_accuracy(base, window_kl=left.tolist(), kl_mean=float(left.mean()))
        b = with_accuracy(base, window_kl=right.tolist(), kl_mean=float(right.mean()))
        found = cell(compare.compare([a, b], ["a", "b"]), "kl_mean")
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.02 <= found.high
    assert 178 <= held <= 199  # 95 % of 200, less what a percentile interval of 40 gives away


def test_pairing_beats_the_spread_of_the_text() -> None:
    """Each run's own interval is far wider than the difference, which pairing still resolves."""
    a, b = run(kl=0.0135), run(kl=0.0130, seed=1)
    first, second = accuracy(a), accuracy(b)
    assert first.kl_low < second.kl_mean < first.kl_high
    assert cell(compare.compare([a, b], ["a", "b"]), "kl_mean").verdict == "better"


def test_the_same_run_twice_is_equal() -> None:
    twice = compare.compare([run(), run()], ["a", "b"])
    assert {m.cells[1].verdict for m in twice.metrics} == {"equal"}


def test_swapped_runs_swap_verdicts() -> None:
    a, b = run(kl=0.0135), run(kl=0.0123, seed=1)
    there, back = (compare.compare(pair, ["x", "y"]) for pair in ([a, b], [b, a]))
    swapped = {"better": "worse", "worse": "better"}
    for one, other in zip(there.metrics, back.metrics, strict=True):
        verdict = one.cells[1].verdict or ""
        assert other.cells[1].verdict == swapped.get(verdict, verdict), one.key


def test_higher_is_better_for_agreement(three: Comparison) -> None:
    top1 = cell(three, "top1_agreement")
    assert top1.delta is not None
    assert top1.delta > 0
    assert top1.verdict == "better"


def test_not_a_number_is_worse() -> None:
    broken = with_accuracy(run(), kl_mean=math.nan)
    assert cell(compare.compare([run(), broken], ["a", "b"]), "kl_mean").verdict == "worse"


def shown(comparison: Comparison, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    compare.show(comparison, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def replan(made: RunRecord, **plan: object) -> RunRecord:
    """The same run with another plan of the routed experts in its recipe."""
    assert made.recipe is not None
    content = made.recipe.content | {
        "weights": made.recipe.content["weights"] | {"routed_expert": plan}
    }
    return made.model_copy(update={"recipe": made.recipe.model_copy(update={"content": content})})


def unfallen(made: RunRecord) -> RunRecord:
    layers = [layer.model_copy(update={"fallbacks": []}) for layer in made.layers]
    return made.model_copy(update={"layers": layers})


@pytest.mark.parametrize(
    ("plan", "verdict"),
    [
        ({"method": "gptq", "bits": 4, "pooling": 0.25}, "better"),
        ({"method": "gptq", "bits": 8, "pooling": 0.5}, "better"),
        ({"method": "rtn", "bits": 4}, "other method"),
        ({"method": "gptq", "bits": 4, "pooling": 0.0}, "other method"),
    ],
)
def test_a_method_that_cannot_fall_back_is_not_better(
    plan: dict[str, object], verdict: str
) -> None:
    base = replan(run(experts=16), method="gptq", bits=4, pooling=0.25)
    assert base.fallbacks
    both = compare.compare([base, replan(unfallen(base), **plan)], ["base", "other"])
    assert cell(both, "fallbacks").verdict == verdict
    assert re.search(rf"fallbacks .* {verdict}", shown(both))
    back = compare.compare([replan(unfallen(base), **plan), base], ["other", "base"])
    expected = {"better": "worse"}.get(verdict, verdict)
    assert cell(back, "fallbacks").verdict == expected


@pytest.mark.parametrize(("windows", "warned"), [(7, True), (8, False)])
def test_few_windows_are_said_everywhere(windows: int, warned: bool) -> None:
    pair = [run(windows=windows), run(windows=windows, kl=0.01, seed=1)]
    both = compare.compare(pair, ["a", "b [x]"])
    line = f"intervals rest on {windows} windows only"
    first_screen = compare.page(both).split('<section id="accuracy"')[0]
    assert (line in shown(both)) is warned
    assert (line in compare.markdown(both)) is warned
    assert (line in first_screen) is warned
    assert (f"区间仅由 {windows} 个窗口" in first_screen) is warned
    assert bool(compare.as_json(both, ())["warnings"]) is warned


def test_one_wording_of_verdicts_everywhere() -> None:
    """What JSON says is what the terminal, Markdown and the page say in English."""
    base = replan(run(experts=16), method="gptq", bits=4, pooling=0.25)
    lost = {"latency": [], "accuracy": None, "assembled": []}
    others = [
        run(kl=0.010, seed=1), run(kl=0.0124, seed=2), run(kl=0.02, seed=3), base,
        replan(unfallen(base), method="rtn"), run().model_copy(update=lost),
    ]  # fmt: skip
    found = compare.compare([base, *others], ["base", *"abcdef"])
    words = {c.verdict for m in found.metrics for c in m.cells if c.verdict}
    assert words == set(get_args(Verdict))
    page = compare.page(found)
    for word in words:
        assert f'<span class="word"><span lang="en">{word}</span>' in page
    told = {c.verdict for m in compare.headline(found) for c in m.cells if c.verdict}
    assert words - told == {"noise not known"}  # of metrics that a page has room for
    for out in (shown(found), compare.markdown(found)):
        assert {word for word in words if word in out} == told
        assert not re.search(r"(?<!within )\b(noise|unknown|absent)$", out, re.M)


def test_units_of_change_and_interval_are_labelled(three: Comparison) -> None:
    said = "difference: run - baseline in the metric's unit"
    assert said in shown(three)
    assert said in compare.markdown(three)
    page = compare.page(three)
    assert "difference (run − baseline, in the metric's unit" in page
    intervals = page.count('/low" data-form')
    assert intervals == page.count('<span class="ci">95 %</span>') > 0


def test_counts_have_no_noise() -> None:
    a = run()
    assert a.size is not None
    smaller = a.size.model_copy(update={"quantized_bytes": a.size.quantized_bytes - 1})
    b = a.model_copy(update={"size": smaller})
    assert cell(compare.compare([a, b], ["a", "b"]), "quantized_bytes").verdict == "better"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.9, 1.1, "within noise"), (1.2, 1.4, "worse"), (0.6, 0.8, "better")],
)
def test_latency_verdict_is_from_both_spreads(low: float, high: float, verdict: str) -> None:
    a = run()
    row = a.latency[0].model_copy(update={"median_s": 1.0, "low_s": 0.95, "high_s": 1.05})
    middle = (low + high) / 2 + 1e-9
    other = row.model_copy(update={"median_s": middle, "low_s": low, "high_s": high})
    runs = [a.model_copy(update={"latency": [r]}) for r in (row, other)]
    found = next(
        m for m in compare.compare(runs, ["a", "b"]).metrics if m.key.startswith("latency.")
    )
    assert found.cells[1].verdict == verdict
    computed = a.model_copy(update={"latency": [other.model_copy(update={"how": "computed"})]})
    found = next(
        m
        for m in compare.compare([runs[0], computed], ["a", "b"]).metrics
        if m.key.startswith("latency.")
    )
    assert found.cells[1].verdict == "noise not known"


def test_two_chips_are_compared_op_by_op() -> None:
    a = run()
    h200 = a.model_copy(update={"latency": [r for r in a.latency if r.target == "h200"]})
    other = run(recipe="atlas-800t-a3")
    atlas = other.model_copy(
        update={"latency": [r for r in a.latency if r.target == "atlas-800t-a3"]}
    )
    both = compare.compare([h200, atlas], ["h200", "a3"])
    found = cell(both, "latency.sparse_attention.tokens4096.keys65536")
    assert found.value == 4.4e-3
    assert found.verdict == "noise not known"  # the other side is only computed


def other_source(made: RunRecord) -> RunRecord:
    assert made.source is not None
    return made.model_copy(
        update={"source": made.source.model_copy(update={"content_hash": "0" * 64})}
    )


def other_data(made: RunRecord) -> RunRecord:
    data = accuracy(made).data.model_copy(update={"content_hash": "0" * 64})
    return with_accuracy(made, data=data)


@pytest.mark.parametrize(
    ("change", "names"),
    [(other_source, "source checkpoint differs"), (other_data, "evaluation data differs")],
)
def test_what_cannot_be_compared_is_refused(change, names: str) -> None:  # type: ignore[no-untyped-def]
    a, b = run(), change(run(seed=1))
    with pytest.raises(UserError) as caught:
        compare.compare([a, b], ["a", "b"])
    line = str(caught.value)
    assert names in line
    assert "\n" not in line
    assert "--force" in line
    forced = compare.compare([a, b], ["a", "b"], force=True)
    assert names in forced.forced[0]
    assert names in compare.page(forced).split('<section id="accuracy"')[0]
    assert names in compare.markdown(forced)
    console = Console(file=io.StringIO(), width=300)
    compare.show(forced, console)
    assert names in console.file.getvalue()  # type: ignore[attr-defined]


def test_forced_data_is_not_paired() -> None:
    forced = compare.compare([run(), other_data(run(kl=0.005, seed=1))], ["a", "b"], force=True)
    assert cell(forced, "kl_mean").verdict == "noise not known"
    assert forced.window_delta == ((),)
    assert "No two runs can be paired" in compare.page(forced)


def test_one_run_is_refused() -> None:
    with pytest.raises(UserError, match="two or more"):
        compare.compare([run()], ["a"])


def test_what_one_run_lacks_is_not_a_difference() -> None:
    bench = run().model_copy(update={"accuracy": None, "source": None})
    mixed = compare.compare([run(), bench], ["a", "b"])
    assert cell(mixed, "kl_mean").verdict == "not measured in both"
    assert "not measured in both" in compare.page(mixed)


def test_every_number_on_the_page(three: Comparison) -> None:
    found = numbers(compare.page(three))
    assert len(found) > 100
    for path, form, value, shown in found:
        exact = html.resolve({"comparison": three}, path)
        assert float(value) == exact, path
        part = path.rsplit("/", 1)[1]
        moved = part in ("delta", "low", "high")
        assert shown == (text.signed if moved else lambda v, f: text.FORMATS[f](v))(exact, form)


def test_names_are_escaped() -> None:
    both = compare.compare([run(), run(seed=1)], [HOSTILE, "[/bold] a|b *c*"])
    page = compare.page(both)
    assert "<img" not in page
    assert page.count("<script") == 2
    table = compare.markdown(both)
    assert "a\\|b \\*c\\*" in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}


def test_terminal_at_80_columns(three: Comparison, capsys: pytest.CaptureFixture[str]) -> None:
    compare.show(three, Console(width=80))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert out.isascii()
    assert "better against base [g128]" in out
    assert re.search(r"kl_mean +0\.013\d+ +0\.01\d+ +0\.9\d+x +-0\.00\d+ +better", out)
    assert re.search(r"\n +\[-0\.\d+, -0\.\d+\] *\n", out)  # under the difference it bounds
    assert "[its 95 % interval]" in " ".join(out.split())


def test_markdown_holds_what_moved(three: Comparison) -> None:
    table = compare.markdown(three)
    base = cell(three, "kl_mean", 0).value
    assert base is not None
    assert f"| `kl_mean` | {text.significant(base)} |" in table
    assert "**better**" in table
    assert "base \\[g128\\]" in table
