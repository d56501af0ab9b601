"""One decoder layer in memory: its vectors, and its matrices as floats or as codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from glm5q import quant
from glm5q.types import ActivationGrid, CodedScheme, StaticFp8

AT_ONCE = 16  # matrices of a stack dequantized at once on a GPU


@dataclass(frozen=True)
class Codes:
    """A quantized matrix: int8 codes [..., out, in], float32 scale [..., out, groups], scheme.

    Fp8Scheme: e4m3 codes, scale [..., out / 128, in / 128]. `input_scale` is the static activation
    scale where the scheme has one, the same for a whole stack.
    """

    codes: Tensor
    scale: Tensor
    scheme: CodedScheme
    input_scale: float | None = None

    def activation(self) -> ActivationGrid | None:
        """Returns the grid its input meets in deployment."""
        if self.scheme.activation != "fp8_static":
            return self.scheme.activation
        if self.input_scale is None:
            raise ValueError("fp8_static without an input_scale")
        return StaticFp8(self.input_scale)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Returns float32 2^exponents of int8 exponents, exactly: a device's exp2 need not be."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


@dataclass(frozen=True)
class Fold:
    """What a matrix was multiplied by before it was quantized: 2^rows and 2^columns, exactly.

    int8 exponents [..., out] and [..., in], None for none; another matrix has the inverse.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None

    def of(self, matrix: Tensor, index: int | slice = slice(None)) -> Tensor:
        """Returns `matrix` [..., out, in] folded as entry `index` of a stack is, in its dtype."""
        for exponents, axis in ((self.rows, -1), (self.columns, -2)):
            if exponents is not None:
                power = powers_of_two(exponents[index].to(matrix.device)).unsqueeze(axis)
                matrix = matrix * power.to(matrix.dtype)
        return matrix


@dataclass(frozen=True)
class Layer:
    """A layer by path relative to it. Vectors carry `.weight` or `.bias`, matrices neither.

    Routed experts are stacked: `mlp.experts.gate_up_proj` [experts, 2 x width, hidden] and
    `mlp.experts.down_proj` [experts, hidden, width]. Matrices named in `from_fp8` were FP8 blocks
    and are float32 here, for one rounding to whatever they become; `fp8_scales` are the scales of
    those that are not stacks, so that FP8 can be had back as it was. `folds` are a quantized
    layer's, by matrix: where it is not the source's layer rounded but an equal one.
    """

    number: int
    vectors: dict[str, Tensor]
    matrices: dict[str, Tensor | Codes]
    from_fp8: frozenset[str] = frozenset()
    fp8_scales: dict[str, Tensor] = field(default_factory=dict)
    folds: dict[str, Fold] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Layer:
        """Returns the layer with its matrices on `device`, as they are."""
        moved: dict[str, Tensor | Codes] = {}
        for path, matrix in self.matrices.items():
            if isinstance(matrix, Tensor):
                moved[path] = matrix.to(device, non_blocking=True)
            else:
                moved[path] = replace(
                    matrix, codes=matrix.codes.to(device), scale=matrix.scale.to(device)
                )
        if str(device).startswith("cuda"):
            torch.cuda.synchronize()  # its host memory goes to the next layer
        return replace(self, matrices=moved)

    def floats(self, path: str) -> Tensor:
        """Returns a matrix that has no codes, as a source's have none."""
        matrix = self.matrices[path]
        if not isinstance(matrix, Tensor):
            raise TypeError(f"{path}: a source layer holds codes")
        return matrix

    def with_matrices(self, matrices: dict[str, Tensor | Codes]) -> Layer:
        return replace(self, matrices={**self.matrices, **matrices})


class Multiplies(Protocol):
    """A matrix, or a stack of experts', that is no tensor; see calibrate.products."""

    def product(self, x: Tensor, offsets: Tensor, tokens: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Weights:
    """A layer ready to run: floating-point matrices and the activation grid each one meets.

    `coded` are those that stay codes, and are in neither of the other two.
    """

    vectors: dict[str, Tensor]
    matrices: dict[str, Tensor]
    activation: dict[str, ActivationGrid | None]
    coded: dict[str, Multiplies] = field(default_factory=dict)


Expand = Callable[[Tensor, Tensor, torch.dtype], Tensor]  # as quant.dequantize


def _dequantized(
    codes: Tensor, scale: Tensor, stored: torch.dtype, dtype: torch.dtype, expand: Expand
) -> Tensor:
    """Codes times scale; of a stack on a GPU some at a time, as float32 takes four times codes."""
    if not codes.is_cuda or codes.dim() < 3:
        return expand(codes, scale, stored).to(dtype)
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for value, code, step in zip(*(t.split(AT_ONCE) for t in (values, codes, scale)), strict=True):
        value.copy_(expand(code, step, stored))
    return values


def runnable(
    layer: Layer,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    stored_dtype: torch.dtype | None = None,
    quantize_activations: bool = True,
    expand: Expand = quant.dequantize,
    keep: Callable[[str, Codes], Multiplies | None] = lambda _path, _codes: None,
) -> Weights:
    """Returns the layer's weights as `dtype` on `device`, codes times scale.

    `stored_dtype` rounds dequantized matrices there first, as loaders that hand out bfloat16 do.
    With `quantize_activations` False the forward is weight-only. `expand` may be a quicker way to
    the same values; `keep` returns what multiplies a path's codes as they are, or None.
    """
    matrices: dict[str, Tensor] = {}
    activation: dict[str, ActivationGrid | None] = {}
    coded: dict[str, Multiplies] = {}
    for path, matrix in layer.matrices.items():
        if isinstance(matrix, Codes) and (ready := keep(path, matrix)):
            coded[path] = ready
            continue
        activation[path] = None
        if isinstance(matrix, Codes):
            matrices[path] = _dequantized(
                matrix.codes.to(device), matrix.scale.to(device), stored_dtype or dtype, dtype,
                expand,
            )  # fmt: skip
            if quantize_activations:
                activation[path] = matrix.activation()
        else:
            matrices[path] = matrix.to(device=device, dtype=dtype)
    vectors = {path: vector.to(device=device).float() for path, vector in layer.vectors.items()}
    return Weights(vectors, matrices, activation, coded)
