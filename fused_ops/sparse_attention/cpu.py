"""Sparse Flash Attention in compiled C++ (attention.h), one entry an instruction set."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from fused_ops import build
from fused_ops.marshal import (
    DTYPE_CODES,
    F32,
    I64,
    KV_CODES,
    POINTER,
    Rows,
    call,
    int64,
    last_contiguous,
    optional_int32,
    rows,
)
from fused_ops.sparse_attention.contract import KvFormat


class _Attention(ctypes.Structure):
    _fields_ = (
        ("query", POINTER),
        ("query_token_stride", I64),
        ("query_head_stride", I64),
        ("query_dtype", I64),
        ("latent", Rows),
        ("latent_dtype", I64),
        ("indices", POINTER),
        ("index_stride", I64),
        ("offsets", POINTER),
        ("key_offsets", POINTER),
        ("sequences", I64),
        ("tokens", I64),
        ("heads", I64),
        ("dim", I64),
        ("value_dim", I64),
        ("selected", I64),
        ("threads", I64),
        ("scale", F32),
        ("out", POINTER),
        ("lse", POINTER),
    )


def sparse_attention(
    query: Tensor,
    latent: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale: float,
    value_dim: int,
    *,
    kv_format: KvFormat = "plain",
    key_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    isa: str,
) -> tuple[Tensor, Tensor]:
    """As reference.sparse_attention, with any thread count the same result."""
    tokens, heads, dim = query.shape
    query, latent = last_contiguous(query), last_contiguous(latent)
    indices = last_contiguous(indices.to(torch.int32))
    bounds = int64(offsets)
    key_bounds = bounds if key_offsets is None else int64(key_offsets)
    pages = optional_int32(page_table)
    out = torch.empty((tokens, heads, value_dim), dtype=query.dtype)
    lse = torch.empty((tokens, heads), dtype=torch.float32)
    arguments = _Attention(
        query.data_ptr(),
        query.stride(0) * query.element_size(),
        query.stride(1) * query.element_size(),
        DTYPE_CODES[query.dtype],
        rows(latent, pages),
        DTYPE_CODES[latent.dtype] if kv_format == "plain" else KV_CODES[kv_format],
        indices.data_ptr(),
        indices.stride(0) * 4,
        bounds.data_ptr(),
        key_bounds.data_ptr(),
        bounds.numel() - 1,
        tokens,
        heads,
        dim,
        value_dim,
        indices.shape[1],
        torch.get_num_threads(),
        scale,
        out.data_ptr(),
        lse.data_ptr(),
    )
    call(build.function("sparse_attention", isa), arguments)
    return out, lse


sparse_attention_avx512bf16 = partial(sparse_attention, isa="avx512bf16")
sparse_attention_avx512 = partial(sparse_attention, isa="avx512")
sparse_attention_avx2 = partial(sparse_attention, isa="avx2")
sparse_attention_portable = partial(sparse_attention, isa="portable")
