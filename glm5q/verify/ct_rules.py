"""What vLLM, SGLang and transformers make of a compressed-tensors config, by names alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# vLLM 0.33 and SGLang 0.5.23 build these as one module; vLLM's packed_modules_mapping and the
# fused_qkv_a_proj of deepseek_v2.py.
FUSED = {
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class RefusedError(Exception):
    """The engine raises on this module; the text is why."""


@dataclass(frozen=True)
class Claim:
    """The scheme a config gives a module. `group` None is per channel, `activation` None none."""

    bits: int
    integer: bool
    group: int | None
    activation: str | None
    packed: bool

    def label(self) -> str:
        grain = f"g{self.group}" if self.group else "channel"
        return f"{'int' if self.integer else 'fp'}{self.bits} {grain} + {self.activation}"


def claim(group: Mapping[str, Any], overall: str) -> Claim:
    """Returns a config group as a Claim. A group's own `format` wins over the global one."""
    weights, inputs = group["weights"], group.get("input_activations")
    activation = None
    if inputs:
        activation = ("int" if inputs["type"] == "int" else "fp") + str(inputs["num_bits"])
        if not inputs.get("dynamic"):
            activation += " static"
    return Claim(
        int(weights["num_bits"]),
        weights["type"] == "int",
        weights.get("group_size") if weights["strategy"] == "group" else None,
        activation,
        (group.get("format") or overall) == "pack-quantized",
    )


def matches(target: str, name: str) -> bool:
    """`re:` by re.match, else equality (compressed_tensors.utils.match)."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


def _any(targets: Iterable[str], name: str) -> bool:
    return any(matches(target, name) for target in targets)


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(config["config_groups"].values())


def _shards(name: str) -> list[str]:
    prefix, _, last = name.rpartition(".")
    return [f"{prefix}.{part}" for part in FUSED.get(last, ())]


def vllm(config: Mapping[str, Any], name: str) -> Claim | None:
    """vLLM 0.33's: name, then fused shards if all match, then the class name `Linear`.

    Ignored if the name matches, else by its shards, which must agree (config_utils.py,
    find_matching_patterns; compressed_tensors/utils.py, find_matched_target). Unmatched modules are
    left unquantized.
    """
    ignore = config.get("ignore") or []
    if _any(ignore, name) or _alike(name, [_any(ignore, shard) for shard in _shards(name)]):
        return None
    found = _by_name(config, name) or _by_shards(config, name) or _by_class(config)
    return claim(found, config.get("format", "")) if found else None


def sglang(config: Mapping[str, Any], name: str) -> Claim | None:
    """SGLang 0.5.23's: name, then the class name `Linear`, then fused shards; unmatched raises.

    A fused module is ignored by its shards, which must agree, unless its very name is listed; a
    plain entry also ignores names that end in it (compressed_tensors/utils.py).
    """
    ignore = config.get("ignore") or []
    shards = [] if name in ignore else _shards(name)
    if _alike(name, [_any_suffix(ignore, one) for one in shards or [name]]):
        return None
    found = _by_name(config, name) or _by_class(config) or _by_shards(config, name)
    if found is None:
        raise RefusedError(f"{name}: matches no target and is not ignored")
    return claim(found, config.get("format", ""))


def _alike(name: str, states: list[bool]) -> bool:
    """Whether all of a module's shards are ignored. Raises RefusedError if just some are."""
    if len(set(states)) > 1:
        raise RefusedError(f"{name}: its shards are not ignored alike")
    return any(states)


def _any_suffix(targets: Iterable[str], name: str) -> bool:
    return any(
        matches(target, name) or (not target.startswith("re:") and name.endswith("." + target))
        for target in targets
    )


def _by_shards(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The first shard's group, if every shard has one."""
    groups = [_by_name(config, shard) for shard in _shards(name)]
    return groups[0] if groups and None not in groups else None


def _by_name(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """The first group with a regex or exact target for the name, groups in order."""
    return next((group for group in _groups(config) if _any(group["targets"], name)), None)


def _by_class(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((group for group in _groups(config) if "Linear" in group["targets"]), None)


def sglang_expert_problems(config: Mapping[str, Any]) -> list[str]:
    """SGLang's test for W4A8 experts reads the class name's group and the global format only.

    compressed_tensors.py: target_scheme_map["Linear"], is_wint4afp8_or_wint4a16_config.
    """
    linear = _by_class(config)
    said = []
    if linear is None:
        said.append("no target is named Linear, which SGLang's W4A8 experts are read from")
    elif claim(linear, config.get("format", "")).bits != 4:
        said.append("the group of target Linear is not the experts' int4")
    if config.get("format") != "pack-quantized":
        said.append(f"global format is {config.get('format')}, SGLang wants pack-quantized")
    return said


def transformers_groups(config: Mapping[str, Any]) -> tuple[Claim | None, Claim | None]:
    """Returns the (experts', dense) schemes that transformers' dequantize=True takes.

    The experts' is the first group with a `re:` target that has the word "experts" in it, the dense
    one the first without such a target (transformers 5.24, integrations/compressed_tensors.py).
    """
    experts = dense = None
    for group in _groups(config):
        named = [target for target in group["targets"] if target.startswith("re:")]
        worded = any("experts" in target for target in named)
        one = claim(group, config.get("format", ""))
        if worded and experts is None:
            experts = one
        if not worded and dense is None:
            dense = one
    return experts, dense


def vllm_kernel(found: Claim, expert: bool) -> str | None:
    """Returns why vLLM 0.33 has no scheme for a claim, None if it has.

    compressed_tensors.py `_get_scheme_from_parts` and compressed_tensors_moe: int4 with fp8 only in
    groups of 128 and packed; int8 per channel with dynamic int8; int4 with int8 unpacked, on CPUs.
    """
    if not found.integer:
        return None if found.bits == 8 else f"{found.label()} has no scheme"
    if found.activation is not None and found.activation.endswith("static") and expert:
        return f"{found.label()}: experts need dynamic activations"
    if found.bits == 4 and found.activation == "fp8":
        if not found.packed:
            return f"{found.label()} must be pack-quantized"
        return None if found.group == 128 else f"{found.label()} needs groups of 128"
    if found.bits == 4 and found.activation == "int8":
        return "int4 with int8 must be int-quantized, one code a byte" if found.packed else None
    if found.bits == 8:
        return None if found.group is None else f"{found.label()} must be per channel"
    return None if found.packed else f"{found.label()} must be pack-quantized"
