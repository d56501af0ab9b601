"""Routed experts' products in compiled C++ (gemm.h), one entry an instruction set."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from fused_ops import build
from fused_ops.expert_gemm.reference import weight_codes
from fused_ops.marshal import DTYPE_CODES, I64, POINTER, call, int64, last_contiguous, pointer

PANEL = {"portable": 4, "avx2": 8, "avx512": 16}  # output features of one vector, LANES of csrc


@dataclass(frozen=True)
class Prepared:
    """Weights in the order gemm.h reads them, for one instruction set.

    `codes` uint8 [experts, panels, bytes of a panel], `scale` float32 [experts, panels, groups,
    panel]; `group` columns share a scale.
    """

    codes: Tensor
    scale: Tensor
    out_features: int
    columns: int
    group: int
    bits: int
    isa: str


class _Gemm(ctypes.Structure):
    _fields_ = (
        ("x", POINTER),
        ("x_stride", I64),
        ("x_scale", POINTER),
        ("weight", POINTER),
        ("scale", POINTER),
        ("offsets", POINTER),
        ("experts", I64),
        ("rows", I64),
        ("columns", I64),
        ("out_features", I64),
        ("group", I64),
        ("bits", I64),
        ("threads", I64),
        ("out", POINTER),
        ("out_dtype", I64),
    )


class _Swiglu(ctypes.Structure):
    _fields_ = (
        ("both", POINTER),
        ("rows", I64),
        ("inner", I64),
        ("threads", I64),
        ("codes", POINTER),
        ("scale", POINTER),
    )


def prepare(weight: Tensor, weight_scale: Tensor, columns: int, *, isa: str) -> Prepared:
    """Reorders weights once. `weight` int8 [experts, out, in] or int32 words of four-bit codes.

    `columns` is in, `weight_scale` [experts, out, groups].
    """
    bits, panel = (4 if weight.dtype == torch.int32 else 8), PANEL[isa]
    _, out_features, groups = weight_scale.shape
    padding = (0, -columns % 8, 0, -out_features % panel)
    parts = []
    for expert in weight:  # one at a time: the unpacked codes are the large thing here
        codes = weight_codes(expert, columns).to(torch.int16) + (8 if bits == 4 else 128)
        tiles = F.pad(codes, padding).to(torch.uint8).unflatten(0, (-1, panel))
        tiles = tiles.unflatten(2, (-1, 4)).transpose(1, 2)  # [panels, columns / 4, panel, 4]
        if bits == 4:
            tiles = tiles[:, 0::2] | tiles[:, 1::2] << 4
        parts.append(tiles.flatten(1))
    scale = F.pad(weight_scale.float(), (0, 0, 0, -out_features % panel))
    return Prepared(
        codes=torch.stack(parts).contiguous(),
        scale=scale.unflatten(1, (-1, panel)).transpose(2, 3).contiguous(),
        out_features=out_features,
        columns=columns,
        group=columns // groups if groups > 1 else columns + -columns % 8,
        bits=bits,
        isa=isa,
    )


def expert_gemm(
    x: Tensor,
    weight: Tensor | Prepared,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    isa: str,
) -> Tensor:
    """As reference.expert_gemm for int8 x; `weight` may be Prepared, which saves doing it here."""
    prepared = _prepared(x, weight, weight_scale, isa)
    if x.dtype != torch.int8 or x.shape[1] != prepared.columns:
        raise ValueError(
            f"x must be int8 [rows, {prepared.columns}], got {x.dtype} {tuple(x.shape)}"
        )
    x, bounds = last_contiguous(x), int64(offsets)
    scale = None if x_scale is None else x_scale.float().contiguous()
    dtype = out_dtype or torch.bfloat16
    out = torch.empty((x.shape[0], prepared.out_features), dtype=dtype)
    arguments = _Gemm(
        x.data_ptr(),
        x.stride(0),
        pointer(scale),
        prepared.codes.data_ptr(),
        prepared.scale.data_ptr(),
        bounds.data_ptr(),
        bounds.numel() - 1,
        x.shape[0],
        prepared.columns,
        prepared.out_features,
        prepared.group,
        prepared.bits,
        torch.get_num_threads(),
        out.data_ptr(),
        DTYPE_CODES[dtype],
    )
    call(build.function("expert_gemm", isa), arguments)
    return out


def expert_swiglu(
    x: Tensor,
    weight: Tensor | Prepared,
    offsets: Tensor,
    *,
    x_scale: Tensor,
    weight_scale: Tensor | None = None,
    isa: str,
) -> tuple[Tensor, Tensor]:
    """As reference.expert_swiglu for int8 x."""
    both = expert_gemm(
        x, weight, offsets, x_scale=x_scale, weight_scale=weight_scale, out_dtype=torch.float32,
        isa=isa,
    )  # fmt: skip
    codes = torch.empty((both.shape[0], both.shape[1] // 2), dtype=torch.int8)
    scale = torch.empty(both.shape[0], dtype=torch.float32)
    arguments = _Swiglu(
        both.data_ptr(), *codes.shape, torch.get_num_threads(), codes.data_ptr(), scale.data_ptr()
    )
    call(build.function("swiglu", isa), arguments)
    return codes, scale


def _prepared(
    x: Tensor, weight: Tensor | Prepared, weight_scale: Tensor | None, isa: str
) -> Prepared:
    if isinstance(weight, Prepared):
        if weight.isa != isa:
            raise ValueError(f"weights were prepared for {weight.isa}, not {isa}")
        return weight
    if weight_scale is None:
        raise ValueError("codes need weight_scale")
    return prepare(weight, weight_scale, x.shape[1], isa=isa)


prepare_avx512 = partial(prepare, isa="avx512")
prepare_avx2 = partial(prepare, isa="avx2")
prepare_portable = partial(prepare, isa="portable")
expert_gemm_avx512 = partial(expert_gemm, isa="avx512")
expert_gemm_avx2 = partial(expert_gemm, isa="avx2")
expert_gemm_portable = partial(expert_gemm, isa="portable")
expert_swiglu_avx512 = partial(expert_swiglu, isa="avx512")
expert_swiglu_avx2 = partial(expert_swiglu, isa="avx2")
expert_swiglu_portable = partial(expert_swiglu, isa="portable")
