"""Products with quantized matrices in ONNX, and the small functions around them.

The arithmetic of the quantized stream in float32: per-token int8 activations through MatMulInteger,
fp8 ones rounded through e4m3 into MatMulNBits. MatMulInteger is fed int8 against int8: with uint8
and zero point 128, ONNX Runtime 1.32 on an AVX2 CPU without VNNI saturates its 16-bit sums (off by
up to 89,074 in a [48, 256] x [256, 64] product of random codes; int8 against int8 was exact).
"""

from __future__ import annotations

import torch

from glm5q.formats.onnx_graph import CONTRIB, FLOAT, FLOAT8, INT8, Graph
from glm5q.layer import Codes
from glm5q.types import IntScheme


class Product:
    """x times a matrix of codes: `prepare` puts x on its activation grid, the call multiplies."""

    def __init__(self, graph: Graph, name: str, matrix: Codes) -> None:
        if not isinstance(matrix.scheme, IntScheme):
            raise TypeError(f"{name}: {matrix.scheme.label()} has no ONNX form here")
        self.g, self.name, self.matrix, self.scheme = graph, name, matrix, matrix.scheme

    def prepare(self, x: str) -> list[str]:
        """Returns [int8 codes, scale] for int8 activations, else [x rounded through e4m3]."""
        if self.scheme.activation is None:
            return [x]
        g = self.g
        axis = g.constant([-1], torch.int64)
        absmax = g.op("ReduceMax", g.op("Abs", x), axis, keepdims=1)
        integer = self.scheme.activation == "int8"
        scale = g.op("Div", absmax, g.constant(127.0 if integer else 448.0))
        positive = g.op("Greater", absmax, g.constant(0.0))
        scale = g.op("Where", positive, scale, g.constant(1.0))
        scaled = g.op("Div", x, scale)
        if integer:
            return [g.op("Cast", g.op("Round", scaled), to=INT8), scale]
        clamped = g.op("Clip", scaled, g.constant(-448.0), g.constant(448.0))
        rounded = g.op("Cast", g.op("Cast", clamped, to=FLOAT8), to=FLOAT)
        return [g.op("Mul", rounded, scale)]

    def __call__(self, prepared: list[str]) -> str:
        if self.scheme.activation == "int8":
            return self._integers(*prepared)
        return self._nibbles(prepared[0]) if self.scheme.bits == 4 else self._floats(prepared[0])

    def _integers(self, codes: str, scale: str) -> str:
        """MatMulInteger, a batch of one a group; sums of groups are scaled, then added."""
        g, groups = self.g, self.matrix.scale.shape[-1]
        weight = self.matrix.codes.unflatten(-1, (groups, -1)).permute(1, 2, 0)  # [groups, in, out]
        scales = self.matrix.scale.float().t().unsqueeze(1)  # [groups, 1, out]
        if groups == 1:
            stored = g.weight(self.name + ".codes", weight[0])
            sums = g.op("Cast", g.op("MatMulInteger", codes, stored), to=FLOAT)
            product = g.op("Mul", sums, g.weight(self.name + ".scale", scales[0]))
            return g.op("Mul", product, scale)
        parts = g.op("Reshape", codes, g.constant([-1, groups, weight.shape[1]], torch.int64))
        parts = g.op("Transpose", parts, perm=[1, 0, 2])
        sums = g.op("MatMulInteger", parts, g.weight(self.name + ".codes", weight))
        scaled = g.op("Mul", g.op("Cast", sums, to=FLOAT), g.weight(self.name + ".scale", scales))
        product = g.op("ReduceSum", scaled, g.constant([0], torch.int64), keepdims=0)
        return g.op("Mul", product, scale)

    def _nibbles(self, x: str) -> str:
        """MatMulNBits in float32: two codes a byte, low first, zero point 8.

        accuracy_level 4 would round x once more, to int8 a block.
        """
        rows, columns = self.matrix.codes.shape
        groups = self.matrix.scale.shape[-1]
        shifted = (self.matrix.codes + 8).to(torch.uint8)
        packed = (shifted[:, 0::2] | (shifted[:, 1::2] << 4)).view(rows, groups, -1)
        return self.g.op(
            "MatMulNBits",
            x,
            self.g.weight(self.name + ".codes", packed),
            self.g.weight(self.name + ".scale", self.matrix.scale.float()),
            domain=CONTRIB,
            K=columns,
            N=rows,
            bits=4,
            block_size=columns // groups,
            accuracy_level=0,
        )

    def _floats(self, x: str) -> str:
        """int8 codes against float activations."""
        g = self.g
        codes = g.op("Cast", g.weight(self.name + ".codes", self.matrix.codes.t()), to=FLOAT)
        scale = g.weight(self.name + ".scale", self.matrix.scale.float().t())
        return g.op("Mul", g.op("MatMul", x, codes), scale)


def rms_norm(g: Graph, x: str, weight: str, eps: float) -> str:
    mean = g.op("ReduceMean", g.op("Mul", x, x), g.constant([-1], torch.int64), keepdims=1)
    root = g.op("Sqrt", g.op("Add", mean, g.constant(eps)))
    return g.op("Mul", g.op("Div", x, root), weight)


def silu_times(g: Graph, gate: str, up: str) -> str:
    return g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)


def split(g: Graph, x: str, axis: int, *sizes: int) -> list[str]:
    return g.ops("Split", x, g.constant(list(sizes), torch.int64), outputs=len(sizes), axis=axis)
