"""Bytes of a model's weights in the layout a recipe's format writes, whole or one device's share.

The formats' layouts are stated here a second time, in bytes; tests hold them to real outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.types import Fp8Scheme, IntScheme, KeepScheme, Role, Scheme
from recipes.schema import Recipe

SCALE_BYTES = {"bfloat16": 2, "float32": 4}
KEPT_BYTES = {"bfloat16": 2, "float16": 2}
FP8_BLOCK = 128
INT32_CODES = 8  # four-bit codes in a word
SHAPE_BYTES = 16  # compressed-tensors' `weight_shape`, two int64
BIAS_SLICES = 16  # msModelSlim's `scale_bias` of down_proj; one for gate and up

Elements = Callable[[str], int]  # a tensor's full name -> bytes an element as the source has it
Split = Literal["rows", "columns", "whole"]

# How engines deal out a matrix under tensor parallelism: vLLM's and SGLang's DeepSeek model
# classes, which GLM-5 shares. The indexer, the latents' projections and the router are replicated.
SPLITS: dict[str, Split] = {
    "q_b_proj": "rows",
    "kv_b_proj": "rows",
    "o_proj": "columns",
    "gate_proj": "rows",
    "up_proj": "rows",
    "gate_up_proj": "rows",
    "down_proj": "columns",
}


@dataclass(frozen=True)
class Share:
    """One device's part: every matrix's 1 / `tensor`, and its routed experts.

    `expert` None splits each expert with the rest; else whole experts are dealt over that many.
    """

    tensor: int = 1
    expert: int | None = None


WHOLE = Share()


@dataclass(frozen=True)
class Weights:
    """Bytes by role outside the MTP layers, and of the MTP layers."""

    by_role: dict[Role, int]
    mtp: int

    @property
    def total(self) -> int:
        return sum(self.by_role.values()) + self.mtp


@dataclass(frozen=True)
class Matrix:
    """`count` equal matrices [rows, columns] of a layer, as one device holds them.

    `cut` is over how many devices its columns are split.
    """

    layer: int
    path: str
    role: Role
    scheme: Scheme
    rows: int
    columns: int
    count: int
    cut: int = 1


def released(name: str) -> int:
    """Bytes an element in the published BF16 checkpoints: the correction bias is float32."""
    return 4 if name.endswith("e_score_correction_bias") else 2


def weights(
    config: ModelConfig, recipe: Recipe, share: Share = WHOLE, elements: Elements = released
) -> Weights:
    """Returns the bytes that `recipe` writes for this model, or what the fullest device holds."""
    by_role: dict[Role, int] = {}
    mtp = 0
    vocabulary = -(-config.vocab_size // share.tensor)
    for spec in names.top_tensors(config):
        if not spec.optional:
            first = vocabulary if len(spec.shape) == 2 else spec.shape[0]
            _add(by_role, spec.role, first * _rest(spec.shape) * elements(spec.name))
    for layer in range(config.num_layers):
        roles: dict[Role, int] = {}
        prefix = names.layer_prefix(layer)
        for path, role, length in names.layer_vectors(config, layer):
            _add(roles, role, length * elements(prefix + path))
        for matrix in matrices(config, recipe, layer, share):
            _add(roles, matrix.role, matrix.count * matrix_bytes(matrix, recipe, elements))
        if config.is_mtp(layer):
            copied = recipe.mtp_embeddings == "copied"
            embedding = 2 * vocabulary * config.hidden_size * elements(names.EMBEDDING)
            mtp += sum(roles.values()) + (embedding if copied else 0)
        else:
            for role, size in roles.items():
                _add(by_role, role, size)
    return Weights(by_role, mtp)


def matrices(
    config: ModelConfig, recipe: Recipe, layer: int, share: Share = WHOLE
) -> Iterator[Matrix]:
    """Yields a layer's matrices as one device holds them; routed experts by projection."""
    for module in names.layer_modules(config, layer):
        scheme = recipe.plan(module.role, layer, config).scheme()
        parts = names.stacked_parts(module.path) if module.stacked else (module.path,)
        rows, columns = module.shape[-2] // len(parts), module.shape[-1]
        tensor, count = share.tensor, 1
        if module.stacked:
            count = module.shape[0]
            if share.expert is not None:
                tensor, count = 1, -(-count // share.expert)
        for part in parts:
            split = SPLITS.get(part.rpartition(".")[2], "whole")
            yield Matrix(
                layer,
                f"mlp.experts.{part}" if module.stacked else part,
                module.role,
                scheme,
                -(-rows // tensor) if split == "rows" else rows,
                -(-columns // tensor) if split == "columns" else columns,
                count,
                tensor if split == "columns" else 1,
            )


def matrix_bytes(matrix: Matrix, recipe: Recipe, elements: Elements = released) -> int:
    """Returns the bytes of one such matrix, scales and all, as the recipe's format lays it out."""
    rows, columns, scheme = matrix.rows, matrix.columns, matrix.scheme
    if isinstance(scheme, KeepScheme):
        name = names.layer_prefix(matrix.layer) + _first_name(matrix.path) + ".weight"
        return rows * columns * (KEPT_BYTES[scheme.dtype] if scheme.dtype else elements(name))
    if isinstance(scheme, Fp8Scheme):
        return rows * columns + 4 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    return _integer_bytes(matrix, scheme, recipe)


def _integer_bytes(matrix: Matrix, scheme: IntScheme, recipe: Recipe) -> int:
    rows, columns = matrix.rows, matrix.columns
    groups = -(-columns // scheme.group_size) if scheme.group_size else 1
    scales = rows * groups * SCALE_BYTES[scheme.scale_dtype]
    if recipe.format == "modelslim":
        scales = rows * 2 * 4  # weight_scale and weight_offset, float32
        if scheme.bits == 8:
            return rows * columns + scales
        slices = -(-BIAS_SLICES // matrix.cut) if matrix.path.endswith("down_proj") else 1
        return rows * columns // 2 + scales + rows * 4 * slices
    if recipe.format == "sglang-w4afp8":
        return rows * columns // 2 + scales + 2  # and a bfloat16 input_scale
    if scheme.bits == 4 and recipe.packing == "int32":
        return rows * -(-columns // INT32_CODES) * 4 + scales + SHAPE_BYTES
    return rows * columns + scales


def _first_name(path: str) -> str:
    """`mlp.experts.gate_proj` -> `mlp.experts.0.gate_proj`, a name that checkpoints have."""
    if path.startswith("mlp.experts."):
        return path.replace("mlp.experts.", "mlp.experts.0.", 1)
    return path


def _rest(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) == 2 else 1


def _add(table: dict[Role, int], role: Role, size: int) -> None:
    table[role] = table.get(role, 0) + size
