"""NVIDIA GPUs. Ceilings of H200 were measured; the others are quoted."""

from __future__ import annotations

from targets.base import Figure, Grade, Support, Target, Verification

_H200_RUN = "H200, driver 580.159.04, torch 2.11.0+cu130, 2026-11-30"
_H200_SHEET = "NVIDIA H200 SXM sheet, dense = half of its sparse figure"
_H20 = "third-party tables that agree; NVIDIA has no public sheet"
_A100 = "NVIDIA A100 80GB SXM sheet"
_4090 = "NVIDIA Ada whitepaper, dense, float32 accumulation"


def _gpu(
    name: str,
    title: str,
    fp8: bool,
    figures: dict[str, Figure],
    *notes: str,
    verification: Verification = "declared",
) -> Target:
    """`figures` holds memory_bytes, bandwidth_bytes_s and a peak a dtype."""
    tensor_cores = Support("yes", "tensor cores")
    fp8_support = tensor_cores if fp8 else Support("no", "its tensor cores predate it (sm_80)")
    return Target(
        name=name,
        title=title,
        kind="cuda",
        verification=verification,
        weights={
            "bf16": tensor_cores,
            "int8": tensor_cores,
            "int4": Support("yes", "widened in registers to the activation's dtype"),
            "fp8": fp8_support,
        },
        activations={"bf16": tensor_cores, "int8": tensor_cores, "fp8": fp8_support},
        memory_bytes=figures["memory_bytes"],
        bandwidth_bytes_s=figures["bandwidth_bytes_s"],
        peak_ops_s={dtype: figures[dtype] for dtype in ("bf16", "int8", "fp8") if dtype in figures},
        notes=notes,
    )


def _quoted(grade: Grade, source: str, **values: float) -> dict[str, Figure]:
    return {name: Figure(value, grade, source) for name, value in values.items()}


def _reported(mib: int) -> dict[str, Figure]:
    """Memory as the driver counts it, which is what an engine can have; sheets round it."""
    source = f"nvidia-smi as users post it: {mib} MiB"
    return {"memory_bytes": Figure(mib * 2**20, "press", source)}


CHIPS = {
    "h200": _gpu(
        "h200",
        "NVIDIA H200",
        True,
        {
            "memory_bytes": Figure(
                150_109_880_320, "measured", f"torch's total_memory, {_H200_RUN}; sheet 141 GB"
            ),
            "bandwidth_bytes_s": Figure(
                4.26e12, "measured", f"copy of 4 GiB, read + write, {_H200_RUN}; sheet 4.8e12"
            ),
            "bf16": Figure(
                677e12, "measured", f"8192^3 after 1 s, 689 W (775e12 in a burst), {_H200_RUN}"
            ),
            "fp8": Figure(
                1288e12, "measured", f"8192^3 after 1 s (1294e12 in a burst), {_H200_RUN}"
            ),
            "int8": Figure(1979e12, "vendor", f"{_H200_SHEET}; torch._int_mm reaches 894e12"),
        },
        "sm_90; a float8 product costs half of a bfloat16 one",
        verification="run",  # fused_ops' Triton kernels were tested and timed there
    ),
    "h20": _gpu(
        "h20",
        "NVIDIA H20",
        True,
        _quoted("press", _H20, bandwidth_bytes_s=4.0e12, bf16=148e12, int8=296e12, fp8=296e12)
        | _reported(97_871),
        "sm_90; also sold with 141 GB",
    ),
    "a100": _gpu(
        "a100",
        "NVIDIA A100 80GB",
        False,
        _quoted("vendor", _A100, bandwidth_bytes_s=2.039e12, bf16=312e12, int8=624e12)
        | _reported(81_920),
        "sm_80; GLM-5's authors: its DSA operators are not adapted (zai-org/GLM-5 issue 25)",
    ),
    "rtx-4090": _gpu(
        "rtx-4090",
        "NVIDIA RTX 4090",
        True,
        _quoted(
            "vendor", _4090, bandwidth_bytes_s=1.008e12, bf16=165.2e12, int8=660.6e12, fp8=330.3e12
        )
        | _reported(24_564),
        "sm_89",
    ),
}  # fmt: skip
