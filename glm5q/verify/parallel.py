"""Over how many devices an engine can split the model, from its shape alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from glm5q.verify.report import Fit

SIZES = range(1, 17)
Config = dict[str, Any]
Rule = Callable[[Config, int, bool], "str | None"]


def fits(engine: str, config: Config) -> Iterator[Fit]:
    """Yields a row a size and kind of expert handling."""
    for expert_parallel in (False, True):
        for size in SIZES:
            why = refusal(engine, config, size, expert_parallel)
            yield Fit(engine, size, expert_parallel, why is None, why or "")


def refusal(engine: str, config: Config, size: int, expert_parallel: bool) -> str | None:
    """Returns why `engine` cannot split the model over `size` devices, or None."""
    return _common(config, size, expert_parallel) or RULES[engine](config, size, expert_parallel)


def _common(config: Config, size: int, expert_parallel: bool) -> str | None:
    """Heads, dense width and shared width split evenly in every engine's parallel linears.

    Vocabulary is padded. With expert parallelism experts are dealt out whole; the rest is split.
    """
    splits = {
        "attention heads": config["num_attention_heads"],
        "dense width": config["intermediate_size"],
        "shared expert's width": config["moe_intermediate_size"] * config["n_shared_experts"],
    }
    if not expert_parallel:
        splits["experts' width"] = config["moe_intermediate_size"]
    for what, count in splits.items():
        if count % size:
            return f"{count} ({what}) does not divide by {size}"
    if expert_parallel and config["n_routed_experts"] < size:
        return f"{config['n_routed_experts']} experts over {size} devices"
    return None


def _width(config: Config, size: int, expert_parallel: bool) -> int:
    """The experts' width on one device."""
    width: int = config["moe_intermediate_size"]
    return width if expert_parallel else width // size


def _vllm_w4a8_fp8(config: Config, size: int, expert_parallel: bool) -> str | None:
    """CompressedTensorsW4A8Fp8MoEMethod (vLLM 0.33) asserts both dimensions divide by 256."""
    if config["hidden_size"] % 256:
        return f"hidden size {config['hidden_size']} does not divide by 256"
    width = _width(config, size, expert_parallel)
    return f"experts' width a device {width} does not divide by 256" if width % 256 else None


def _groups_of_128(config: Config, size: int, expert_parallel: bool) -> str | None:
    """down_proj's groups of 128 columns must not be cut (SGLang 0.5.23, group 128 kernels)."""
    width = _width(config, size, expert_parallel)
    return f"experts' width a device {width} cuts a group of 128" if width % 128 else None


def _sglang_w4afp8(config: Config, size: int, expert_parallel: bool) -> str | None:
    """As above, and SGLang's FP8 blocks refuse a split that is no multiple of 128 (fp8.py)."""
    heads = config["num_attention_heads"] // size
    per_head = {
        "q_b_proj": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "kv_b_proj": config["qk_nope_head_dim"] + config["v_head_dim"],
        "o_proj": config["v_head_dim"],
    }
    splits = {
        f"{name} rows" if "o_" not in name else "o_proj columns": heads * width
        for name, width in per_head.items()
    }
    splits["dense width"] = config["intermediate_size"] // size
    splits["shared expert's width"] = (
        config["moe_intermediate_size"] * config["n_shared_experts"] // size
    )
    if size > 1:
        for what, count in splits.items():
            if count % 128:
                return f"{what} a device {count} cut an FP8 block of 128"
    return _groups_of_128(config, size, expert_parallel)


def _ascend(config: Config, size: int, expert_parallel: bool) -> str | None:
    """scale_bias of down_proj has 16 slices; sparse attention takes 1 .. 128 heads, powers of two.

    npu_sparse_flash_attention on A2/A3: {1, 2, 4, 8, 16, 32, 64, 128} query heads.
    """
    if not expert_parallel and 16 % size:
        return f"16 slices of scale_bias do not divide by {size}"
    heads = config["num_attention_heads"] // size
    if heads & (heads - 1):
        return f"{heads} heads a device, the attention kernel takes powers of two"
    return None


def _nothing(_config: Config, _size: int, _expert_parallel: bool) -> str | None:
    return None


RULES: dict[str, Rule] = {
    "vllm": _vllm_w4a8_fp8,
    "vllm-cpu": _nothing,
    "sglang": _groups_of_128,
    "sglang-w4afp8": _sglang_w4afp8,
    "vllm-ascend": _ascend,
    "source-fp8": _sglang_w4afp8,  # its FP8 blocks, of the experts too
    "none": _nothing,
}
