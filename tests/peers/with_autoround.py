"""Quantizes by AutoRound, in an environment that has it; arguments as with_llmcompressor.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from outcome import Outcome, recorded
from safetensors.torch import load_file

KEPT = "self_attn,shared_experts,layers.0.mlp,lm_head"  # it never takes the router


def main() -> None:
    source, tokens, output, settings = sys.argv[1:]
    with recorded(Path(output), ("auto-round",)) as outcome:
        quantize(source, Path(tokens), output, json.loads(settings), outcome)


def quantize(
    source: str, tokens: Path, output: str, settings: dict[str, Any], outcome: Outcome
) -> None:
    """Writes the checkpoint with its routed experts in int4, the rest as it was."""
    from auto_round import AutoRound

    rows = load_file(tokens)["input_ids"]
    model: Any = source
    if settings["iterations"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    outcome.on(settings.get("device", "cpu"))
    outcome.started()
    rounder = AutoRound(
        model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(source),
        scheme="W4A16",
        group_size=settings["group"] or -1,
        sym=True,
        iters=settings["iterations"],
        dataset=list(rows.split(settings["batch"])),
        nsamples=len(rows),
        seqlen=rows.shape[1],
        batch_size=settings["batch"],
        ignore_layers=KEPT,
        device_map=settings.get("device", "cpu"),
        enable_torch_compile=False,
    )
    rounder.quantize_and_save(output, format="auto_round:auto_gptq")
    outcome.finished()
    nested = next(Path(output).glob("*/config.json")).parent
    for file in nested.iterdir():
        file.rename(Path(output) / file.name)
    nested.rmdir()


if __name__ == "__main__":  # its rounding without tuning starts processes
    main()
