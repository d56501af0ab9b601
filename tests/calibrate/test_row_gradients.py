"""Gradients of row_gradients' own: the interpreter here, the same source on a GPU."""

from __future__ import annotations

import pytest

from tests.calibrate.interpreted import answer

pytest.importorskip("triton", reason="not run: no Triton here")


def test_gradients_are_autograds_of_float64() -> None:
    found: dict[str, float] = answer("interpret_gradients.py")
    assert len(found) == 9
    for name, difference in found.items():
        assert difference < 2e-5, name
