"""Rounds by msModelSlim's SSZ, in an environment that has it; arguments as with_llmcompressor.py.

Its own command builds the released GLM-5's shapes whatever config.json says, so its quantizer is
given one matrix at a time, and its codes and scales are stored here. No calibration.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from outcome import Outcome, recorded
from safetensors.torch import load_file, save_file
from torch import Tensor

EXPERTS = re.compile(r"(model\.layers\.[1-4]\.mlp\.experts\.\d+\.(gate|up|down)_proj)\.weight")

ERRORS = ("RuntimeError", "size mismatch")


def main() -> None:
    source, _tokens, output, settings = sys.argv[1:]
    with recorded(Path(output), ("msmodelslim",)) as outcome:
        asked = json.loads(settings)
        if asked["command"]:
            command(source, output)
        quantize(Path(source), Path(output), asked["group"], outcome)


def command(source: str, output: str) -> None:
    """Runs msModelSlim's own command with its own recipe for GLM-5; raises with its first error."""
    from msmodelslim.cli.__main__ import __file__ as inside

    recipe = Path(inside).parents[1] / "lab_practice" / "glm_5" / "glm_5_w4a8.yaml"
    call = [str(Path(sys.executable).parent / "msmodelslim"), "quant", "--model_type", "GLM-5"]
    call += ["--model_path", source, "--save_path", output, "--config_path", str(recipe)]
    call += ["--device", "cpu", "--trust_remote_code", "False"]
    ended = subprocess.run(call, capture_output=True, text=True)
    if ended.returncode:
        said = [line.strip() for line in (ended.stdout + ended.stderr).splitlines()]
        errors = [line for line in said if line.startswith(ERRORS)]
        raise RuntimeError("; ".join(dict.fromkeys(errors[:2])) or said[-1])


def quantize(source: Path, output: Path, group: int | None, outcome: Outcome) -> None:
    """Writes the routed experts' codes (int8) and scales, and the rest as it was."""
    if group is not None:
        raise ValueError("SSZ knows one scale a row only")
    outcome.note(
        "its command builds the released GLM-5's shapes only (size mismatch for any other): "
        "its SSZ quantizer was called matrix by matrix"
    )
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    outcome.started()
    for name in [name for name in tensors if EXPERTS.fullmatch(name)]:
        tensors[name], tensors[f"{name}_scale"] = rounded(tensors[name])
    outcome.finished()
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "msmodelslim-ssz"}
    (output / "config.json").write_text(json.dumps(config), encoding="utf-8")


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 codes [rows, columns] and float32 scales [rows, 1] as its W4A8 recipe asks."""
    from msmodelslim.core.quantizer.base import AutoWeightQuantizer, QConfig
    from msmodelslim.ir.qal.qbase import QDType, QStorage

    config = QConfig(
        dtype="int4", scope="per_channel", symmetric=True, method="ssz", ext={"step": 10}
    )
    quantizer = AutoWeightQuantizer.from_config(config)
    quantizer.init_weight(QStorage(QDType.FLOAT, weight.float()))
    with torch.no_grad():
        quantizer(None)
    codes, scale = quantizer.get_q_storage().value, quantizer.get_q_param().ext["scale"]
    return codes.to(torch.int8).contiguous(), scale.float().reshape(-1, 1).contiguous()


if __name__ == "__main__":
    main()
