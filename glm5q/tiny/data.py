"""Training batches, planted on the fly by worker processes."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from glm5q.tiny.recall import ANSWER, Planter


def load_tokens(folder: Path) -> np.ndarray:
    """Training tokens, uint16 [tokens]."""
    packed = (folder / "train.npy.xz").read_bytes()
    tokens: np.ndarray = np.load(io.BytesIO(lzma.decompress(packed)))
    return tokens


class Batches(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """Endless (tokens [B, T + 2], weights [B, T + 2], query rows [B, M])."""

    def __init__(
        self,
        tokens: np.ndarray,
        tokenizer: str,
        batch: int,
        length: int,
        rows: int,
        planted: float,
        seed: int,
    ) -> None:
        self.tokens, self.tokenizer = tokens, tokenizer
        self.batch, self.length, self.rows = batch, length, rows
        self.planted, self.seed = planted, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        info = get_worker_info()
        rng = np.random.default_rng([self.seed, info.id if info else 0])
        planter = Planter(Tokenizer.from_file(self.tokenizer))
        size = self.length + 2
        while True:
            ids = np.empty((self.batch, size), dtype=np.int64)
            weights = np.empty((self.batch, size), dtype=np.float32)
            rows = rng.integers(0, self.length, (self.batch, self.rows))
            for i in range(self.batch):
                at = rng.integers(0, len(self.tokens) - size)
                ids[i], weights[i] = planter.window(self.tokens[at : at + size], rng, self.planted)
                answers = np.flatnonzero(weights[i, 1 : self.length + 1] == ANSWER)
                if len(answers):
                    half = self.rows // 2
                    rows[i, :half] = rng.choice(answers, half)
            yield torch.from_numpy(ids), torch.from_numpy(weights), torch.from_numpy(rows)


def loader(source: Batches, workers: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches made by `workers` processes."""
    return iter(
        DataLoader(
            source,
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=6 if workers else None,
        )
    )
