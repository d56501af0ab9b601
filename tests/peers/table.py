"""Rows of the comparison: means, standard errors, and differences paired over the same windows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Mean:
    """A mean over windows and its standard error, in the windows' unit."""

    mean: float
    standard_error: float


def mean(values: Sequence[float]) -> Mean:
    """Returns the mean and its standard error; raises ValueError for fewer than two values."""
    count = len(values)
    if count < 2:
        raise ValueError("a standard error takes two windows or more")
    middle = math.fsum(values) / count
    variance = math.fsum((value - middle) ** 2 for value in values) / (count - 1)
    return Mean(middle, math.sqrt(variance / count))


def paired(values: Sequence[float], other: Sequence[float]) -> Mean:
    """Returns the mean of values - other, window by window."""
    return mean([mine - theirs for mine, theirs in zip(values, other, strict=True)])


def against(
    window_kl: Mapping[str, Sequence[float]], ours: Sequence[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns, for each row, its difference to each of `ours` and their quotient.

    Positive differences and ratios over 1 say that ours is closer to the source.
    """
    return {
        name: {
            own: asdict(paired(values, window_kl[own]))
            | {"ratio": mean(values).mean / mean(window_kl[own]).mean}
            for own in ours
            if own != name
        }
        for name, values in window_kl.items()
    }


def lines(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the table as text: KL and its standard error in 1e-3 nat, best first."""
    found = [f"{'row':34} {'KL 1e-3':>8} {'SE':>6} {'seconds':>8} {'GB':>5}"]
    for row in sorted(rows, key=lambda row: float(str(row["kl_mean"]))):
        kl, error = (1e3 * float(str(row[key])) for key in ("kl_mean", "kl_se"))
        seconds, peak = float(str(row["quantize_s"])), float(str(row["peak_rss_bytes"])) / 1e9
        found.append(f"{row['name']!s:34} {kl:8.3f} {error:6.3f} {seconds:8.0f} {peak:5.1f}")
    return found
