"""The least time a decode step and a prefill can take on a chip, by its own figures.

Each part takes the longer of its multiplications at the chip's peak and its bytes at the chip's
bandwidth; parts are added up. Left out: communication, launches, softmax and norms, the MTP layer,
imbalance between experts. So a real engine is slower; how much, only a measurement tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fused_ops.op import Cost, OpRequest, cost
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.types import Fp8Scheme, IntScheme, Role, Scheme
from recipes.schema import Recipe
from targets.base import Figure, Grade, Target
from targets.plan.layouts import share
from targets.plan.memory import CHUNK_TOKENS, Cache, Layout, Load
from targets.plan.weights import Elements, Matrix, matrices, matrix_bytes, released

Bound = Literal["memory", "compute"]
GRADES: tuple[Grade, ...] = ("measured", "vendor", "press", "hearsay", "unknown")
GROUPS = {
    Role.ATTENTION: "attention projections",
    Role.KV_B: "attention projections",
    Role.INDEXER_QUERY: "indexer projections",
    Role.INDEXER_KEY: "indexer projections",
    Role.INDEXER_WEIGHTS: "indexer projections",
    Role.ROUTED_EXPERT: "routed experts",
    Role.SHARED_EXPERT: "shared and dense",
    Role.DENSE_MLP: "shared and dense",
    Role.ROUTER: "router and head",
    Role.LM_HEAD: "router and head",
}
INDEXER, ATTENTION = "lightning indexer", "sparse attention"


@dataclass(frozen=True)
class Work:
    """One product on one device: multiply-adds are two; `dtype` is what the chip multiplies in."""

    part: str
    dtype: str
    flop: float
    bytes: float


@dataclass(frozen=True)
class Part:
    """All of one kind of work in a pass; `time_s` None where a figure of the chip is unknown."""

    part: str
    flop: float
    bytes: float
    time_s: float | None
    bound: Bound | None


@dataclass(frozen=True)
class Estimate:
    """A pass that consumes `tokens` on all devices; times None where a figure is unknown.

    `inputs` are the chip's figures it rests on, `grade` the weakest of theirs.
    """

    stage: Literal["prefill", "decode"]
    tokens: int
    parts: tuple[Part, ...]
    inputs: dict[str, Figure]
    grade: Grade

    @property
    def total_s(self) -> float | None:
        times = [part.time_s for part in self.parts]
        known = [time for time in times if time is not None]
        return sum(known) if len(known) == len(times) else None

    @property
    def tokens_per_s(self) -> float | None:
        total = self.total_s
        return self.tokens / total if total else None

    @property
    def unknown(self) -> list[str]:
        """The figures that are missing."""
        return [name for name, figure in self.inputs.items() if figure.value is None]


@dataclass(frozen=True)
class Machine:
    """What is estimated: a model as a recipe writes it, split over devices of one chip."""

    config: ModelConfig
    recipe: Recipe
    chip: Target
    layout: Layout
    cache: Cache
    elements: Elements = released

    def decode(self, load: Load) -> Estimate:
        """Returns one step that gives each sequence a token, all of them at the full context."""
        sequences = -(-load.concurrency // self.layout.data)
        work = list(self._products(sequences, load.concurrency, logits=sequences))
        work += self._attention(sequences, 1, load.context)
        return self._estimate("decode", load.concurrency, work)

    def prefill(self, load: Load) -> Estimate:
        """Returns the prefill of one prompt of `context` tokens a data-parallel group."""
        work: list[Work] = []
        whole, rest = divmod(load.context, CHUNK_TOKENS)
        for chunks, tokens in ((whole, CHUNK_TOKENS), (min(rest, 1), rest)):
            if chunks:
                one = self._products(tokens, tokens * self.layout.data, logits=1)
                work += [replace(w, flop=w.flop * chunks, bytes=w.bytes * chunks) for w in one]
        for start in range(0, load.context, CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, load.context - start)
            work += self._attention(1, tokens, start + tokens)
        return self._estimate("prefill", load.context * self.layout.data, work)

    def _products(self, tokens: int, everywhere: int, logits: int) -> Iterator[Work]:
        """Yields the weights' products: `tokens` in this device's group, `everywhere` in all."""
        config = self.config
        for layer in range(config.num_hidden_layers):
            for matrix in matrices(config, self.recipe, layer, share(self.layout)):
                size = matrix_bytes(matrix, self.recipe, self.elements)
                if matrix.role is Role.ROUTED_EXPERT:
                    yield self._experts(matrix, size, everywhere)
                else:
                    flop = 2 * matrix.rows * matrix.columns * tokens
                    yield Work(GROUPS[matrix.role], dtype(matrix.scheme), flop, size)
        rows = -(-config.vocab_size // self.layout.tensor)
        size = rows * config.hidden_size * self.elements(names.LM_HEAD)
        yield Work(GROUPS[Role.LM_HEAD], "bf16", 2 * rows * config.hidden_size * logits, size)

    def _experts(self, matrix: Matrix, size: int, tokens: int) -> Work:
        """Experts' products: rows spread evenly, and the experts that uniform routing reaches."""
        config = self.config
        chosen = config.num_experts_per_tok / config.n_routed_experts
        reached = matrix.count * (1 - (1 - chosen) ** tokens)
        rows = tokens * chosen * matrix.count
        flop = 2 * rows * matrix.rows * matrix.columns
        return Work(GROUPS[matrix.role], dtype(matrix.scheme), flop, reached * size)

    def _attention(self, sequences: int, tokens: int, keys: int) -> Iterator[Work]:
        """Yields the indexer's scores and the sparse attention of every layer, by the ops' costs.

        The indexer is computed whole by each device of a group.
        """
        c = self.config
        selected = min(c.index_topk, keys)
        index = {"sequences": sequences, "tokens": tokens, "keys": keys, "topk": selected}
        index |= {"heads": c.index_n_heads, "dim": c.index_head_dim}
        sparse = {"tokens": sequences * tokens, "selected": selected, "keys": sequences * keys}
        sparse |= {"heads": -(-c.num_attention_heads // self.layout.tensor)}
        sparse |= {"dim": c.kv_lora_rank + c.qk_rope_head_dim, "value_dim": c.kv_lora_rank}
        full = sum(c.full_indexer[: c.num_hidden_layers])
        indexer = _times(cost(OpRequest("lightning_indexer", self.cache.index, index)), full)
        attention = _times(
            cost(OpRequest("sparse_attention", self.cache.kv, sparse)), c.num_hidden_layers
        )
        yield Work(INDEXER, self.cache.index, indexer.flop, indexer.bytes)
        yield Work(ATTENTION, "bf16", attention.flop, attention.bytes)

    def _estimate(
        self, stage: Literal["prefill", "decode"], tokens: int, work: list[Work]
    ) -> Estimate:
        missing = Figure(None, "unknown", "no source found")
        peaks = {d: self.chip.peak_ops_s.get(d, missing) for d in sorted({w.dtype for w in work})}
        bandwidth = self.chip.bandwidth_bytes_s
        inputs = {"bandwidth": bandwidth} | {f"peak {d}": figure for d, figure in peaks.items()}
        grouped: dict[str, list[Work]] = {}
        for one in work:
            grouped.setdefault(one.part, []).append(one)
        parts = tuple(_part(name, mine, bandwidth, peaks) for name, mine in grouped.items())
        grade = max((figure.grade for figure in inputs.values()), key=GRADES.index)
        return Estimate(stage, tokens, parts, inputs, grade)


def dtype(scheme: Scheme) -> str:
    """Returns what the chip multiplies in: the activations' format, bf16 where they are kept."""
    if isinstance(scheme, Fp8Scheme):
        return "fp8"
    if isinstance(scheme, IntScheme) and scheme.activation is not None:
        return "int8" if scheme.activation == "int8" else "fp8"
    return "bf16"


def _part(name: str, work: list[Work], bandwidth: Figure, peaks: dict[str, Figure]) -> Part:
    flop, size = sum(w.flop for w in work), sum(w.bytes for w in work)
    compute = memory = time = 0.0
    for one in work:
        peak = peaks[one.dtype].value
        if peak is None or bandwidth.value is None:
            return Part(name, flop, size, None, None)
        compute += one.flop / peak
        memory += one.bytes / bandwidth.value
        time += max(one.flop / peak, one.bytes / bandwidth.value)
    return Part(name, flop, size, time, "compute" if compute > memory else "memory")


def _times(one: Cost, count: int) -> Cost:
    return Cost(one.flop * count, one.bytes * count)
