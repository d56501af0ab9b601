"""Quantizes by llm-compressor, in an environment that has it. See `tests.peers.peers` for settings.

    python with_llmcompressor.py SOURCE TOKENS OUTPUT '{"method": "gptq", ...}'

TOKENS is a safetensors file with `input_ids` int64 [windows, length].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from outcome import Outcome, recorded
from safetensors.torch import load_file
from torch.utils.data import DataLoader

EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"


def main() -> None:
    source, tokens, output, settings = sys.argv[1:]
    with recorded(Path(output), ("llmcompressor", "compressed-tensors")) as outcome:
        quantize(source, Path(tokens), output, json.loads(settings), outcome)


def quantize(
    source: str, tokens: Path, output: str, settings: dict[str, Any], outcome: Outcome
) -> None:
    """Writes the checkpoint with its routed experts in int4, the rest as it was."""
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe

    hide_broken_modules(outcome)
    with load_quantizable_moe():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, attn_implementation="eager"
        )
    if settings["method"] == "awq":
        pinned_memory_left_out(outcome)
    rows = load_file(tokens)["input_ids"]
    outcome.started()
    oneshot(
        model=model,
        dataset=DataLoader([{"input_ids": row} for row in rows], batch_size=1),
        recipe=modifiers(settings),
        num_calibration_samples=len(rows),
        max_seq_length=rows.shape[1],
        moe_calibrate_all_experts=settings["all_experts"],
        sequential_targets=["GlmMoeDsaDecoderLayer"],
    )
    outcome.finished()
    model.save_pretrained(output, save_compressed=True)


def modifiers(settings: dict[str, Any]) -> list[Any]:
    """Returns llm-compressor's recipe of one row."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if settings["group"] else "channel",
        "group_size": settings["group"],
    }
    if settings["observer"]:
        weights["observer"] = settings["observer"]
    groups = {"config_groups": {"experts": {"targets": [EXPERTS], "weights": weights}}}
    if settings["method"] == "gptq":
        return [GPTQModifier(**groups)]
    if settings["method"] == "rtn":
        return [QuantizationModifier(**groups)]
    return [awq(settings["map"]), QuantizationModifier(**groups)]


def awq(mapped: str) -> Any:
    """Returns AWQ with the tool's own map for GLM-5, or scaling between the experts' matrices."""
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    if mapped == "own":
        return AWQModifier()
    up, down = (EXPERTS.replace("(gate|up|down)", part) for part in ("up", "down"))
    return AWQModifier(mappings=[AWQMapping(up, [down])])


def hide_broken_modules(outcome: Outcome) -> None:
    """Empties the listing of transformers' modules that cannot be imported.

    The loader lists every module's names, and image modules import torchvision when listed.
    """
    hidden = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers."):
            try:
                dir(module)
            except ImportError:
                module.__dir__ = list  # type: ignore[method-assign]
                hidden += 1
    if hidden:
        outcome.note(f"{hidden} image modules hidden from its loader: there is no torchvision")


def pinned_memory_left_out(outcome: Outcome) -> None:
    """AWQ pins its cache for an accelerator and stops where none is."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    IntermediatesCache.pin_memory = lambda _cache, _batch: None
    outcome.note("pin_memory of its cache made to do nothing: no accelerator here")


if __name__ == "__main__":
    main()
