"""Huawei Ascend. Figures are of one die, the device torch_npu sees; a 910C has two.

Core counts, clock and on-chip sizes are from CANN's own Ascend910_9382.ini and Ascend910B*.ini.
"""

from __future__ import annotations

from dataclasses import dataclass

from targets.base import Figure, Support, Target

_CUBE = "cube unit"
_NO_FP8 = "the cube unit of 910B and 910C has none (CANN Ascend910_9382.ini; first in 950)"
_W4A8 = "npu_grouped_matmul takes int4 weights with int8 activations (torch_npu, CANN docs)"
_HBM = "vendor's product pages as quoted by cloud sellers: 64 GB a die"
_DERIVED = "CANN ini: 24 cube cores x 16^3 (int8 16 x 32 x 16) x 2 x 1.8 GHz"

_WEIGHTS = {
    "bf16": Support("yes", _CUBE),
    "int8": Support("yes", _CUBE),
    "int4": Support("yes", _W4A8),
    "fp8": Support("no", _NO_FP8),
}
_ACTIVATIONS = {
    "bf16": Support("yes", _CUBE),
    "int8": Support("yes", _CUBE),
    "fp8": Support("no", _NO_FP8),
}
_LIMITS = "int4 weights are per channel in vllm-ascend; group sizes other than 256 have no NPU op"

CHIPS = {
    "ascend-910b": Target(
        name="ascend-910b",
        title="Ascend 910B (Atlas A2)",
        kind="ascend",
        verification="lowered",
        weights=_WEIGHTS,
        activations=_ACTIVATIONS,
        memory_bytes=Figure(64e9, "press", _HBM),
        bandwidth_bytes_s=Figure(None, "unknown", "no primary source found"),
        peak_ops_s={
            "bf16": Figure(280e12, "press", "a cloud seller's page, the part with 20 cube cores"),
            "int8": Figure(560e12, "press", "a cloud seller's page, the part with 20 cube cores"),
        },
        notes=(_LIMITS, "910B1 has 24 cube cores, 910B4 20"),
    ),
    "ascend-910c": Target(
        name="ascend-910c",
        title="Ascend 910C (Atlas A3), one die",
        kind="ascend",
        verification="lowered",
        weights=_WEIGHTS,
        activations=_ACTIVATIONS,
        memory_bytes=Figure(64 * 2**30, "vendor", "CANN Ascend910_9382.ini: HBM 64 GiB a die"),
        bandwidth_bytes_s=Figure(1.6e12, "hearsay", "3.2 TB/s a 910C commonly quoted; unconfirmed"),
        peak_ops_s={
            "bf16": Figure(354e12, "vendor", _DERIVED),
            "int8": Figure(708e12, "vendor", _DERIVED),
        },
        notes=(_LIMITS, "an Atlas 800T A3 holds 16 dies"),
    ),
}


@dataclass(frozen=True)
class Die:
    """A die that the compiler knows by this name: bytes of one core's memories, cores a die.

    UB belongs to a vector core, L1 and L0C to a cube core, which two vector cores serve.
    """

    name: str
    ub_bytes: int
    l1_bytes: int
    l0c_bytes: int
    cube_cores: int
    vector_cores: int


_SIZES = {"ub_bytes": 192 << 10, "l1_bytes": 512 << 10, "l0c_bytes": 128 << 10}
# Sizes from CANN's Ascend910_9382.ini (ub_size, l1_size, l0_c_size), equal on all four.
DIES: dict[str, tuple[Die, ...]] = {
    "ascend-910b": (
        Die("Ascend910B1", **_SIZES, cube_cores=24, vector_cores=48),
        Die("Ascend910B4", **_SIZES, cube_cores=20, vector_cores=40),
    ),
    "ascend-910c": (
        Die("Ascend910_9382", **_SIZES, cube_cores=24, vector_cores=48),
        Die("Ascend910_9362", **_SIZES, cube_cores=20, vector_cores=40),
    ),
}
