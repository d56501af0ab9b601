"""What the Lightning Indexer selects: source against quantized, where, and at what k."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from calibrate.block import Observer
from fused_ops.lightning_indexer import contract as indexer
from fused_ops.lightning_indexer.reference import index_scores
from fused_ops.op import Cost
from fused_ops.sparse_attention import contract as attention
from glm5q.config import ModelConfig

BUCKETS = 8  # of query positions
BLOCKS = 32  # of tokens, in the map of what is selected
MAPPED_LAYERS = 3  # first, middle and last layer with an indexer of its own
RECALL_QUERIES = 32  # of the last quarter of each window
RECALL_WINDOWS = 4
SHARES = (0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)  # of the context, tried as k


def index_overlap(left: Tensor, right: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns (positions int64, share of equal choices float32) of queries that had to choose.

    `left`, `right` int32 [tokens, topk] over sequences of `length`; queries with at most topk
    candidates take them all and are left out.
    """
    topk = left.shape[1]
    position = torch.arange(left.shape[0], device=left.device) % length
    rows = (position >= topk).nonzero().squeeze(1)
    shares = []
    for part in rows.split(1024):
        marks = torch.zeros((len(part), length), dtype=torch.bool, device=left.device)
        marks.scatter_(1, left[part].long(), True)
        shares.append(marks.gather(1, right[part].long()).float().mean(1))
    overlap = torch.cat(shares).cpu() if shares else torch.empty(0)
    return position[rows].cpu(), overlap


def bucket_edges(length: int) -> list[int]:
    """Returns BUCKETS + 1 query positions, evenly over the window."""
    return [round(length * index / BUCKETS) for index in range(BUCKETS + 1)]


def by_bucket(positions: Tensor, overlap: Tensor, length: int) -> list[float | None]:
    """Returns the mean overlap in each bucket of positions, None where no query had to choose."""
    edges = bucket_edges(length)
    means: list[float | None] = []
    for low, high in pairwise(edges):
        inside = overlap[(positions >= low) & (positions < high)]
        means.append(float(inside.mean()) if inside.numel() else None)
    return means


def mapped_layers(config: ModelConfig) -> set[int]:
    """Returns the layers whose selection is mapped."""
    full = [n for n in range(config.num_hidden_layers) if config.full_indexer[n]]
    return {full[0], full[len(full) // 2], full[-1]}


@dataclass
class SelectionMap:
    """Counts of selected tokens, [query blocks, key blocks], summed over windows."""

    length: int
    counts: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def block(self) -> int:
        return -(-self.length // BLOCKS)

    def add(self, indices: Tensor) -> None:
        """Takes in int32 [tokens, topk] of whole windows."""
        blocks = -(-self.length // self.block)
        if not self.counts.numel():
            self.counts = torch.zeros((blocks, blocks), dtype=torch.float64)
        rows = (torch.arange(indices.shape[0], device=indices.device) % self.length) // self.block
        keys = torch.div(indices.clamp(min=0), self.block, rounding_mode="floor")
        place = rows.unsqueeze(1) * blocks + keys
        found = torch.bincount(place[indices >= 0].long(), minlength=blocks * blocks)
        self.counts += found.view(blocks, blocks).cpu()

    def shares(self) -> list[list[float]]:
        """Returns each query block's shares of selections by key block, itself included."""
        rows = []
        for index, row in enumerate(self.counts):
            part = row[: index + 1] / row.sum().clamp(min=1)
            rows.append([round(float(value), 4) for value in part])
        return rows


def recall_sizes(topk: int, length: int) -> list[int]:
    """Returns the k that are tried, the checkpoint's own among them."""
    wanted = {max(1, round(length * share)) for share in SHARES} | {min(topk, length)}
    return sorted(wanted)


@dataclass
class Recall(Observer):
    """An Observer of the source: the attention mass on the indexer's best k, for several k.

    `mass` collects float32 [queries, sizes], the mean over heads for RECALL_QUERIES queries of the
    last quarter of each of the first RECALL_WINDOWS windows, however they are chunked.
    """

    length: int
    sizes: list[int]
    mass: list[Tensor] = field(default_factory=list)
    _scores: list[Tensor] = field(default_factory=list)

    def indexer(self, query: Tensor, key: Tensor, gates: Tensor, offsets: Tensor) -> None:
        rows = self._rows(query.device)
        self._scores = [
            index_scores(query[span][rows], key[span], gates[span][rows])
            for span in self._windows(offsets)
        ]

    def attention(self, query: Tensor, latent: Tensor, offsets: Tensor, scale: float) -> None:
        rows = self._rows(query.device)
        later = torch.arange(self.length, device=query.device) > rows.unsqueeze(1)
        # A layer that shares another's choices has no scores, and adds nothing.
        for span, scores in zip(self._windows(offsets), self._scores, strict=False):
            scores = scores.masked_fill(later, -torch.inf)
            order = scores.argsort(dim=-1, descending=True, stable=True)
            logits = torch.einsum("qhd,td->qht", query[span][rows].float(), latent[span].float())
            logits = (logits * scale).masked_fill(later.unsqueeze(1), -torch.inf)
            caught = logits.softmax(-1).mean(1).gather(1, order).cumsum(1)
            self.mass.append(caught[:, torch.tensor(self.sizes) - 1].cpu())
        self._scores = []

    def _windows(self, offsets: Tensor) -> list[slice]:
        """The chunk's windows that are among the first few."""
        left = RECALL_WINDOWS - self.first_token // self.length
        return [slice(start, end) for start, end in pairwise(offsets.tolist())][: max(0, left)]

    def _rows(self, device: torch.device) -> Tensor:
        start = self.length - self.length // 4
        return torch.linspace(start, self.length - 1, RECALL_QUERIES, device=device).long()


def query_cost(config: ModelConfig, k: int, context: int) -> Cost:
    """Returns what one query token costs at `context`, all layers, by the ops' own functions."""
    full = sum(config.full_indexer[: config.num_hidden_layers])
    scores = indexer.cost(
        {
            "tokens": 1,
            "keys": context,
            "heads": config.index_n_heads,
            "dim": config.index_head_dim,
            "topk": k,
        },
        "bf16",
    )
    attended = attention.cost(
        {
            "tokens": 1,
            "keys": context,
            "heads": config.num_attention_heads,
            "dim": config.kv_lora_rank + config.qk_rope_head_dim,
            "value_dim": config.kv_lora_rank,
            "selected": min(k, context),
        },
        "bf16",
    )
    layers = config.num_hidden_layers
    return Cost(
        full * scores.flop + layers * attended.flop, full * scores.bytes + layers * attended.bytes
    )


def recommend(sizes: list[int], mass: Tensor, topk: int) -> tuple[int, str]:
    """Returns the smallest k that catches 99 % of what the checkpoint's own k catches, and why."""
    own = float(mass[:, sizes.index(min(topk, sizes[-1]))].mean()) if topk in sizes else 1.0
    means = mass.mean(0).tolist()
    for k, value in zip(sizes, means, strict=True):
        if value >= 0.99 * own:
            return k, f"catches {value:.1%} of the attention mass, index_topk {topk} {own:.1%}"
    return topk, f"no smaller k catches 99 % of what index_topk {topk} does"
