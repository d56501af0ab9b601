"""Tensors as the pointers and strides of csrc/args.h."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

I64, F32, POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

DTYPE_CODES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float8_e4m3fn: 2,
    torch.int8: 3,
}
KV_CODES = {"fp8_656": 4, "int8_656": 5}


class Rows(ctypes.Structure):
    """A cache's rows, packed or paged; strides in bytes."""

    _fields_ = (
        ("base", POINTER),
        ("page_stride", I64),
        ("row_stride", I64),
        ("page_size", I64),
        ("pages", POINTER),
        ("pages_per_sequence", I64),
    )


def rows(cache: Tensor | None, page_table: Tensor | None) -> Rows:
    """`cache` [rows, ...] or, with `page_table`, [pages, page size, ...]; None is no cache."""
    if cache is None:
        return Rows()
    size = cache.element_size()
    if page_table is None:
        return Rows(cache.data_ptr(), 0, cache.stride(0) * size, 1, None, 0)
    return Rows(
        cache.data_ptr(),
        cache.stride(0) * size,
        cache.stride(1) * size,
        cache.shape[1],
        page_table.data_ptr(),
        page_table.shape[1],
    )


def last_contiguous(x: Tensor) -> Tensor:
    """Returns x with unit stride in its last dimension; other strides are passed on."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def int64(x: Tensor) -> Tensor:
    """Returns x as contiguous int64 on the CPU."""
    return x.to(torch.int64).contiguous()


def optional_int32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int32).contiguous()


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def call(function: Any, arguments: ctypes.Structure) -> None:
    """Calls a function of csrc. Raises MemoryError if it says that memory ran out."""
    if function(ctypes.byref(arguments)):
        raise MemoryError("a fused op ran out of memory")
