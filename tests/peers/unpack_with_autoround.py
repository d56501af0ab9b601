"""Some matrices of an AutoRound checkpoint as its CPU layer multiplies by them: FOLDER OUTPUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = "model.layers.1."
SUFFIXES = ("qweight", "qzeros", "scales")


def main() -> None:
    folder, output = sys.argv[1:]
    tensors: dict[str, Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    names = [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]
    save_file({f"{n}.weight": unpacked(tensors, n) for n in names if n.startswith(LAYER)}, output)


def unpacked(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Returns what the layer makes of the identity, float32 [rows, columns]."""
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    qweight, qzeros, scales = (tensors[f"{name}.{suffix}"] for suffix in SUFFIXES)
    columns, rows = 8 * qweight.shape[0], qweight.shape[1]
    layer = QuantLinear(4, columns // scales.shape[0], columns, rows, bias=False)
    layer.qweight, layer.qzeros, layer.scales = qweight, qzeros, scales
    layer.post_init()
    with torch.no_grad():
        return layer(torch.eye(columns, dtype=torch.float16)).T.float().contiguous()


if __name__ == "__main__":
    main()
