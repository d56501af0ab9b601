"""Launches of gluon_kernel."""
# mypy: ignore-errors
# triton is not always installed.

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fused_ops.sparse_attention import triton_launch
from fused_ops.sparse_attention.contract import KvFormat
from fused_ops.sparse_attention.gluon_kernel import attend

HEADS = 64  # of a program: the rows of a Hopper matrix product
ROWS = 64  # asked for at a time; two such blocks and 64 queries fill shared memory
TILES = {
    "PRODUCERS": 4,  # warps that copy, beside 8 that compute
    "REGISTERS": 80,  # of a copying thread
    "WIDEN_REGISTERS": 144,  # of one that widens rows of 656 bytes
}
ALIGNED = 16  # elements: of strides that so many divide Triton knows that 16-byte copies fit


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
    tiles: Mapping[str, int] | None = None,
    portable_tiles: Mapping[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.sparse_attention. Rows whose strides 16 does not divide go to triton_launch.

    `tiles`: default TILES; `portable_tiles` are triton_launch's.
    """
    tiles = tiles or TILES
    query, latent = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, latent))
    if not (_aligned(query) and _aligned(latent)):
        return triton_launch.sparse_attention(
            query, latent, indices, offsets, scale, value_dim, kv_format=kv_format,
            key_offsets=key_offsets, page_table=page_table, tiles=portable_tiles,
        )  # fmt: skip
    return triton_launch.in_parts(
        attend, query, latent, indices, offsets, scale, value_dim, kv_format, key_offsets,
        page_table, HEADS, ROWS, PRODUCERS=tiles["PRODUCERS"],
        REGISTERS=tiles["REGISTERS" if kv_format == "plain" else "WIDEN_REGISTERS"],
    )  # fmt: skip


def _aligned(x: Tensor) -> bool:
    return all(stride % ALIGNED == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
