"""What quantizing a model needs: disk, memory beside it, and a floor for the time.

Terms follow calibrate.run: one layer is worked on while the next is read, hidden states lie in
float32. On a CPU a layer runs in float32 and candidates are compared dequantized; on a GPU it runs
in bfloat16, candidates are multiplied as bytes, and large hidden states stay on the host.
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
NEAR_BYTES = 6 << 30  # of host memory's states, what it keeps too
PART_ELEMENTS = {"cpu": 1 << 28, "gpu": 3 << 27}  # weights of a stack that are rounded at once
# Bytes beside them, a weight and a Gram's element. CPU: in float32 the weights, what is left to do,
# errors, a candidate, the blended Gram. GPU: 9.4 GB for 16 experts of 4096 x 6144 were measured.
PART_BYTES = {"cpu": (16, 4), "gpu": (8, 10)}
DISK_BYTES_S = 2e9  # assumed where none is given: one NVMe disk, read and write
SOURCE_READS = 2  # the scan that checks every value, and the layers


@dataclass(frozen=True)
class Needs:
    """Bytes and seconds. Memory by part where a layer needs most: what is held at its peak.

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
    return Needs(
        source_bytes,
        output,
        max((layer.cpu() for layer in layers), key=_total),
        max((layer.host() for layer in layers), key=_total),
        max((layer.gpu() for layer in layers), key=_total),
        flop,
        None if peak.value is None else flop / peak.value,
        (SOURCE_READS * source_bytes + 2 * output) / disk_bytes_s,  # written, then read back
        peak,
        disk_bytes_s,
    )


def _size(matrix: Matrix) -> int:
    return matrix.count * matrix.rows * matrix.columns


class _Layer:
    """The parts of memory that calibrating one layer takes, in the phase that takes most."""

    def __init__(self, config: ModelConfig, recipe: Recipe, layer: int, elements: Elements) -> None:
        kept = recipe.model_copy(update={"weights": dict.fromkeys(Role, Keep(method="keep"))})
        every = list(matrices(config, recipe, layer))
        coded = [m for m in every if isinstance(m.scheme, IntScheme)]
        plan = recipe.calibration
        tokens = plan.windows * plan.sequence_length
        self.source = sum(
            m.count * matrix_bytes(m, kept, elements) for m in matrices(config, kept, layer)
        )
        self.written = sum(m.count * matrix_bytes(m, recipe, elements) for m in every)
        self.weights = sum(_size(m) for m in every)
        self.codes = sum(_size(m) * _methods(recipe, m, config) for m in coded)
        self.gram = sum(_gram(recipe, m, config) for m in coded)
        one = tokens * config.hidden_size
        indices = 0 if all(config.full_indexer) else tokens * config.index_topk * 4
        self.pair = 2 * one * FLOAT  # a layer's states, and the next one's
        self.states = self.pair * (2 if recipe.steps.correction else 1) + indices
        self.guided = recipe.steps.guidance
        self.inputs = config.num_hidden_layers * one
        self.gradient = one * FLOAT
        self._stacks = [m for m in coded if m.count > 1 and not m.path.endswith("up_proj")]
        rows = min(tokens, GPU_CHUNK_TOKENS) * config.num_experts_per_tok
        width = 2 * config.hidden_size + 3 * config.moe_intermediate_size
        self.chunk = rows * width * BFLOAT
        near = min(tokens, GPU_CHUNK_TOKENS) + plan.held_out * tokens
        self.near = min(NEAR_BYTES, round(near * config.hidden_size * FLOAT))

    def rounding(self, side: str) -> int:
        """What rounding a part of the largest stack takes beside Grams; gate and up are one."""
        work = 0
        for matrix in self._stacks:
            stacked = 2 if matrix.path.endswith("gate_proj") else 1
            one = stacked * matrix.rows * matrix.columns
            part = min(matrix.count, max(1, PART_ELEMENTS[side] // one))
            gram = matrix.columns**2 if self.gram else 0
            of_weight, of_gram = PART_BYTES[side]
            work = max(work, part * (of_weight * one + of_gram * gram))
        return work

    def cpu(self) -> dict[str, int]:
        layer = {"source layers, two": 2 * self.source, "layer in float32": self.weights * FLOAT}
        layer["hidden states"] = self.states
        rounding = max(self.gram + self.rounding("cpu"), self.codes * FLOAT)
        loop = layer | {
            "rounding, then candidates in float32": rounding,
            "candidates' codes": self.codes,
            "written layer": self.written,
        }
        return max(loop, layer | self._guidance(FLOAT), key=_total)

    def host(self) -> dict[str, int]:
        parts = {"next layer": self.source, "hidden states": self.states if self.apart else 0}
        loop = parts | {"written layer": self.written}
        return max(loop, parts | (self._guidance(BFLOAT) if self.apart else {}), key=_total)

    def gpu(self) -> dict[str, int]:
        """Statistics, rounding or the choice: a layer's Grams go before candidates are compared."""
        parts = {"layer in bfloat16": self.weights * BFLOAT}
        parts["hidden states"] = self.near if self.apart else self.states
        phases = (
            {"Grams": self.gram, "a chunk's expert rows": self.chunk},
            {
                "Grams": self.gram,
                "candidates' codes": self.codes,
                "a part being rounded": self.rounding("gpu"),
            },
            {
                "candidates' codes, and as bytes": 2 * self.codes,
                "a chunk's expert rows": self.chunk,
            },
        )
        return _held(parts | max(phases, key=_total))

    @property
    def apart(self) -> bool:
        """Whether a GPU's hidden states wait in host memory."""
        return self.pair > 2 * GPU_STATES_BYTES

    def _guidance(self, element_bytes: int) -> dict[str, int]:
        """What the sweeps before the loop hold; on a GPU inputs are bfloat16."""
        if not self.guided:
            return {}
        stream = self.pair + self.gradient
        return {"guidance, every layer's input": stream + element_bytes * self.inputs}


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def _held(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _methods(recipe: Recipe, matrix: Matrix, config: ModelConfig) -> int:
    """Candidates of a matrix: rounding, and what GPTQ and descent from it give."""
    return 2 if isinstance(recipe.plan(matrix.role, matrix.layer, config), Gptq) else 1


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
