"""Powers of two that went from one matrix or norm into those that read it, found from the files.

A quantizer may hand on another checkpoint than the source that computes the same: a norm's gains,
or rows of one matrix, over 2^k, and the columns that multiply them times it. The divided side says
k by itself, since no rounding halves a whole row; every reader then has to make up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from glm5q.verify.model import Linear, Model
from glm5q.verify.source import Source

Read = Callable[[Linear], Tensor | None]
ReadVector = Callable[[str], Tensor | None]
# What reads a norm's output, by the norm: all of them, or the layer computes something else.
READERS = {
    "input_layernorm.weight": ("q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj"),
    "post_attention_layernorm.weight": ("gate", "gate_proj", "up_proj"),
    "self_attn.q_a_layernorm.weight": ("q_b_proj", "wq_b"),
}
NORM_OF = {reader: norm for norm, readers in READERS.items() for reader in readers}
OFF, NOISES = 0.3, 6.0  # a column's slope against its source's, beside so many standard errors


class FoldedSource(Source):
    """The source as the checkpoint folded it; `read` and `vector` give what lies in its files."""

    def __init__(self, root: Path, model: Model, read: Read, vector: ReadVector) -> None:
        super().__init__(root)
        self._linears = {x.name: x for layer in model.layers for x in model.linears(layer)}
        self._value = int(model.raw["v_head_dim"])
        self._nope = int(model.raw["qk_nope_head_dim"])
        self._read, self._vector = read, vector
        self._last: tuple[str, Tensor | None] = ("", None)
        self.folded: set[str] = set()  # what was asked for and is not as the source has it

    def weight(self, linear: Linear) -> tuple[Tensor, str] | None:
        original = super().weight(linear)
        if original is None:
            return None
        matrix, dtype = original
        rows, columns = self.rows(linear), self.columns(linear)
        if rows is not None or columns is not None:
            self.folded.add(linear.name)
        if rows is not None:
            matrix = torch.ldexp(matrix, rows.unsqueeze(1)).to(matrix.dtype)
        if columns is not None:
            matrix = torch.ldexp(matrix, columns).to(matrix.dtype)
        return matrix, dtype

    def tensor(self, name: str) -> Tensor:
        original = super().tensor(name)
        mine = self._vector(name) if name.split(".", 3)[-1] in READERS else None
        if mine is None or mine.shape != original.shape:
            return original
        power = _power(mine, original)
        if bool(power.any()):
            self.folded.add(name)
        return torch.ldexp(original, power).to(original.dtype)

    def said(self) -> str:
        """Returns how many tensors are the source's but for powers of two; nothing if none is."""
        return f", {len(self.folded)} tensors but for folded powers of two" if self.folded else ""

    def rows(self, linear: Linear) -> Tensor | None:
        """Returns k int32 [out] of a matrix whose rows were multiplied by 2^k, None where none is.

        Only those that nothing but a column of the next matrix reads: up_proj's and values'.
        """
        projection = linear.name.rpartition(".")[2]
        if projection not in ("up_proj", "kv_b_proj"):
            return None
        if self._last[0] != linear.name:
            self._last = (linear.name, self._found(linear))
        return self._last[1]

    def _found(self, linear: Linear) -> Tensor | None:
        mine, original = self._read(linear), super().weight(linear)
        if mine is None or original is None:
            return None
        columns = self.columns(linear)
        exact = (
            original[0].float() if columns is None else torch.ldexp(original[0].float(), columns)
        )
        size = torch.linalg.vector_norm(mine.float(), dim=1)
        power = _power(size, torch.linalg.vector_norm(exact, dim=1))
        if linear.kind == "kv_b":
            power.view(-1, self._nope + self._value)[:, : self._nope] = 0
        return power if bool(power.any()) else None

    def columns(self, linear: Linear) -> Tensor | None:
        """Returns k int32 [in] that a matrix has to have in its columns, None where none is."""
        prefix, _, projection = linear.name.rpartition(".")
        if projection in NORM_OF:
            layer = ".".join(linear.name.split(".", 3)[:3])
            name = f"{layer}.{NORM_OF[projection]}"
            mine = self._vector(name)
            power = None if mine is None else -_power(mine, super().tensor(name))
        elif projection == "down_proj":
            rows = self.rows(self._linears[prefix + ".up_proj"])
            power = None if rows is None else -rows
        elif projection == "o_proj":
            rows = self.rows(self._linears[prefix + ".kv_b_proj"])
            values = None if rows is None else rows.view(-1, self._nope + self._value)
            power = None if values is None else -values[:, self._nope :].flatten()
        else:
            return None
        return power if power is not None and bool(power.any()) else None


def _power(mine: Tensor, original: Tensor) -> Tensor:
    """Returns the int32 k for which original x 2^k is nearest to mine, 0 where either is 0."""
    ratio = mine.double().abs() / original.double().abs()
    usable = torch.isfinite(ratio) & (ratio > 0)
    return torch.where(usable, ratio, torch.ones_like(ratio)).log2().round().int()


def unlike(rounded: Tensor, exact: Tensor, step: Tensor, columns: Tensor) -> list[int]:
    """Returns the folded columns of a rounded matrix that are not their source's, by number.

    `exact` [out, in] is the source as folded, `step` [out, groups] the scale, `columns` the powers.
    A column no further than plain rounding goes is its source's, all zeros too.
    """
    square = exact.square().sum(0).clamp(min=1e-30)
    slope = (rounded * exact).sum(0) / square
    steps = step.repeat_interleave(exact.shape[1] // step.shape[1], 1)
    allowed = OFF + NOISES * (steps.square() / 12 * exact.square()).sum(0).sqrt() / square
    plain = ((rounded - exact).abs() <= 0.51 * steps.abs()).all(0)
    bad = (columns != 0) & (square > 1e-30) & ((slope - 1).abs() > allowed) & ~plain
    return [int(index) for index in bad.nonzero().flatten()]
