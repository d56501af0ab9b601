"""What is lowered: GLM-5's launches of each op, on tensors without data.

A variant is one dtype and layout. The launches come from the very functions that would run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fused_ops.expert_gemm import triton_ascend as gemm
from fused_ops.lightning_indexer import triton_ascend as indexer
from fused_ops.sparse_attention import triton_ascend as attention
from fused_ops.triton_ascend import Launch

TOKENS, PAGE, PAGES = 8, 64, 64  # of one sequence: 8 queries at the end of 4096 keys
KEYS = PAGE * PAGES
Tiles = Mapping[str, int]

TILES: dict[str, Tiles] = {
    "sparse_attention": attention.TILES,
    "lightning_indexer": indexer.TILES,
    "select_topk": indexer.TOPK_TILES,
    "expert_gemm": gemm.TILES,
}


@dataclass(frozen=True)
class Variant:
    """`launch` gives the one kernel launch that is lowered for `op` with given tiles."""

    op: str
    name: str
    launch: Callable[[Tiles], Launch]


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bounds(count: int) -> Tensor:
    return torch.tensor([0, count])


def _attention(paged: bool, tiles: Tiles) -> Launch:
    launches: list[Launch] = []
    latent = (PAGES, PAGE, 576) if paged else (KEYS, 576)
    attention.sparse_attention(
        _empty(torch.bfloat16, TOKENS, 64, 576),
        _empty(torch.bfloat16, *latent),
        _empty(torch.int32, TOKENS, 2048),
        _bounds(TOKENS),
        1 / 16,
        512,
        key_offsets=_bounds(KEYS),
        page_table=_empty(torch.int32, 1, PAGES) if paged else None,
        tiles=tiles,
        run=launches.append,
    )
    return launches[0]


def _indexer(dtype: torch.dtype, paged: bool, heads: int, tiles: Tiles) -> Launch:
    launches: list[Launch] = []
    where = (PAGES, PAGE) if paged else (KEYS,)
    coded = dtype == torch.int8
    indexer.lightning_indexer(
        _empty(dtype, TOKENS, heads, 128),
        _empty(dtype, *where, 128),
        _empty(torch.float32, TOKENS, heads),
        _bounds(TOKENS),
        2048,
        query_scale=_empty(torch.float32, TOKENS, heads) if coded else None,
        key_scale=_empty(torch.float32, *where) if coded else None,
        key_offsets=_bounds(KEYS),
        page_table=_empty(torch.int32, 1, PAGES) if paged else None,
        tiles=tiles,
        run=launches.append,
    )
    return launches[0]


def _select(tiles: Tiles) -> Launch:
    launches: list[Launch] = []
    indexer.select_topk(_empty(torch.float32, 8, KEYS), 2048, tiles=tiles, run=launches.append)
    return launches[0]


def _gemm(bits: int, group: int, rows: int, tiles: Tiles) -> Launch:
    launches: list[Launch] = []
    experts, columns, features = 2, 6144, 4096
    words = columns // 8 if bits == 4 else columns
    gemm.expert_gemm(
        _empty(torch.int8, experts * rows, columns),
        _empty(torch.int32 if bits == 4 else torch.int8, experts, features, words),
        torch.tensor([0, rows, 2 * rows]),
        x_scale=_empty(torch.float32, experts * rows),
        weight_scale=_empty(torch.float32, experts, features, columns // group if group else 1),
        tiles=tiles,
        run=launches.append,
    )
    return launches[0]


# Rows an expert: a decode step's, and a prefill's, which fill a program.
DECODE, PREFILL = 16, 4096
VARIANTS: tuple[Variant, ...] = (
    Variant("sparse_attention", "bf16", partial(_attention, False)),
    Variant("sparse_attention", "bf16-paged", partial(_attention, True)),
    *(
        Variant("lightning_indexer", name + suffix, partial(_indexer, dtype, bool(suffix), 32))
        for name, dtype in (("bf16", torch.bfloat16), ("int8", torch.int8))
        for suffix in ("", "-paged")
    ),
    Variant("select_topk", "f32", _select),
    *(
        Variant("expert_gemm", f"{name}-{rows}-rows", partial(_gemm, bits, group, rows))
        for name, bits, group in (
            ("int4-int8", 4, 0),
            ("int4-int8-g128", 4, 128),
            ("int8-int8", 8, 0),
        )
        for rows in (DECODE, PREFILL)
    ),
)


def variants(op: str) -> tuple[Variant, ...]:
    """Returns an op's variants."""
    return tuple(variant for variant in VARIANTS if variant.op == op)
