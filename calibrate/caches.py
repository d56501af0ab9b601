"""What a serving engine keeps of a token, rounded as it keeps it: latent, index key and query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from calibrate.block import Observer
from fused_ops.sparse_attention.contract import TILE
from glm5q import quant

Grid = Literal["fp8", "int8"]


@dataclass
class Caches(Observer):
    """An Observer that rounds what it sees in place: what is attended to, and what chooses it.

    `latent`: the latent in tiles of TILE features (or all of a narrower one), each with a scale of
    its absmax / 448 (fp8, e4m3) or / 127 (int8); the rotated key, `rope` features wide, in
    bfloat16. So are vLLM's and SGLang's fp8_ds_mla and Ascend's kv_quant rows of 656 bytes.
    `index`: the indexer's query a head and its key a token, likewise with one scale each, without
    the Hadamard rotation that some engines put before.
    """

    rope: int
    latent: Grid | None = None
    index: Grid | None = None

    def indexer(self, query: Tensor, key: Tensor, _gates: Tensor, _offsets: Tensor) -> None:
        if self.index is not None:
            query.copy_(quant.quantize_activation(query, self.index))
            key.copy_(quant.quantize_activation(key, self.index))

    def attention(self, _query: Tensor, latent: Tensor, _offsets: Tensor, _scale: float) -> None:
        if self.latent is not None:
            kept, key = latent[:, : -self.rope], latent[:, -self.rope :]
            tiles = kept.unflatten(1, (-1, min(TILE, kept.shape[1])))
            kept.copy_(quant.quantize_activation(tiles, self.latent).flatten(1))
            key.copy_(key.bfloat16())
