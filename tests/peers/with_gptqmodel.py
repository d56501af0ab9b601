"""Quantizes by GPTQModel, in an environment that has it; arguments as with_llmcompressor.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from outcome import Outcome, recorded
from safetensors.torch import load_file

KEPT = r"-:^(?!.*mlp\.experts\.).*$"  # "-:" leaves out what the pattern matches


def main() -> None:
    source, tokens, output, settings = sys.argv[1:]
    with recorded(Path(output), ("gptqmodel",)) as outcome:
        quantize(source, Path(tokens), output, json.loads(settings), outcome)


def quantize(
    source: str, tokens: Path, output: str, settings: dict[str, Any], outcome: Outcome
) -> None:
    """Writes the checkpoint with its routed experts in int4, the rest as it was."""
    if (os.cpu_count() or 1) < 3:
        os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # read when it is imported
        outcome.note("GPTQMODEL_CPU_WORKERS=2: its loader asks for two workers of a pool of one")
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = load_file(tokens)["input_ids"].tolist()
    config = QuantizeConfig(
        bits=4,
        group_size=settings["group"] or -1,
        dynamic={KEPT: {}},
        **settings["options"],
    )
    model = GPTQModel.load(source, config, device="cpu")
    outcome.started()
    calibration = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
    model.quantize(calibration, batch_size=1)
    outcome.finished()
    model.save(output)


if __name__ == "__main__":
    main()
