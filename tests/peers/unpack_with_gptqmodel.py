"""Some matrices of a GPTQModel checkpoint as its torch layer unpacks them: FOLDER OUTPUT."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = "model.layers.1."
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def main() -> None:
    folder, output = sys.argv[1:]
    tensors: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # as in with_gptqmodel.py
    names = [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]
    save_file({f"{n}.weight": unpacked(tensors, n) for n in names if n.startswith(LAYER)}, output)


def unpacked(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Returns the matrix as the layer holds it, float32 [rows, columns]."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    found = {suffix: tensors[f"{name}.{suffix}"] for suffix in SUFFIXES}
    columns, rows = found["g_idx"].shape[0], found["scales"].shape[1]
    group = columns // found["scales"].shape[0]
    layer = TorchLinear(4, group, True, False, columns, rows)
    layer.load_state_dict(found)
    convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.post_init()
    with torch.no_grad():
        return layer.dequantize_weight().T.float().contiguous()


if __name__ == "__main__":
    main()
