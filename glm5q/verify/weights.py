"""One pass over every matrix: layout, scales, codes, and the distance from the source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5q.verify import layouts
from glm5q.verify.files import Files
from glm5q.verify.folds import FoldedSource, unlike
from glm5q.verify.layouts import Held
from glm5q.verify.model import Linear

GRID_TIMES = 4.0  # second-order rounding measured at most twice plain rounding's weight error
FP8_BOUND = 0.05  # e4m3 rounds by at most 2^-4, 0.026 in the mean of gaussian weights
FEWEST_CODES, ENOUGH = 12, 4096  # of 16, in a matrix of at least so many weights
BIAS_TOLERANCE = 1e-4


@dataclass
class Found:
    """Problems by check, and squared sums (|q - s|^2, |s|^2) by module for the record's claims."""

    scales: list[str] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    squares: dict[str, list[float]] = field(default_factory=dict)
    matrices: int = 0

    def add(self, module: str, difference: float, reference: float) -> None:
        sums = self.squares.setdefault(module, [0.0, 0.0])
        sums[0] += difference
        sums[1] += reference


def check_matrix(
    files: Files, form: str, linear: Linear, what: Held, source: FoldedSource | None, found: Found
) -> None:
    """Adds what is wrong with one matrix to `found`. Its tensors are there, of the right shapes."""
    found.matrices += 1
    if what.kind == "float":
        _check_kept(files, linear, source, found)
        return
    codes, scale = layouts.unpacked(files, form, linear, what)
    if not check_codes(linear, what, codes, scale, source, found):
        return
    found.scales.extend(_activation_scales(files, form, linear, what))
    found.codes.extend(_extras(files, form, linear, what, codes, scale))


def check_codes(
    linear: Linear,
    what: Held,
    codes: Tensor,
    scale: Tensor,
    source: FoldedSource | None,
    found: Found,
) -> bool:
    """Adds what is wrong with codes [out, in] and their scale; False if the scale is no scale."""
    usable = scale != 0 if what.kind == "int4" else scale > 0  # int4's may turn a group round
    bad = ~(torch.isfinite(scale) & usable)
    if bool(bad.any()):
        first = [int(i) for i in bad.nonzero()[0]]
        value = float(scale[tuple(first)])
        found.scales.append(f"{linear.name}: scale {value:g} at {first} ({int(bad.sum())} bad)")
        return False
    found.codes.extend(_codes(linear, what, codes))
    if source is not None:
        _check_distance(linear, what, codes, scale, source, found)
    return True


def _codes(linear: Linear, what: Held, codes: Tensor) -> Iterator[str]:
    name = linear.name
    if what.kind == "fp8":
        if not bool(torch.isfinite(codes.float()).all()):
            yield f"{name}: an e4m3 code is NaN"
        return
    low, high = (-8, 7) if what.kind == "int4" else (-127, 127)
    least, most = int(codes.min()), int(codes.max())
    if least < low or most > high:
        yield f"{name}: codes from {least} to {most}, {what.kind} goes from {low} to {high}"
    if what.kind == "int4" and codes.numel() >= ENOUGH:
        used = int(torch.bincount((codes.flatten() - least).long()).count_nonzero())
        if used <= FEWEST_CODES:
            yield f"{name}: uses {used} of 16 codes"


def _extras(
    files: Files, form: str, linear: Linear, what: Held, codes: Tensor, scale: Tensor
) -> Iterator[str]:
    """What a format holds beside codes and scale."""
    name = linear.name
    if what.packed:
        shape = files.read(name + ".weight_shape").tolist()
        if shape != list(linear.shape):
            yield f"{name}: weight_shape {shape}, the matrix is {list(linear.shape)}"
    if form == "modelslim":
        yield from _modelslim_extras(files, linear, what, codes, scale)


def _modelslim_extras(
    files: Files, linear: Linear, what: Held, codes: Tensor, scale: Tensor
) -> Iterator[str]:
    """weight_offset must be zero; scale_bias 8 x the sum of code x scale over its columns."""
    name = linear.name
    if bool(files.read(name + ".weight_offset").any()):
        yield f"{name}: weight_offset is not zero"
    if what.kind != "int4":
        return
    stored = files.read(name + ".scale_bias").double()
    parts = layouts.dequantized(codes, scale, "int4").double().chunk(stored.shape[1], 1)
    wanted = torch.stack([8 * part.sum(1) for part in parts], 1)
    scale_of_it = 8 * scale.double() * math.sqrt(codes.shape[1] / stored.shape[1])
    if bool(((stored - wanted).abs() > BIAS_TOLERANCE * (wanted.abs() + scale_of_it)).any()):
        yield f"{name}: scale_bias is not 8 x the sum of the row's weights"


def _activation_scales(files: Files, form: str, linear: Linear, what: Held) -> Iterator[str]:
    """w4afp8's static scales: finite, positive; SGLang raises where w1 and w3 differ by 1e-5."""
    if form != "sglang-w4afp8" or what.kind != "int4":
        return
    prefix, projection = linear.name.rsplit(".", 1)
    mine = f"{prefix}.{layouts.INPUT_SCALES[projection]}.input_scale"
    value = float(files.read(mine))
    if not (math.isfinite(value) and value > 0):
        yield f"{mine} is {value:g}"
    other = f"{prefix}.w3.input_scale"
    if projection == "gate_proj" and other in files.entries:
        up = float(files.read(other))
        if abs(value - up) > 1e-5 * max(abs(value), abs(up)):
            yield f"{prefix}: input scales of w1 {value:g} and w3 {up:g} differ"


def _check_distance(
    linear: Linear, what: Held, codes: Tensor, scale: Tensor, source: FoldedSource, found: Found
) -> None:
    """Holds a dequantized matrix to the source within what its own grid's rounding allows."""
    original = source.weight(linear)
    if original is None:
        found.weights.append(f"{linear.name}: not in the source")
        return
    exact = original[0].float()
    rounded = layouts.dequantized(codes, scale, what.kind)
    difference, reference = _square(rounded - exact), _square(exact)
    found.add(module_of(linear), difference, reference)
    error = math.sqrt(difference / max(reference, 1e-30))
    bound = FP8_BOUND if what.kind == "fp8" else _grid_bound(codes, scale, reference)
    if error > bound:
        found.weights.append(
            f"{linear.name}: {error:.3f} from the source, its grid allows {bound:.3f}"
        )
    power = source.columns(linear)
    if power is not None and what.kind != "fp8":
        bad = unlike(rounded, exact, scale, power)
        if bad:
            found.weights.append(f"{linear.name}: column {bad[0]} lacks 2^{int(power[bad[0]])}")


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _grid_bound(codes: Tensor, scale: Tensor, reference: float) -> float:
    """GRID_TIMES plain rounding's relative error, whose mean square is scale^2 / 12.

    Groups of zeros have no error, whatever their scale.
    """
    groups = scale.shape[1]
    used = codes.unflatten(1, (groups, -1)).ne(0).any(-1)
    square = (scale.double().square() * used).sum() * (codes.shape[1] / groups) / 12
    return GRID_TIMES * math.sqrt(float(square) / max(reference, 1e-30)) + 1e-6


def _check_kept(files: Files, linear: Linear, source: FoldedSource | None, found: Found) -> None:
    """A kept matrix is finite and, bit for bit, the source's in its dtype (FP8: rounded)."""
    name = linear.name + ".weight"
    mine = files.read(name)
    if not bool(torch.isfinite(mine).all()):
        found.kept.append(f"{name}: not finite")
    if source is None:
        return
    original = source.weight(linear)
    if original is None:
        found.kept.append(f"{name}: not in the source")
    elif not torch.equal(mine, original[0].to(mine.dtype)):
        found.kept.append(f"{name}: kept, but not the source's values")
    elif original[1] == "F32" and mine.dtype != torch.float32:
        found.kept.append(f"{name}: F32 in the source, {files.entries[name].dtype} here")


def held_weight(files: Files, form: str, linear: Linear, what: Held | None) -> Tensor | None:
    """Returns what lies on disk for a linear layer, dequantized; None where it is not whole."""
    if what is None or not whole(files, form, linear, what):
        return None
    if what.kind == "float":
        return files.read(linear.name + ".weight")
    return layouts.dequantized(*layouts.unpacked(files, form, linear, what), what.kind)


def whole(files: Files, form: str, linear: Linear, what: Held) -> bool:
    """Whether all tensors of a linear layer are there, in the right dtypes and shapes."""
    return all(
        name in files.entries
        and files.entries[name].shape == shape
        and files.entries[name].dtype in kinds
        for name, (kinds, shape) in layouts.layout(form, linear, what).items()
    )


def module_of(linear: Linear) -> str:
    """`layer path` as a record names modules: experts stacked, gate and up together."""
    _, _, layer, path = linear.name.split(".", 3)
    if linear.expert is not None:
        down = path.endswith("down_proj")
        path = "mlp.experts." + ("down_proj" if down else "gate_up_proj")
    return f"{layer} {path}"
