"""One row an engine: its names, ignore list and fusions replayed on every module of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glm5q.verify import ascend_rules, ct_rules
from glm5q.verify.ct_rules import Claim, RefusedError
from glm5q.verify.layouts import Held, same_group
from glm5q.verify.model import Linear, Model
from glm5q.verify.report import Row, row

Holdings = Mapping[str, Held]  # by name without `.weight`
Resolve = Callable[[Mapping[str, Any], str], "Claim | None"]

# Modules that engines build unquantized, whatever the config says: the router everywhere;
# wk + weights_proj in vLLM (fused, quant_config None); weights_proj in SGLang.
FUSED_NAMES = {
    "vllm": {"q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj"},
    "sglang": {
        "q_a_proj": "fused_qkv_a_proj_with_mqa",
        "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
    },
}
UNQUANTIZED = {
    "vllm": ("wk", "weights_proj", "gate"),
    "sglang": ("weights_proj", "gate"),
}


def compressed_tensors(config: Mapping[str, Any], model: Model, holdings: Holdings) -> list[Row]:
    """Returns the rows of vLLM, SGLang and transformers for a `quantization_config`."""
    if not isinstance(config.get("config_groups"), dict):
        return [Row("engine vLLM", "fail", "quantization_config has no config_groups")]
    fp8 = any(
        ct_rules.claim(group, "").activation == "fp8" for group in config["config_groups"].values()
    )
    rows = [
        row(
            "engine vLLM",
            _claims("vllm", ct_rules.vllm, config, model, holdings),
            "vLLM 0.33: every module's scheme is what was written, fused and MTP names too",
        )
    ]
    if not fp8:
        if config.get("format") == "mixed-precision":
            said = "written for vLLM alone (mixed-precision)"
            return [*rows, Row("engine transformers", "skip", said)]
        if any(what.packed for what in holdings.values()):
            return [*rows, _transformers(config, model, holdings)]
        said = "experts lie one code a byte, for vLLM and plugins; transformers loads packed ones"
        return [*rows, Row("engine transformers", "skip", said)]
    if config.get("format") == "mixed-precision":
        return [*rows, Row("engine SGLang", "skip", "written for vLLM alone (mixed-precision)")]
    problems = [*ct_rules.sglang_expert_problems(config)]
    problems += _claims("sglang", ct_rules.sglang, config, model, holdings)
    said = "SGLang 0.5.23: every module's scheme is what was written, the draft model's too"
    return [*rows, row("engine SGLang", problems, said), _transformers(config, model, holdings)]


def names_in(engine: str, model: Model, layer: int, name: str) -> list[str]:
    """Returns what an engine calls a checkpoint's linear: fused, and under its MTP prefix.

    vLLM: `model.layers.78.mtp_block.`; SGLang's draft model: `model.decoder.`, beside it `eh_proj`.
    """
    prefix = f"model.layers.{layer}."
    path = name.removeprefix(prefix)
    head, dot, last = path.rpartition(".")
    fused = FUSED_NAMES[engine].get(last)
    if last in ("gate_proj", "up_proj") and ".experts." not in path:
        fused = "gate_up_proj"
    path = f"{head}{dot}{fused}" if fused else path
    if not model.is_mtp(layer):
        return [prefix + path]
    if path == "eh_proj":
        return [prefix + path, "model.eh_proj"][: 1 if engine == "vllm" else 2]
    return [f"{prefix}mtp_block.{path}" if engine == "vllm" else f"model.decoder.{path}"]


def _claims(
    engine: str, resolve: Resolve, config: Mapping[str, Any], model: Model, holdings: Holdings
) -> Iterator[str]:
    """Yields modules whose claim is not what was written, or that the engine has no kernel for.

    Of a layer's routed experts the engines look at expert 0 alone; here each is looked at.
    """
    done: dict[str, str] = {}
    for layer in model.layers:
        for linear in model.linears(layer):
            what = holdings.get(linear.name)
            if what is None:
                continue
            if linear.name.rpartition(".")[2] in UNQUANTIZED[engine]:
                if what.kind != "float":
                    yield f"{linear.name}: {what.label()}, {engine} builds it unquantized"
                continue
            for module in names_in(engine, model, layer, linear.name):
                why = _one(resolve, config, module, what, linear)
                if why and done.setdefault(module, why) == why:
                    yield why


def _one(
    resolve: Resolve, config: Mapping[str, Any], module: str, what: Held, linear: Linear
) -> str | None:
    try:
        found = resolve(config, module)
    except RefusedError as error:
        return str(error)
    if found is None:
        return (
            None if what.kind == "float" else f"{module}: claimed unquantized, holds {what.label()}"
        )
    if what.kind == "float":
        return f"{module}: claimed {found.label()}, holds float weights"
    group = same_group(found.group, linear.shape[1])
    if (f"int{found.bits}", group, found.packed) != (what.kind, what.group, what.packed):
        return f"{module}: claimed {found.label()}, holds {what.label()}"
    kernel = ct_rules.vllm_kernel(found, linear.expert is not None)
    return f"{module}: {kernel}" if kernel else None


def _transformers(config: Mapping[str, Any], model: Model, holdings: Holdings) -> Row:
    """transformers gives all experts one scheme and all dense linears another."""
    experts, dense = ct_rules.transformers_groups(config)
    problems = []
    for layer in range(model.decoder_layers):
        for linear in model.linears(layer):
            what = holdings.get(linear.name)
            if what is None or what.kind == "float":
                continue
            found = experts if linear.expert is not None else dense
            group = found and same_group(found.group, linear.shape[1])
            if found is None or (f"int{found.bits}", group) != (what.kind, what.group):
                label = found.label() if found else "nothing"
                problems.append(f"{linear.name}: taken for {label}, holds {what.label()}")
    said = "transformers 5.24, dequantize=True: experts' and dense group found"
    return row("engine transformers", problems, said)


def modelslim(
    description: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    model: Model,
    tensors: set[str],
) -> list[Row]:
    """Returns the rows of vLLM-Ascend for a quant_model_description.json."""
    if description is None:
        problem = "quant_model_description.json: missing or not JSON"
        return [Row("engine vLLM-Ascend", "fail", problem, (problem,))]
    problems = [*ascend_rules.settings(description, config)]
    problems += ascend_rules.naming(description, tensors)
    for layer in model.layers:
        problems += ascend_rules.modules(description, model, layer)
    for layer in model.layers[model.decoder_layers :]:
        name = f"model.layers.{layer}.shared_head.head.weight"
        if (name in tensors) != (f"model.layers.{layer}.embed_tokens.weight" in tensors):
            problems.append(f"MTP layer {layer}: embedding and head must be copied both or neither")
    said = "vLLM-Ascend of 2026-08-22: every tensor described, fused parts alike, one scale a row"
    return [row("engine vLLM-Ascend", problems, said)]


def w4afp8(model: Model, holdings: Holdings) -> list[Row]:
    """Returns SGLang's row for w4afp8: it reads nothing but the method's name (w4afp8.py, fp8.py).

    Experts int4 in groups of 128, every other linear FP8 in blocks, but for what it builds plain.
    """
    problems = []
    for layer in model.layers:
        for linear in model.linears(layer):
            what = holdings.get(linear.name)
            if what is None:
                continue
            plain = linear.kind in ("gate", "weights_proj", "eh_proj")
            wanted = Held("float") if plain else Held("fp8")
            if linear.expert is not None:
                wanted = Held("int4", same_group(128, linear.shape[1]))
            if what != wanted:
                problems.append(
                    f"{linear.name}: SGLang wants {wanted.label()}, it is {what.label()}"
                )
    said = "SGLang 0.5.23 w4afp8: experts int4 g128, the rest FP8 blocks, MTP layers too"
    return [row("engine SGLang w4afp8", problems, said)]
