"""What vLLM-Ascend makes of quant_model_description.json, replayed on names alone.

From its quantization/utils and modelslim_config of 2026-08-22: schemes are looked up by tensor
name, so a tensor that the description does not name is a KeyError while loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from glm5q.verify.model import Linear, Model

FUSED = {
    "self_attn.fused_qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_experts.gate_up_proj": (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
    "mlp.experts": (
        "mlp.experts.0.gate_proj",
        "mlp.experts.0.up_proj",
        "mlp.experts.0.down_proj",
    ),
}
LINEAR_TYPES = ("FLOAT", "W8A8_DYNAMIC")  # W4A8_DYNAMIC has no linear scheme, only a MoE one
EXPERT_TYPES = ("FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC")
SETTINGS = ("version", "model_quant_type", "group_size", "metadata", "optional", "is_rot_used")


def naming(description: Mapping[str, Any], tensors: set[str]) -> Iterator[str]:
    """Yields tensors that the description does not name, and names without a tensor."""
    named = set(description) - set(SETTINGS)
    for name in sorted(tensors - named):
        yield f"description does not name {name}"
    for name in sorted(named - tensors):
        yield f"description names {name}, which is in no shard"


def settings(description: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yields settings that the engine refuses.

    A group size above 0 raises ValueError in its W4A8 MoE class; groups of 256 fail in the kernel
    (antiquantGroupSize). A `quantization_config` in config.json wins over the description.
    """
    group = description.get("group_size")
    if group != 0:
        yield f"description has group_size {group}, vLLM-Ascend takes 0, one scale a row"
    if "quantization_config" in config:
        yield "config.json has a quantization_config, which hides the description"
    if "model_quant_type" not in description:
        yield "description has no model_quant_type"


def modules(description: Mapping[str, Any], model: Model, layer: int) -> Iterator[str]:
    """Yields fused modules whose parts differ, and types without a scheme."""
    prefix = f"model.layers.{layer}."
    present = {linear.name.removeprefix(prefix) for linear in model.linears(layer)}
    for fused, parts in FUSED.items():
        if set(parts) <= present:
            types = [description.get(f"{prefix}{part}.weight") for part in parts]
            if None in types:
                missing = parts[types.index(None)]
                yield f"{prefix}{fused}: description does not name {prefix}{missing}.weight"
            elif len(set(types)) > 1:
                yield f"{prefix}{fused}: its parts are {', '.join(map(str, types))}"
    floats = [
        name
        for name, kind in description.items()
        if kind == "FLOAT" and name.startswith(prefix) and name.endswith(".weight")
    ]
    for linear in model.linears(layer):
        kind = description.get(linear.name + ".weight")
        allowed = EXPERT_TYPES if linear.expert is not None else LINEAR_TYPES
        if kind is not None and kind not in allowed:
            yield f"{linear.name}: type {kind} has no scheme in vLLM-Ascend"
        if kind not in (None, "FLOAT") and linear.expert is None:
            yield from _prefix_test(linear.name, floats)


def _prefix_test(name: str, floats: list[str]) -> Iterator[str]:
    """The engine skips a linear if any FLOAT `.weight` key starts with its name."""
    for other in floats:
        if other.startswith(name):
            yield f"{name}: {other} is FLOAT, so the engine leaves the linear unquantized"


def bits(description: Mapping[str, Any], linear: Linear) -> int | None:
    """Returns the bits a linear's codes have by the description, None for FLOAT."""
    kind = description.get(linear.name + ".weight")
    return {"W4A8_DYNAMIC": 4, "W8A8_DYNAMIC": 8}.get(str(kind))
