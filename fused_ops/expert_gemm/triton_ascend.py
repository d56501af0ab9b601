"""Routed experts' product on Ascend: launches of Triton kernels with tiles that fit its cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fused_ops.expert_gemm.halved import Halved, halve
from fused_ops.paging import spans
from fused_ops.triton_ascend import Launch, Runner, on_npu
from fused_ops.triton_support import power_of_two

KERNELS = "fused_ops.expert_gemm.triton_ascend_kernel"
# Most rows and features of a program, columns a step where one scale covers the whole row.
TILES = {"ROWS": 128, "N": 256, "WIDTH": 128}


def prepare(
    weight: Tensor, weight_scale: Tensor, columns: int, *, tiles: Mapping[str, int] = TILES
) -> Halved:
    """Reorders weights once, codes [experts, groups, width / 2 or width, out]; as cpu.prepare."""
    halved = halve(weight, weight_scale, columns, tiles["WIDTH"])
    return replace(halved, codes=halved.codes.transpose(2, 3).contiguous())


def expert_gemm(
    x: Tensor,
    weight: Tensor | Halved,
    offsets: Tensor,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiles: Mapping[str, int] = TILES,
    run: Runner = on_npu,
) -> Tensor:
    """As reference.expert_gemm for int8 x; `weight` may be prepared."""
    if not isinstance(weight, Halved):
        assert weight_scale is not None
        weight = prepare(weight, weight_scale, x.shape[1], tiles=tiles)
    x = x if x.stride(1) == 1 else x.contiguous()
    _, groups, _, features = weight.codes.shape
    out = torch.empty((x.shape[0], features), dtype=out_dtype or torch.bfloat16, device=x.device)
    mean = max(1, x.shape[0] // max(1, len(offsets) - 1))
    rows = min(tiles["ROWS"], power_of_two(mean))
    blocks = [
        (expert, low, end)
        for expert, (start, end) in enumerate(spans(offsets))
        for low in range(start, end, rows)
    ]
    if not blocks:
        return out
    table = torch.tensor(blocks, dtype=torch.int32).to(x.device)
    run(
        Launch(
            module=KERNELS,
            kernel="multiply",
            grid=(len(blocks), -(-features // tiles["N"])),
            args={
                "x": x, "codes": weight.codes, "scale": weight.scale,
                "x_scale": weight.scale if x_scale is None else x_scale.float(),
                "tiles": table, "out": out, "x_row": x.stride(0), "columns": weight.columns,
                "features": features,
            },
            constants={
                "GROUPS": groups, "WIDTH": weight.width, "BITS": weight.bits,
                "CHANNEL": weight.scale.shape[1] == 1, "HAS_X_SCALE": x_scale is not None,
                "ROWS": rows, "N": tiles["N"],
            },
        )
    )  # fmt: skip
    return out
