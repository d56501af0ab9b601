"""Lightning Indexer in compiled C++ (indexer.h), one entry an instruction set."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from fused_ops import build
from fused_ops.marshal import (
    DTYPE_CODES,
    I64,
    POINTER,
    Rows,
    call,
    int64,
    last_contiguous,
    optional_int32,
    rows,
)


class _Indexer(ctypes.Structure):
    _fields_ = (
        ("query", POINTER),
        ("query_token_stride", I64),
        ("query_head_stride", I64),
        ("key", Rows),
        ("key_scale", Rows),
        ("weights", POINTER),
        ("offsets", POINTER),
        ("key_offsets", POINTER),
        ("sequences", I64),
        ("heads", I64),
        ("dim", I64),
        ("topk", I64),
        ("dtype", I64),
        ("threads", I64),
        ("out", POINTER),
    )


class _Topk(ctypes.Structure):
    _fields_ = (
        ("scores", POINTER),
        ("row_stride", I64),
        ("rows", I64),
        ("keys", I64),
        ("topk", I64),
        ("threads", I64),
        ("out", POINTER),
    )


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    head_weights: Tensor,
    offsets: Tensor,
    topk: int,
    *,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    key_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    isa: str,
) -> Tensor:
    """As reference.lightning_indexer, with any thread count the same result."""
    tokens, heads, dim = query.shape
    query, key = last_contiguous(query), last_contiguous(key)
    weights = head_weights.float()
    weights = (weights if query_scale is None else weights * query_scale).contiguous()
    scale = None if key_scale is None else key_scale.float()
    bounds = int64(offsets)
    key_bounds = bounds if key_offsets is None else int64(key_offsets)
    pages = optional_int32(page_table)
    out = torch.empty((tokens, topk), dtype=torch.int32)
    arguments = _Indexer(
        query.data_ptr(),
        query.stride(0) * query.element_size(),
        query.stride(1) * query.element_size(),
        rows(key, pages),
        rows(scale, pages),
        weights.data_ptr(),
        bounds.data_ptr(),
        key_bounds.data_ptr(),
        bounds.numel() - 1,
        heads,
        dim,
        topk,
        DTYPE_CODES[query.dtype],
        torch.get_num_threads(),
        out.data_ptr(),
    )
    call(build.function("lightning_indexer", isa), arguments)
    return out


def select_topk(scores: Tensor, topk: int, *, isa: str) -> Tensor:
    """As reference.select_topk."""
    scores = last_contiguous(scores.float())
    out = torch.empty((scores.shape[0], topk), dtype=torch.int32)
    arguments = _Topk(
        scores.data_ptr(),
        scores.stride(0) * 4,
        *scores.shape,
        topk,
        torch.get_num_threads(),
        out.data_ptr(),
    )
    call(build.function("select_topk", isa), arguments)
    return out


lightning_indexer_avx512 = partial(lightning_indexer, isa="avx512")
lightning_indexer_avx2 = partial(lightning_indexer, isa="avx2")
lightning_indexer_portable = partial(lightning_indexer, isa="portable")
select_topk_avx512 = partial(select_topk, isa="avx512")
select_topk_avx2 = partial(select_topk, isa="avx2")
select_topk_portable = partial(select_topk, isa="portable")
