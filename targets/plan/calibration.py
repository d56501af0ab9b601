"""What quantizing a model needs: disk, memory beside it, and a floor for the time.

Terms follow calibrate.run: one layer is worked on while the next is read, hidden states lie in
float32. On a CPU a layer runs in float32 and candidates are compared dequantized; on a GPU it runs
in bfloat16, candidates are dequantized a few at a time, and large hidden states stay on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm5q.config import ModelConfig
from glm5q.types import IntScheme, Role
from recipes.schema import Gptq, Keep, Recipe
from targets.base import Figure, Target
from targets.plan.weights import Elements, Matrix, matrices, matrix_bytes, released, weights

FLOAT, BFLOAT = 4, 2
GPU_STATES_BYTES = 4 << 30  # hidden states beyond it lie in host memory
GPU_CHUNK_TOKENS = 65_536  # run at once there
AT_ONCE = 16  # a stack's candidates dequantized together on a GPU
PART_ELEMENTS = {"cpu": 1 << 28, "gpu": 1 << 29}  # weights of a stack that are rounded at once
COPIES = 4  # of them in float32: the weights, what is left to do, errors, a candidate
DISK_BYTES_S = 2e9  # assumed where none is given: one NVMe disk, read and write
SOURCE_READS = 2  # the scan that checks every value, and the layers


@dataclass(frozen=True)
class Needs:
    """Bytes and seconds. Memory by part at the layer that needs most: what is held at its peak.

    `cpu` is all in main memory, with --device cpu; `host` and `gpu` are the two sides of --device
    cuda. `compute_s` is the products at the chip's bf16 peak; None where that is unknown.
    """

    source_bytes: int
    output_bytes: int
    cpu: dict[str, int]
    host: dict[str, int]
    gpu: dict[str, int]
    flop: float
    compute_s: float | None
    disk_s: float
    peak: Figure
    disk_bytes_s: float

    @property
    def disk_bytes(self) -> int:
        return self.source_bytes + self.output_bytes

    @property
    def time_s(self) -> float | None:
        """At least: reading, computing and writing overlap at best."""
        return None if self.compute_s is None else max(self.compute_s, self.disk_s)


def needs(
    config: ModelConfig,
    recipe: Recipe,
    chip: Target,
    source_bytes: int,
    elements: Elements = released,
    disk_bytes_s: float = DISK_BYTES_S,
) -> Needs:
    """Returns what `glm5q calibrate` needs for one recipe on one device of `chip`."""
    output = weights(config, recipe, elements=elements).total
    flop = sum(_layer_flop(config, recipe, layer) for layer in range(config.num_layers))
    peak = chip.peak_ops_s.get("bf16", Figure(None, "unknown", "no source found"))
    layers = [_Layer(config, recipe, layer, elements) for layer in range(config.num_layers)]
    hungry = max(layers, key=lambda layer: sum(layer.cpu().values()))
    return Needs(
        source_bytes,
        output,
        hungry.cpu(),
        hungry.host(),
        hungry.gpu(),
        flop,
        None if peak.value is None else flop / peak.value,
        (SOURCE_READS * source_bytes + 2 * output) / disk_bytes_s,  # written, then read back
        peak,
        disk_bytes_s,
    )


def _size(matrix: Matrix) -> int:
    return matrix.count * matrix.rows * matrix.columns


class _Layer:
    """The parts of memory that calibrating one layer takes."""

    def __init__(self, config: ModelConfig, recipe: Recipe, layer: int, elements: Elements) -> None:
        kept = recipe.model_copy(update={"weights": dict.fromkeys(Role, Keep(method="keep"))})
        every = list(matrices(config, recipe, layer))
        coded = [m for m in every if isinstance(m.scheme, IntScheme)]
        tokens = recipe.calibration.windows * recipe.calibration.sequence_length
        self.source = sum(
            m.count * matrix_bytes(m, kept, elements) for m in matrices(config, kept, layer)
        )
        self.written = sum(m.count * matrix_bytes(m, recipe, elements) for m in every)
        self.weights = sum(_size(m) for m in every)
        self.codes = sum(_size(m) * _methods(recipe, m, config) for m in coded)
        self.gram = sum(_gram(recipe, m, config) for m in coded)
        indices = 0 if all(config.full_indexer) else tokens * config.index_topk * 4
        self.states = 2 * tokens * config.hidden_size * FLOAT + indices
        self._stacks = [m for m in coded if m.count > 1 and not m.path.endswith("up_proj")]
        largest = max((m.rows * m.columns for m in self._stacks), default=0)
        self.few = AT_ONCE * largest * FLOAT
        rows = min(tokens, GPU_CHUNK_TOKENS) * config.num_experts_per_tok
        width = 2 * config.hidden_size + 3 * config.moe_intermediate_size
        self.chunk = rows * width * BFLOAT

    def rounding(self, side: str) -> int:
        """Grams, and what rounding a part of the largest stack takes beside them.

        Gate and up are one stack; a part's Grams are blended with the layer's in a copy.
        """
        work = 0
        for matrix in self._stacks:
            stacked = 2 if matrix.path.endswith("gate_proj") else 1
            one = stacked * matrix.rows * matrix.columns
            part = min(matrix.count, max(1, PART_ELEMENTS[side] // one))
            blended = matrix.columns**2 if self.gram else 0
            work = max(work, part * (COPIES * one + blended) * FLOAT)
        return self.gram + work

    def cpu(self) -> dict[str, int]:
        return {
            "source layers, two": 2 * self.source,
            "layer in float32": self.weights * FLOAT,
            "hidden states": self.states,
            "rounding, then candidates in float32": max(self.rounding("cpu"), self.codes * FLOAT),
            "candidates' codes": self.codes,
            "written layer": self.written,
        }

    def host(self) -> dict[str, int]:
        states = self.states if self.states > 2 * GPU_STATES_BYTES else 0
        parts = {"next layer": self.source, "hidden states": states, "written layer": self.written}
        return {name: size for name, size in parts.items() if size}

    def gpu(self) -> dict[str, int]:
        states = 0 if self.states > 2 * GPU_STATES_BYTES else self.states
        parts = {
            "layer in bfloat16": self.weights * BFLOAT,
            "hidden states": states,
            "rounding, then a few candidates": max(self.rounding("gpu"), self.few),
            "candidates' codes": self.codes,
            "a chunk's expert rows": self.chunk,
        }
        return {name: size for name, size in parts.items() if size}


def _methods(recipe: Recipe, matrix: Matrix, config: ModelConfig) -> int:
    """Candidates of a matrix: rounding, GPTQ, and descent from it."""
    if not isinstance(recipe.plan(matrix.role, matrix.layer, config), Gptq):
        return 1
    return 3 if recipe.steps.descent else 2


def _gram(recipe: Recipe, matrix: Matrix, config: ModelConfig) -> int:
    """Gate and up read one input and so share a Gram."""
    wanted = isinstance(recipe.plan(matrix.role, matrix.layer, config), Gptq)
    if not wanted or matrix.path.endswith("up_proj"):
        return 0
    return matrix.count * matrix.columns**2 * FLOAT


def _layer_flop(config: ModelConfig, recipe: Recipe, layer: int) -> float:
    """Two forwards of every token (source, and what was written), Grams, and GPTQ's updates.

    GPTQ of [rows, columns]: a factor of columns^3 / 3 a Gram and rows x columns^2 of feedback.
    """
    plan = recipe.calibration
    tokens = plan.windows * plan.sequence_length
    flop = 0.0
    for matrix in matrices(config, recipe, layer):
        routed = matrix.role is Role.ROUTED_EXPERT
        rows = tokens * config.num_experts_per_tok if routed else tokens * matrix.count
        flop += 2 * 2 * rows * matrix.rows * matrix.columns
        if _gram(recipe, matrix, config):
            flop += 2 * rows * matrix.columns**2 + matrix.count * matrix.columns**3 / 3
        if isinstance(recipe.plan(matrix.role, layer, config), Gptq):
            flop += matrix.count * matrix.rows * matrix.columns**2
    return flop + 2 * _attention_flop(config, tokens, plan.sequence_length)


def _attention_flop(config: ModelConfig, tokens: int, length: int) -> float:
    """Sparse attention and indexer of one layer's forward, over windows of `length` tokens."""
    most = min(config.index_topk, length)
    average = most - most**2 / (2 * length)  # of min(position, topk) over a window
    attention = 2 * config.num_attention_heads * average
    attention *= 2 * config.kv_lora_rank + config.qk_rope_head_dim
    indexer = 2 * config.index_n_heads * config.index_head_dim * length / 2
    return tokens * (attention + indexer)
