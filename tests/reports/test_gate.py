"""`--fail-if`: what parses, what breaches, and that nothing unmeasured passes."""

from __future__ import annotations

import math

import pytest

from glm5q.errors import UserError
from reports import compare
from reports.comparison import Comparison
from tests.reports.test_compare import cell, run, with_accuracy


@pytest.fixture(scope="module")
def pair() -> Comparison:
    return compare.compare([run(kl=0.0100), run(kl=0.0110, seed=1)], ["base", "new"])


@pytest.mark.parametrize(
    ("expression", "breaches"),
    [
        ("kl_mean>1.05x", 1),
        ("kl_mean>1.20x", 0),
        ("kl_mean > 0.01", 1),
        ("kl_mean>1e-1", 0),
        ("top1_agreement<0.95", 0),
        ("top1_agreement<0.999", 1),
        ("top1_agreement<0.98x", 0),
        ("kl_mean>1.05x, top1_agreement<0.999", 2),
        ("kl_mean>1.05x,kl_p99>1.05x,quantized_bytes>1x", 2),
        ("quantized_bytes>=1x", 1),
        ("kl_p*>1.05x", 3),
        ("latency.*>1.10x", 0),
    ],
)
def test_conditions(pair: Comparison, expression: str, breaches: int) -> None:
    assert len(compare.check(pair, expression)) == breaches


def test_the_line_says_all(pair: Comparison) -> None:
    (line,) = compare.check(pair, "kl_mean>1.05x")
    assert line.startswith("new: kl_mean 0.01")
    assert line.endswith("(1.05x the baseline)")
    assert "\n" not in line


@pytest.mark.parametrize(
    "expression",
    ["", "kl_mean", "kl_mean>", "kl_mean>abc", "kl_mean=1", "kl_mean>1.05xx", "kl_mean>1,",
     "kl_mean>1e", "__import__('os')>1", "kl_mean>--1"],
)  # fmt: skip
def test_what_does_not_parse_is_one_line(pair: Comparison, expression: str) -> None:
    with pytest.raises(UserError) as caught:
        compare.check(pair, expression)
    assert "is not a condition" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_metric_names_near_ones(pair: Comparison) -> None:
    with pytest.raises(UserError, match="kl_mean"):
        compare.check(pair, "kl_maen>1")


def test_missing_or_not_a_number_never_passes() -> None:
    bench = run().model_copy(update={"accuracy": None})
    lost = compare.compare([run(), bench], ["base", "new"])
    assert compare.check(lost, "kl_mean>100") == ("new: kl_mean was not measured",)
    found = compare.compare([bench, run()], ["base", "new"])
    assert compare.check(found, "kl_mean>1x") == ("new: kl_mean was not measured in the baseline",)
    broken = compare.compare([run(), with_accuracy(run(), kl_mean=math.nan)], ["base", "new"])
    assert cell(broken, "kl_mean").value is not None
    assert len(compare.check(broken, "kl_mean>100")) == 1
    assert len(compare.check(broken, "kl_mean<0")) == 1


def test_every_run_but_the_baseline_is_checked() -> None:
    three = compare.compare([run(), run(kl=0.02, seed=1), run(kl=0.03, seed=2)], ["a", "b", "c"])
    assert [line[0] for line in compare.check(three, "kl_mean>1.5x")] == ["b", "c"]
