"""The `quantization_config` of a compressed-tensors checkpoint: written, and read back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.formats.base import (
    Assignments,
    Options,
    for_engines,
    has,
    kept_whole,
    module_names,
)
from glm5q.types import IntScheme, KeepScheme, Role, Scheme

NAME = "compressed-tensors"
Container = Literal["pack-quantized", "int-quantized"]

# How engines call a role's modules, fused names included. `shared_exper[t]s` keeps the literal word
# "experts" out: transformers takes the first target containing it for the routed experts' group.
MODULE_PATTERNS: dict[Role, str] = {
    Role.ATTENTION: r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj"
    r"|fused_qkv_a_proj|fused_qkv_a_proj_with_mqa)$",
    Role.KV_B: r"self_attn\.kv_b_proj$",
    Role.INDEXER_QUERY: r"self_attn\.indexer\.wq_b$",
    Role.INDEXER_KEY: r"self_attn\.indexer\.(wk|wk_weights_proj)$",
    Role.INDEXER_WEIGHTS: r"self_attn\.indexer\.(weights_proj|wk_weights_proj)$",
    Role.DENSE_MLP: r"mlp\.(gate|up|down|gate_up)_proj$",
    Role.SHARED_EXPERT: r"mlp\.shared_exper[t]s\.(gate|up|down|gate_up)_proj$",
    Role.ROUTED_EXPERT: r"mlp\.experts\.\d+\.(gate|up|down)_proj$",
    Role.ROUTER: r"mlp\.gate$",
    Role.MTP_PROJECTION: r"eh_proj$",
}
# An MTP layer's other names: `layers.78.mtp_block.` in vLLM, `decoder.` in SGLang's draft model.
DRAFT = r"re:(.*\.)?decoder\..*"


def quantization_config(
    assignments: Assignments, config: ModelConfig, options: Options
) -> dict[str, Any]:
    """Returns config.json's `quantization_config` for one scheme a role and layer.

    A group a scheme, targets by regex with every fused alias; kept modules in `ignore`. Per-group
    `format` is what vLLM and transformers follow; the global one must be `pack-quantized` for
    SGLang's W4A8 experts. Checked on the resolvers of vLLM 0.33, SGLang 0.5.23, transformers 5.24.
    """
    options = for_engines(options, assignments, config)
    packed = options.packed
    mtp = [n for n in range(config.num_layers) if config.is_mtp(n)]
    whole = [n for n in mtp if kept_whole(assignments[n])]
    groups: dict[IntScheme, list[str]] = {}
    ignore = ["lm_head"]
    for role, pattern in MODULE_PATTERNS.items():
        by_scheme: dict[Scheme, list[int]] = {}
        having = [n for n in range(config.num_layers) if n not in whole and has(config, n, role)]
        for number in having:
            scheme = assignments[number][role]
            key: Scheme = KeepScheme() if isinstance(scheme, KeepScheme) else scheme
            by_scheme.setdefault(key, []).append(number)
        for scheme, numbers in by_scheme.items():
            target = _target(pattern, numbers, having, config)
            if isinstance(scheme, IntScheme):
                groups.setdefault(scheme, []).append(target)
            else:
                ignore.append(target)
    ignore += [rf"re:.*layers\.{number}\..*" for number in whole]
    if whole == mtp and mtp:
        ignore.append(DRAFT)
    if mtp:
        ignore.append(r"re:.*eh_proj$")
    ordered = sorted(groups, key=lambda scheme: (scheme.bits, str(scheme.group_size)))
    containers = [container(scheme, packed) for scheme in ordered]
    sections = {}
    for index, scheme in enumerate(ordered):
        linear = options.sglang and containers[index] == "pack-quantized"
        sections[f"group_{index}"] = _group(scheme, groups[scheme], containers[index], linear)
    overall = _overall(containers, options)
    return {
        "quant_method": NAME,
        "format": overall,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": sections,
        "ignore": ignore,
    }


def _target(pattern: str, numbers: list[int], having: list[int], config: ModelConfig) -> str:
    """A regex for a role's modules in these layers; plain when it is every layer having it."""
    if numbers == having:
        layers = r"\d+"
    else:
        layers = "(" + "|".join(str(number) for number in numbers) + ")"
    if any(config.is_mtp(number) for number in numbers):
        return rf"re:(.*layers\.{layers}\.(mtp_block\.)?|.*\bdecoder\.){pattern}"
    return rf"re:.*layers\.{layers}\.{pattern}"


def _overall(containers: list[Container], options: Options) -> str:
    """The global tag: SGLang's W4A8 experts need it packed; vLLM alone may be told the truth."""
    if not options.sglang and len(set(containers)) > 1:
        return "mixed-precision"
    return "pack-quantized" if "pack-quantized" in containers else "int-quantized"


def container(scheme: IntScheme, packed: bool) -> Container:
    """Returns the tensor layout of a scheme: four bits are packed where the engine unpacks them."""
    return "pack-quantized" if scheme.bits == 4 and packed else "int-quantized"


def _group(
    scheme: IntScheme, targets: list[str], layout: Container, linear: bool
) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group_size is None else "group",
        "dynamic": False,
    }
    if scheme.group_size is not None:
        weights["group_size"] = scheme.group_size
    activations = None
    if scheme.activation is not None:
        activations = {
            "num_bits": 8,
            "type": "int" if scheme.activation == "int8" else "float",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
    if linear and scheme.activation == "fp8":
        # SGLang reads its W4A8 scheme under the class name; other targets are matched before it.
        targets = [*targets, "Linear"]
    return {
        "targets": targets,
        "format": layout,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def resolve(raw: Mapping[str, Any], module: str) -> IntScheme | None:
    """Returns the scheme a `quantization_config` claims for a module name, None if it is ignored.

    First `ignore`, then exact and regex targets in order, then the class name `Linear`.
    """
    if any(_matches(target, module) for target in raw.get("ignore") or []):
        return None
    groups = list(raw["config_groups"].values())
    for group in groups:
        if any(_matches(target, module) for target in group["targets"]):
            return _scheme(group)
    for group in groups:
        if "Linear" in group["targets"]:
            return _scheme(group)
    return None


def check_claims(raw: Mapping[str, Any], assignments: Assignments, config: ModelConfig) -> None:
    """Proves that the config claims for every module what was written; a mismatch is our bug."""
    for number in range(config.num_layers):
        for module in names.layer_modules(config, number):
            wanted = assignments[number][module.role]
            for name in module_names(number, module):
                claimed = resolve(raw, name)
                expected = wanted if isinstance(wanted, IntScheme) else None
                if _without_scale_dtype(claimed) != _without_scale_dtype(expected):
                    raise AssertionError(f"{name}: config claims {claimed}, written {expected}")


def _without_scale_dtype(scheme: IntScheme | None) -> tuple[object, ...] | None:
    """The config does not say the scale's dtype; the tensor does."""
    if scheme is None:
        return None
    return scheme.bits, scheme.group_size, scheme.activation


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _scheme(group: Mapping[str, Any]) -> IntScheme:
    weights, activations = group["weights"], group.get("input_activations")
    activation: Literal["int8", "fp8"] | None = None
    if activations is not None:
        activation = "int8" if activations["type"] == "int" else "fp8"
    return IntScheme(
        bits=weights["num_bits"],
        group_size=weights.get("group_size") if weights["strategy"] == "group" else None,
        scale_dtype="bfloat16",
        activation=activation,
    )
