"""Numbers as people read them: golden strings, and that no reading is off by more than rounding."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports import text

GOLDEN = [
    ("sig", 0.0123456, "0.01235"),
    ("sig", 9.99996, "10.00"),
    ("sig", 1.2e-5, "1.200e−5"),
    ("sig", 0.0, "0"),
    ("sig", -0.5, "−0.5000"),
    ("sig", 71232.0, "71232"),
    ("sig", math.nan, "nan"),
    ("pct", 0.9712, "97.12 %"),
    ("pct", 0.99971, "99.971 %"),
    ("pct", 1.0, "100.00 %"),
    ("int", 1048576, "1,048,576"),
    ("int", math.nan, "nan"),
    ("size", 401_412_003_840, "401.4 GB"),
    ("size", 999, "999 B"),
    ("size", 999_999, "1.000 MB"),
    ("time", 0.00142, "1.42 ms"),
    ("time", 61.2, "1 min 01 s"),
    ("time", 7800, "2 h 10 min"),
    ("time", 3e-8, "30.0 ns"),
    ("time", 59.99, "60.0 s"),
    ("time", 0.0, "0 ns"),
    ("times", 3.7561, "3.76×"),
    ("bits", 4.125, "4.125"),
    ("bits", 8.0, "8"),
    ("rate", 12345.6, "12,346 /s"),
    ("flop", 64.1e9, "64.1 Gflop"),
    ("points", 0.00218, "0.22 pp"),
    ("points", 0.00043, "0.043 pp"),
]


@pytest.mark.parametrize(("form", "value", "expected"), GOLDEN)
def test_golden(form: str, value: float, expected: str) -> None:
    assert text.FORMATS[form](value).replace("\u202f", " ") == expected


@given(st.floats(1e-12, 1e15))
def test_significant_reads_back(value: float) -> None:
    shown = float(text.significant(value).replace("−", "-"))
    assert abs(shown - value) <= 0.5001 * 10 ** (math.floor(math.log10(value)) - 3)


@given(st.integers(0, 10**16))
def test_size_reads_back(value: int) -> None:
    number, unit = text.size(value).split("\u202f")
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert math.isclose(float(number.replace(",", "")) * factor, value, rel_tol=6e-4, abs_tol=0.5)


@given(st.floats(1e-9, 59.9))
def test_seconds_reads_back(value: float) -> None:
    number, unit = text.seconds(value).split("\u202f")
    factor = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert math.isclose(float(number) * factor, value, rel_tol=6e-3)


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (0.001, "sig", "+0.00100"),
        (-0.0025, "pct", "−0.25 pp"),
        (0, "size", "0 B"),
        (-1500, "size", "−1.500 kB"),
    ],
)
def test_signed(value: float, form: str, expected: str) -> None:
    assert text.signed(value, form).replace("\u202f", " ") == expected


def test_no_format_breaks_a_line() -> None:
    for form, show in text.FORMATS.items():
        assert not re.search(r"[ \n]", show(0.5)), form
