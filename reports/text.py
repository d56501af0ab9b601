"""Numbers as people read them: one function a unit, each from the exact value to a short string."""

from __future__ import annotations

import math
from collections.abc import Callable

_MINUS = "\N{MINUS SIGN}"
_NARROW = "\N{NARROW NO-BREAK SPACE}"


def significant(value: float, digits: int = 4) -> str:
    """`0.01234`, `5.120`, `1.23e-5`: `digits` significant ones, no exponent from 1e-4 to 1e6."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if -4 <= exponent < 6:
        return f"{value:.{max(digits - 1 - exponent, 0)}f}".replace("-", _MINUS)
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(power)}".replace("-", _MINUS)


def percent(value: float) -> str:
    """`97.12 %` of a share; three decimals above 99.9 %, where the second would hide the rest."""
    if not math.isfinite(value):
        return str(value)
    near = 0.999 < value < 1
    return f"{value * 100:.{3 if near else 2}f}{_NARROW}%".replace("-", _MINUS)


def count(value: float) -> str:
    """`1,048,576`."""
    if not math.isfinite(value):
        return str(value)
    return f"{int(value):,}".replace("-", _MINUS)


def size(value: float) -> str:
    """`396.0 GB`, decimal units, as disks and model cards count."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor * 0.9995:
            return f"{significant(value / factor, 4)}{_NARROW}{unit}"
    return f"{count(value)}{_NARROW}B"


def seconds(value: float) -> str:
    """`1.42 s`, `84.0 ms`, `12.3 µs`, `2 h 05 min`."""
    if not math.isfinite(value):
        return str(value)
    if value >= 3600:
        minutes = round(value / 60)
        return f"{minutes // 60}{_NARROW}h {minutes % 60:02d}{_NARROW}min"
    if value >= 60:
        whole = round(value)
        return f"{whole // 60}{_NARROW}min {whole % 60:02d}{_NARROW}s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= factor * 0.9995:
            return f"{significant(value / factor, 3)}{_NARROW}{unit}"
    return f"{significant(value / 1e-9, 3)}{_NARROW}ns"


def decade(value: float) -> str:
    """A power of ten of a second on an axis: `100 µs`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= factor * 0.9995:
            return f"{value / factor:.0f}{_NARROW}{unit}"
    return f"{value / 1e-9:.0f}{_NARROW}ns"


def times(value: float) -> str:
    """`3.80×`."""
    return f"{significant(value, 3)}×"


def bits(value: float) -> str:
    """`4.125`: as many decimals as a bit width needs."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def rate(value: float) -> str:
    """A second: `12,340 /s`."""
    shown = f"{value:,.0f}" if value >= 100 else significant(value, 3)
    return f"{shown}{_NARROW}/s"


def flop(value: float) -> str:
    """`12.3 Gflop`."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor * 0.9995:
            return f"{significant(value / factor, 3)}{_NARROW}{unit}flop"
    return f"{count(value)}{_NARROW}flop"


def points(value: float) -> str:
    """A difference of two shares: `1.20 pp`, `0.043 pp`."""
    return f"{value * 100:.{2 if abs(value) >= 0.001 else 3}f}{_NARROW}pp"


def signed(value: float, form: str) -> str:
    """A difference in the units of `form`, its sign always shown."""
    if not math.isfinite(value):
        return str(value)
    sign = "+" if value > 0 else _MINUS if value < 0 else ""
    if form == "sig":
        return sign + significant(abs(value), 3)
    return sign + FORMATS["points" if form == "pct" else form](abs(value))


def plain(value: float) -> str:
    """An integer as it is: layer 12, k 2048."""
    if not math.isfinite(value):
        return str(value)
    return str(int(value))


FORMATS: dict[str, Callable[[float], str]] = {
    "sig": significant,
    "pct": percent,
    "int": count,
    "size": size,
    "time": seconds,
    "times": times,
    "bits": bits,
    "rate": rate,
    "flop": flop,
    "points": points,
    "plain": plain,
}
