"""config.json of a glm_moe_dsa checkpoint, read strictly into the numbers the stream needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from glm5q.errors import CheckpointError

MODEL_TYPE = "glm_moe_dsa"
MOST_LAYERS, MOST_EXPERTS = 10_000, 65_536  # beyond these a config is garbage, not a model
RESTORE = "restore the config that came with the weights"


@dataclass(frozen=True)
class ModelConfig:
    """GLM-5's shape. Layers are numbered from 0; MTP layers follow the decoder's.

    `moe[i]` and `full_indexer[i]` cover decoder and MTP layers alike. `latent_norm_eps` is the eps
    of q_a_layernorm and kv_a_layernorm: vLLM and SGLang use rms_norm_eps there, transformers 1e-6.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    moe: tuple[bool, ...]
    full_indexer: tuple[bool, ...]
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_rope_interleave: bool
    rope_theta: float
    rms_norm_eps: float
    latent_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_layers(self) -> int:
        """Decoder and MTP layers together."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.num_hidden_layers

    def kind(self, layer: int) -> str:
        """`dense`, `moe` or `mtp`."""
        if self.is_mtp(layer):
            return "mtp"
        return "moe" if self.moe[layer] else "dense"

    def variant(self) -> str:
        """Which release has this shape: in GLM-5.2 and 5.3 layers share an indexer."""
        shared = not all(self.full_indexer[: self.num_hidden_layers])
        release = "GLM-5.2/5.3" if shared else "GLM-5/5.1"
        full_size = (self.hidden_size, self.num_hidden_layers, self.n_routed_experts)
        return release if full_size == (6144, 78, 256) else f"{release} architecture, other size"

    def with_latent_norm_eps(self, eps: float | None) -> ModelConfig:
        return self if eps is None else replace(self, latent_norm_eps=eps)


def read_config(root: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the parsed config and the raw JSON of `root/config.json`.

    Raises CheckpointError naming the file and the key for anything missing or not glm_moe_dsa.
    """
    path = root / "config.json"
    try:
        if not root.is_dir():
            raise CheckpointError(f"{root}: no such folder", "give a checkpoint folder")
        raw = load_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing", "give a Hugging Face checkpoint folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({error})", "restore the file") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object", "restore the file")
    return parse_config(raw, path), raw


def load_json(path: Path) -> Any:
    """Returns the JSON in `path`. Raises OSError or ValueError, the latter for doubled keys too."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_key_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _each_key_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {key!r} twice")
        table[key] = value
    return table


def parse_config(raw: Mapping[str, Any], path: Path | str = "config.json") -> ModelConfig:
    """Returns the ModelConfig in `raw`; `path` is only for messages. Raises CheckpointError."""
    if raw.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"{path}: model_type is {raw.get('model_type')!r}, not '{MODEL_TYPE}'",
            "glm5q reads GLM-5, 5.1, 5.2 and 5.3 (GLM-5.3-Flash is another architecture)",
        )
    value = _Values(raw, str(path))
    layers = value.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
    mtp = value.integer("num_nextn_predict_layers", 0, most=1)  # every release has one
    for key, only in _FIXED.items():
        if raw.get(key, only) != only:
            raise CheckpointError(f"{path}: {key} is {raw[key]!r}", f"GLM-5 has {only!r} there")
    eps = value.number("rms_norm_eps")
    config = ModelConfig(
        **{key: value.integer(key, least=1) for key in _INTEGER_KEYS},
        n_shared_experts=value.integer("n_shared_experts"),
        n_routed_experts=value.integer("n_routed_experts", least=1, most=MOST_EXPERTS),
        num_hidden_layers=layers,
        num_nextn_predict_layers=mtp,
        moe=_moe_layers(value, layers, mtp),
        full_indexer=_full_indexer_layers(value, layers, mtp),
        norm_topk_prob=value.boolean("norm_topk_prob", True),
        routed_scaling_factor=value.number("routed_scaling_factor"),
        indexer_rope_interleave=value.boolean("indexer_rope_interleave", True),
        rope_theta=_rope_theta(raw, str(path)),
        rms_norm_eps=eps,
        latent_norm_eps=eps,
        tie_word_embeddings=value.boolean("tie_word_embeddings", False),
    )
    _check_together(config, str(path))
    return config


def _check_together(config: ModelConfig, path: str) -> None:
    """Raises CheckpointError where two numbers, each fine alone, cannot both hold."""
    c = config
    problems = {
        f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts "
        f"{c.n_routed_experts}": c.num_experts_per_tok > c.n_routed_experts,
        f"qk_rope_head_dim {c.qk_rope_head_dim} is odd": c.qk_rope_head_dim % 2 == 1,
        f"index_head_dim {c.index_head_dim} is less than qk_rope_head_dim {c.qk_rope_head_dim}": (
            c.index_head_dim < c.qk_rope_head_dim
        ),
        "the first layer shares an indexer that no layer before it has": not c.full_indexer[0],
    }
    for problem, holds in problems.items():
        if holds:
            raise CheckpointError(f"{path}: {problem}", RESTORE)


# What the forward takes for granted.
_FIXED: dict[str, Any] = {
    "n_group": 1, "topk_group": 1, "rope_interleave": True, "rope_scaling": None,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_INTEGER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_experts_per_tok", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim", "index_topk",
    "max_position_embeddings",
)  # fmt: skip


class _Values:
    """Typed access to config.json that names the key when it is missing or of the wrong type."""

    def __init__(self, raw: Mapping[str, Any], path: str) -> None:
        self._raw, self._path = raw, path

    def integer(
        self, key: str, default: int | None = None, least: int = 0, most: int = 2**31 - 1
    ) -> int:
        value = self._raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str) -> float:
        value = self._raw.get(key)
        if not is_positive(value):
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._raw.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def kinds(self, key: str, layers: int, allowed: tuple[str, str]) -> list[str] | None:
        """A list with one of `allowed` for every layer at least, None where the key is not."""
        value = self._raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(entry not in allowed for entry in value):
            raise self._wrong(key, value, f"a list of {allowed[0]!r} and {allowed[1]!r}")
        if len(value) < layers:
            raise CheckpointError(
                f"{self._path}: {key} has {len(value)} entries for {layers} layers", RESTORE
            )
        return value[:layers]

    def _wrong(self, key: str, value: object, wanted: str) -> CheckpointError:
        if key not in self._raw:
            return CheckpointError(f"{self._path}: {key} is missing", RESTORE)
        return CheckpointError(f"{self._path}: {key} is {_short(value)}, not {wanted}", RESTORE)


def is_positive(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _moe_layers(value: _Values, layers: int, mtp: int) -> tuple[bool, ...]:
    kinds = value.kinds("mlp_layer_types", layers, ("dense", "sparse"))
    if kinds is not None:
        decoder = tuple(kind == "sparse" for kind in kinds)
    else:
        first = value.integer("first_k_dense_replace")
        frequency = value.integer("moe_layer_freq", 1, least=1)
        decoder = tuple(i >= first and i % frequency == 0 for i in range(layers))
    return decoder + (True,) * mtp


def _full_indexer_layers(value: _Values, layers: int, mtp: int) -> tuple[bool, ...]:
    """Explicit `indexer_types`, else full iff max(i - offset + 1, 0) % freq == 0.

    That rule and its defaults (freq 1, offset 2) are transformers' and vLLM's. MTP layers have
    their own indexer.
    """
    kinds = value.kinds("indexer_types", layers, ("full", "shared"))
    if kinds is not None:
        decoder = tuple(kind == "full" for kind in kinds)
    else:
        frequency = value.integer("index_topk_freq", 1, least=1)
        offset = value.integer("index_skip_topk_offset", 2)
        decoder = tuple(max(i - offset + 1, 0) % frequency == 0 for i in range(layers))
    return decoder + (True,) * mtp


def _rope_theta(raw: Mapping[str, Any], path: str) -> float:
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{path}: rope_parameters is {_short(rope)}, not a table", RESTORE)
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(
            f"{path}: rope_type is {rope['rope_type']!r}", "GLM-5 uses the default rotary"
        )
    if not is_positive(theta):
        raise CheckpointError(
            f"{path}: rope_parameters.rope_theta is {_short(theta)}, not a positive number",
            "restore it (GLM-5: 1000000, GLM-5.2: 8000000)",
        )
    return float(theta)
