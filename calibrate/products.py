"""What a quantized stack gives for rows sorted by expert, as deployment multiplies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from calibrate.rows import dequantize, round_activation
from fused_ops.expert_gemm.reference import expert_gemm
from glm5q.layer import Codes
from glm5q.quant import FP8
from glm5q.types import IntScheme

PART = 32  # matrices of a stack dequantized at a time

# Matrices that a forward only multiplies by; of others it takes parts, or the dtype.
PLAIN = {
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.o_proj",
    "self_attn.indexer.wq_b",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
}


@dataclass(frozen=True)
class Stack:
    """A quantized stack, or one matrix as a stack of one, made ready to multiply.

    Where a GPU's cores take the codes in bytes, `bytes` are those, e4m3 or int8 [experts, out, in],
    and `scale` [experts, groups, out]: 1.7 times as fast as bfloat16 on an H200, and no weight or
    activation is rounded to bfloat16 on the way. Elsewhere both are None.
    """

    codes: Codes
    bytes: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def of(cls, codes: Codes) -> Stack:
        """Returns the stack of int8 codes [experts, out, in], with bytes if they can be used."""
        launch, dtype = _launch(), _operand(codes)
        if launch is None or dtype is None or not codes.codes.is_cuda:
            return cls(codes)
        weight, scale = launch.code_bytes(codes.codes, dtype), codes.scale.mT.contiguous()
        taken = launch.takes(weight[0, :1], weight, scale)
        return cls(codes, weight, scale) if taken else cls(codes)

    def __len__(self) -> int:
        return len(self.codes.codes)

    def product(self, x: Tensor, offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Returns [rows, out] of rows of x [.., in], rounded on the stack's activation grid first.

        `offsets` int64 [experts + 1] bounds each expert's rows. With `tokens` int64 [rows], x holds
        the tokens: a row's grid is its own, so rounding comes before the eightfold copy.
        """
        if self.bytes is not None and x.dtype == torch.bfloat16:
            rows, step = _launch().round_rows(x, self.bytes.dtype)
            if tokens is not None:
                rows = rows.view(torch.int8).index_select(0, tokens).view(rows.dtype)
                step = step.index_select(0, tokens)
            made: Tensor = _launch().code_gemm(
                rows, self.bytes, offsets.to(x.device), x_scale=step, weight_scale=self.scale
            )
            return made
        rows = round_activation(x, self.codes.activation())
        return self._dequantized(rows if tokens is None else rows.index_select(0, tokens), offsets)

    def _dequantized(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Multiplies PART matrices at a time: floats take four times what codes do."""
        bounds, found = offsets.tolist(), []
        for start in range(0, len(self), PART):
            stop = min(start + PART, len(self))
            codes, scale = self.codes.codes[start:stop], self.codes.scale[start:stop]
            part, local = dequantize(codes, scale, rows.dtype), offsets[start : stop + 1]
            mine = rows[bounds[start] : bounds[stop]]
            found.append(expert_gemm(mine, part, local - bounds[start]))
        return torch.cat(found)


def kept_as_bytes(path: str, codes: Codes) -> Stack | None:
    """Returns what runnable() keeps of a layer's codes: what the tensor cores take in bytes."""
    if codes.codes.dim() == 3:
        made = Stack.of(codes)
    elif path in PLAIN:
        made = Stack.of(replace(codes, codes=codes.codes[None], scale=codes.scale[None]))
    else:
        return None
    return None if made.bytes is None else made


def _operand(codes: Codes) -> torch.dtype | None:
    """Returns what holds codes exactly: e4m3 four bits, int8 all, its sums want one scale a row."""
    scheme = codes.scheme
    if not isinstance(scheme, IntScheme):
        return None
    if scheme.activation == "fp8" and scheme.bits == 4:
        return FP8
    whole = codes.scale.shape[-1] == 1
    return torch.int8 if scheme.activation == "int8" and whole else None


@lru_cache
def _launch() -> Any:
    """Returns the FP8 kernel's launches, None where it cannot run; Triton is imported on use."""
    if find_spec("triton") is None or import_module("fused_ops.triton_support").no_gluon():
        return None
    return import_module("fused_ops.expert_gemm.gluon_launch")
