"""The page without a browser: one whole file, small, quick, every static number the record's."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from string import Formatter

import pytest

from glm5q.types import Role
from reports import html, text, view
from reports.record import RunRecord, read_record
from tests.reports.made_up import record

V1 = Path(__file__).parent / "data" / "record-v1.json"
TEMPLATES = files("reports") / "templates"
LIMIT_BYTES = 500_000
PARTS = ("latency", "macros", "memory")
HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>{{7*7}}&amp;"


class Numbers(HTMLParser):
    """Collects (path, form, exact value, text) of every number with a place in the record."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str, str]] = []
        self._open: tuple[str, str, str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "data" and given.get("data-path"):
            path, form, value = (given[key] or "" for key in ("data-path", "data-form", "value"))
            self._open = (path, form, value)

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found.append((*self._open, data))
            self._open = None


def numbers(page: str) -> list[tuple[str, str, str, str]]:
    parser = Numbers()
    parser.feed(page)
    return parser.found


@pytest.fixture(scope="module")
def full() -> RunRecord:
    return record()


@pytest.fixture(scope="module")
def full_page(full: RunRecord) -> str:
    return html.render(full)


def test_size_and_time(full: RunRecord, tmp_path: Path) -> None:
    html.write_page(full, tmp_path / "warm.html")
    start = time.process_time()
    html.write_page(full, tmp_path / "report.html")
    assert time.process_time() - start < 2
    assert (tmp_path / "report.html").stat().st_size < LIMIT_BYTES
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "warm.html"]


def test_same_record_same_bytes(full: RunRecord, full_page: str) -> None:
    assert html.render(full) == full_page


def test_nothing_is_fetched(full_page: str) -> None:
    """No address but the licence's; and the policy forbids any even if a browser found one."""
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", full_page))
    assert {a for a in addresses if "leeoniya/uPlot" not in a} == set()
    assert not re.search(r"<(?:link|img|iframe|object|embed)\b|@import|url\(", full_page)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', full_page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "script-src 'sha256-" in policy[1]


def test_every_static_number_is_the_records(full: RunRecord, full_page: str) -> None:
    found = numbers(full_page)
    assert len(found) > 250
    for path, form, value, shown in found:
        exact = html.resolve({"record": full}, path)
        assert float(value) == exact, path
        assert shown == text.FORMATS[form](exact), path


def test_every_number_is_in_its_own_unit(full_page: str) -> None:
    """By the field's name, which carries the unit; the template must not show it as another."""
    rules = {
        r"kl\w*|perplexity\w*|error|\w+_absmax|input_p999|\w+_eps": "sig",
        r"\w*agreement|acceptance_\w+|attention_mass\w*": "pct",
        r"(?!tokens_per)\w+_s": "time",
        r"(source|quantized|capacity|peak_memory)_bytes": "size",
        r"\w+_bytes_per_token|parameters|tokens|max_\w+": "int",
        r"tokens_per_s": "rate",
        r"ratio|over_floor": "times",
        r"flop": "flop",
        r"layers?|cores|seed|k|recommended_k": "plain",
    }
    seen = set()
    for path, form, *_ in numbers(full_page):
        named = [step for step in path.split("/") if not step.isdigit()][-1]
        for rule, expected in rules.items():
            if re.fullmatch(rule, named):
                assert form == expected, path
                seen.add(rule)
    assert seen == set(rules)


def test_no_id_twice_and_every_label_there(full_page: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', full_page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:labelledby|for|href)="#?([\w-]+)"', full_page)) <= set(ids)


def test_the_verdict_is_there(full_page: str) -> None:
    paths = {path for path, *_ in numbers(full_page)}
    wanted = {"accuracy/kl_mean", "accuracy/kl_low", "accuracy/kl_high", "accuracy/top1_agreement",
              "accuracy/perplexity_source", "accuracy/perplexity_quantized",
              "size/source_bytes", "size/quantized_bytes", "size/ratio"}  # fmt: skip
    assert {f"record/{path}" for path in wanted} <= paths


def test_a_sweep_that_ends_at_its_peak_says_so(full: RunRecord) -> None:
    assert "the largest tried" not in html.render(full)
    sweep = full.sweeps[0]
    rising = sweep.model_copy(update={"points": sweep.points[:5], "peak_batch": 16})
    assert html.render(without(full, sweeps=[rising])).count("the largest tried") == 1


def test_those_that_fit_come_first(full: RunRecord) -> None:
    assert full.memory is not None
    turned = full.memory.model_copy(update={"devices": full.memory.devices[::-1]})
    tile = html.render(without(full, memory=turned)).split('<ul class="fits">')[1]
    told = re.findall(r'<li class="(\w+)">.*?devices/(\d)/count', tile.split("</ul>")[0], re.S)
    assert told == [("yes", "2"), ("yes", "3"), ("yes", "4"), ("no", "0")]


def test_few_windows_are_warned_of() -> None:
    few = html.render(record(layers=3, experts=4, windows=7))
    assert "Judged on 7 windows only" in few.split('<section id="accuracy"')[0]
    assert "windows only" not in html.render(record(layers=3, experts=4, windows=8))


def test_old_record_renders() -> None:
    old = read_record(V1)
    page = html.render(old)
    for path, form, value, shown in numbers(page):
        exact = html.resolve({"record": old}, path)
        assert (float(value), shown) == (exact, text.FORMATS[form](exact)), path
    assert page.count('class="absent"') >= 5


def without(made: RunRecord, **fields: object) -> RunRecord:
    return made.model_copy(update=fields)


def sparse() -> Iterator[tuple[str, RunRecord, set[str]]]:
    """(name, record, sections that must say "not measured")."""
    small = record(layers=4, experts=4, windows=4)
    bench = without(small, kind="bench", layers=[], accuracy=None, size=None, memory=None,
                    source=None, recipe=None, calibration=None)  # fmt: skip
    yield (
        "bench", bench,
        {"accuracy", "layers", "experts", "fallbacks", "indexer", "router", "activations",
         "memory"},
    )  # fmt: skip
    evaluated = without(small, kind="evaluate", layers=[], size=None, memory=None, latency=[],
                        sweeps=[], assembled=[])  # fmt: skip
    yield "evaluate", evaluated, {"experts", "fallbacks", "activations", "memory", "latency"}
    yield "calibrate only", without(small, accuracy=None), {"accuracy", "indexer", "router"}


@pytest.mark.parametrize(
    ("made", "absent"), [c[1:] for c in sparse()], ids=[c[0] for c in sparse()]
)
def test_what_was_not_measured_is_said(made: RunRecord, absent: set[str]) -> None:
    page = html.render(made)
    bodies = dict(re.findall(r'<section id="(\w+)"[^>]*>(.*?)</section>', page, re.S))
    said = {name for name, body in bodies.items() if "Not measured in this run." in body}
    assert said - {"verdict"} == absent
    for name in absent:
        assert f'href="#{name}" class="absent"' in page


def broken(made: RunRecord) -> RunRecord:
    """KL not a number, layer 5's error infinite, its expert 0's not a number."""
    assert made.accuracy is not None
    layers = list(made.layers)
    experts = layers[5].experts
    assert experts is not None
    bad = experts.model_copy(update={"error": [math.nan, *experts.error[1:]]})
    layers[5] = layers[5].model_copy(update={"experts": bad, "error": math.inf})
    accuracy = made.accuracy.model_copy(update={"kl_mean": math.nan})
    return without(made, layers=layers, accuracy=accuracy)


def test_not_a_number_is_shown(full: RunRecord) -> None:
    page = html.render(broken(full))
    shown = {path: shown for path, _, _, shown in numbers(page)}
    assert shown["record/accuracy/kl_mean"] == "nan"
    assert shown["record/layers/5/experts/error/0"] == "nan"  # and heads the worst experts


def test_text_from_records_is_escaped(full: RunRecord) -> None:
    assert full.recipe is not None
    made = without(
        full,
        command=HOSTILE,
        output=HOSTILE,
        notes=[HOSTILE],
        recipe=full.recipe.model_copy(update={"name": HOSTILE, "content": {HOSTILE: HOSTILE}}),
    )
    page = html.render(made)
    assert "<script>window" not in page
    assert "<img" not in page
    assert page.count("<script") == 2


def test_declared_is_said_first(full: RunRecord) -> None:
    page = html.render(record(layers=3, experts=4, windows=4, recipe="atlas-800t-a3"))
    assert "Declared, not measured" in page.split('<section id="accuracy"')[0]
    assert "Declared, not measured" not in html.render(full)


def _source(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _strings() -> dict[str, list[str]]:
    strings: dict[str, list[str]] = json.loads(_source("strings.json"))
    return strings


# Names and symbols that Chinese readers write alike.
SAME_IN_BOTH = {
    "fill.provenance",
    "p99",
    "part.mtp",
    "js.kind.mtp",
    "js.kl",
    "js.input_p999",
    "js.k",
    "js.window_kl",
    "js.window_top1",
}


def test_both_languages_say_the_same_fields() -> None:
    for key, both in _strings().items():
        english, chinese = (sorted(f for _, f, _, _ in Formatter().parse(s) if f) for s in both)
        assert english == chinese, key
        assert all(both) or key == "fill.provenance", key
        chinese_signs = re.search("[\u4e00-\u9fff]", both[1])
        assert bool(chinese_signs) != (key in SAME_IN_BOTH), f"{key} is not translated"


def test_every_string_is_used_and_none_is_missing() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("", "parts", "js")
        for path in (TEMPLATES / folder).iterdir()
        if path.name.endswith((".j2", ".js"))
    )
    known = _strings()
    # Keys made at run time: a prefix in the source, one of a few words after it.
    prefixes = ("how.", "from.", *re.findall(r'"([\w.]+\.)" ~', sources))
    prefixes += tuple(f"js.{p}" for p in re.findall(r"`([\w.]+\.)\$\{", sources))
    for key in known:
        bare = key.removeprefix("js.")
        used = f'"{key}"' in sources or f'"{bare}"' in sources or key.startswith(prefixes)
        assert used, f"{key} is not used"
    asked = re.findall(r'(?:\bt|m\.head|said|column)\("([\w.]*\w)"', sources)
    missing = {k for k in asked if k not in known and f"js.{k}" not in known}
    assert missing == set()


def test_no_page_is_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "report.html"
    html.write_page(record(layers=3, experts=4, windows=4), page)
    before = page.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        html.write_page(record(layers=4, experts=4, windows=4), page)
    assert page.read_bytes() == before


def test_no_number_is_rounded_twice() -> None:
    """What the page's data keeps is shown as the exact value is: 0.1074499 is not 0.1075."""
    rng = random.Random(5)
    exact = [0.107_449_9, -0.107_449_9, 1.000_049_99e-7, 9.999_499_9]
    exact += [rng.lognormvariate(0, 9) for _ in range(20_000)]
    for digits in (5, 6):
        for value in (v for v in exact if abs(v) < 10**digits):  # beyond, all digits are shown
            kept = view.six(value, digits)
            assert isinstance(kept, float)
            assert text.significant(kept) == text.significant(value)
            assert math.isclose(kept, value, rel_tol=10 ** (1 - digits))


def test_every_role_has_a_colour_of_its_own() -> None:
    """In one bar of a checkpoint by role, and on every theme."""
    for theme in re.findall(r"\{[^{}]*--c0:[^{}]*\}", _source("css/base.css")):
        colours = dict(re.findall(r"(--c\d+): (#\w+)", theme))
        assert len(set(colours.values())) == len(colours) == len(Role)
    drawn = re.findall(r"\.(c\d+) \{ background-color: var\(--(c\d+)\)", _source("css/charts.css"))
    assert {name for name, var in drawn if name == var} == {f"c{i}" for i in range(len(Role))}
    steps = re.findall(r"% (\d+) \}\}", "".join(_source(f"parts/{n}.html.j2") for n in PARTS))
    assert set(steps) == {str(len(Role))}
