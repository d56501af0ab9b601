"""One device's memory while it serves: weights, caches, work space; and the load that still fits.

Caches are exact to the byte a token; pages round a sequence up by at most 127 tokens, which is left
out. Work space is a model of vLLM's and SGLang's buffers, stated in `activations` and `scores`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from glm5q.config import ModelConfig
from targets.base import Target
from targets.plan.weights import Weights

KvLayout = Literal["bf16", "fp8", "int8"]
IndexLayout = Literal["bf16", "fp8", "int8"]

KV_LAYOUTS: tuple[KvLayout, ...] = ("bf16", "fp8", "int8")
KV_TITLES = {
    "bf16": "bf16 latent and key",
    "fp8": "fp8 latent in tiles of 128, bf16 key",
    "int8": "int8 latent in tiles of 128, bf16 key",
}
TILE = 128  # latent features that share a float32 scale in the 656-byte row
CHUNK_TOKENS = 8192  # prefilled at once: vLLM's and SGLang's usual chunk
SCORE_BYTES = 512 << 20  # vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB: prefill scores in slices of it
RESERVE = 0.1  # of the device, left to the runtime: vLLM's --gpu-memory-utilization 0.9


@dataclass(frozen=True)
class Load:
    """`concurrency` sequences of `context` tokens each, prompt and answer together."""

    context: int
    concurrency: int


@dataclass(frozen=True)
class Layout:
    """`tensor` devices share each attention, `data` such groups serve apart, of all devices.

    `experts`: dealt out whole over all devices ("whole"), or each split with the rest ("split").
    """

    devices: int
    tensor: int
    experts: Literal["whole", "split"]

    @property
    def data(self) -> int:
        return self.devices // self.tensor

    def label(self) -> str:
        """`TP16`, `TP16 EP16`, `DP4 TP4 EP16`; `1 device`."""
        if self.devices == 1:
            return "1 device"
        parts = [f"DP{self.data}"] if self.data > 1 else []
        parts += [f"TP{self.tensor}"] if self.tensor > 1 else []
        parts += [f"EP{self.devices}"] if self.experts == "whole" else []
        return " ".join(parts)


@dataclass(frozen=True)
class Cache:
    """How a token is kept: its latent row in every layer, an index key in every indexer's."""

    kv: KvLayout
    index: IndexLayout


@dataclass(frozen=True)
class Device:
    """Bytes on the fullest device by part: roles' weights, mtp, caches, work space, reserve.

    `max_context` holds at the load's concurrency, `max_concurrency` at its context; 0 where not
    even the weights fit. `capacity` None: the chip's memory is unknown, nothing can be said.
    """

    layout: Layout
    parts: dict[str, int]
    capacity: int | None
    max_context: int | None
    max_concurrency: int | None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.total <= self.capacity


def kv_row_bytes(config: ModelConfig, kv: KvLayout) -> int:
    """Returns the bytes of one token's latent and rotated key in one layer: 1152, or 656."""
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if kv == "bf16":
        return 2 * (latent + rope)
    return latent + 4 * -(-latent // TILE) + 2 * rope


def index_row_bytes(config: ModelConfig, index: IndexLayout) -> int:
    """Returns the bytes of one token's index key: 132 in fp8, 130 in int8 (fp16 scale), 256."""
    return {"bf16": 2, "fp8": 1, "int8": 1}[index] * config.index_head_dim + {
        "bf16": 0,
        "fp8": 4,
        "int8": 2,
    }[index]


def index_layout(chip: Target, kv: KvLayout) -> IndexLayout:
    """Returns what the chip's engines keep index keys in.

    CUDA engines: e4m3 where the GPU has it. vLLM-Ascend: bfloat16, int8 with an int8 KV cache.
    Others are not known, and counted in bfloat16.
    """
    if chip.kind == "cuda" and chip.support("fp8").answer == "yes":
        return "fp8"
    return "int8" if chip.kind == "ascend" and kv == "int8" else "bf16"


def kv_refusal(chip: Target, kv: KvLayout) -> str | None:
    """Returns why no engine keeps a cache so on this chip, or None."""
    if kv == "int8" and chip.kind == "cuda":
        return "vLLM and SGLang keep no int8 latent on NVIDIA GPUs, they have fp8"
    support = chip.support(kv)
    return support.source if kv != "bf16" and support.answer == "no" else None


def kv_bytes_per_token(config: ModelConfig, cache: Cache, mtp: bool) -> int:
    layers = config.num_layers if mtp else config.num_hidden_layers
    return layers * kv_row_bytes(config, cache.kv)


def index_bytes_per_token(config: ModelConfig, cache: Cache, mtp: bool) -> int:
    """Layers that share an indexer keep no keys."""
    layers = config.num_layers if mtp else config.num_hidden_layers
    return sum(config.full_indexer[:layers]) * index_row_bytes(config, cache.index)


def scores(load: Load, layout: Layout) -> int:
    """Returns the bytes of the indexer's float32 scores: a slice of a prefill chunk's, or decode's.

    Every device of a tensor-parallel group computes the same ones.
    """
    sequences = -(-load.concurrency // layout.data)
    prefill = min(min(CHUNK_TOKENS, load.context) * load.context * 4, SCORE_BYTES)
    return max(prefill, sequences * load.context * 4)


def activations(config: ModelConfig, load: Load, layout: Layout) -> int:
    """Returns the bytes of a prefill chunk's largest live buffers, bfloat16, balanced routing.

    Two residual-wide buffers; beside them attention's queries, absorbed queries and latent outputs,
    or the experts' inputs, gate and up, products and outputs; and float32 logits of one token a
    sequence.
    """
    c = config
    tokens = min(CHUNK_TOKENS, load.context)
    heads = -(-c.num_attention_heads // layout.tensor)
    row = 2 * c.kv_lora_rank + c.qk_rope_head_dim + c.qk_head_dim
    attention = tokens * heads * row * 2
    if layout.experts == "whole":
        rows = -(-tokens * layout.data * c.num_experts_per_tok // layout.devices)
        width = c.moe_intermediate_size
    else:
        rows, width = tokens * c.num_experts_per_tok, -(-c.moe_intermediate_size // layout.tensor)
    experts = rows * (2 * c.hidden_size + 3 * width) * 2
    sequences = -(-load.concurrency // layout.data)
    logits = sequences * -(-c.vocab_size // layout.tensor) * 4
    return 2 * tokens * c.hidden_size * 2 + max(attention, experts) + logits


@dataclass(frozen=True)
class Plan:
    """What a device's memory follows from, apart from the load."""

    config: ModelConfig
    weights: Weights  # the device's share
    cache: Cache
    layout: Layout
    capacity: int | None
    mtp: bool = True
    reserve: float = RESERVE

    def parts(self, load: Load) -> dict[str, int]:
        """Returns bytes by part, in the order drawn."""
        sequences = -(-load.concurrency // self.layout.data)
        tokens = sequences * load.context
        parts = {role.value: size for role, size in self.weights.by_role.items()}
        parts["mtp"] = self.weights.mtp if self.mtp else 0
        parts["kv_cache"] = tokens * kv_bytes_per_token(self.config, self.cache, self.mtp)
        parts["index_cache"] = tokens * index_bytes_per_token(self.config, self.cache, self.mtp)
        parts["activations"] = activations(self.config, load, self.layout)
        parts["scores"] = scores(load, self.layout)
        parts["reserve"] = int(self.reserve * (self.capacity or 0))
        return parts

    def fits(self, load: Load) -> bool:
        return self.capacity is not None and sum(self.parts(load).values()) <= self.capacity

    def device(self, load: Load) -> Device:
        """Returns the fullest device under `load`, and the largest loads that fit."""
        context = concurrency = None
        if self.capacity is not None:
            most = self.config.max_position_embeddings
            context = _largest(most, lambda n: self.fits(Load(n, load.concurrency)))
            concurrency = self._most(load.context)
        return Device(self.layout, self.parts(load), self.capacity, context, concurrency)

    def _most(self, context: int) -> int:
        """Returns the most sequences of `context` tokens that fit; each of them takes some room."""
        above = 1
        while self.fits(Load(context, above)):
            above *= 2
        return _largest(above - 1, lambda n: self.fits(Load(context, n)))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to `most` that fits, 0 for none; what fits, fits if smaller."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
