"""x86-64 and other CPUs: compiled C++ where a compiler is found, eager torch where none is."""

from __future__ import annotations

from targets.base import UNKNOWN, Figure, Support, Target

_OWN = "fused_ops implements it: int32 sums of int8 products, scales in float32"
_EAGER = "torch on CPU"
_NO_FP8 = "no CPU instruction multiplies it; a cpu recipe uses int8 activations"
_MACHINE = Figure(None, "unknown", "differs by machine; `glm5q doctor` measures it")

CHIPS = {
    "cpu": Target(
        name="cpu",
        title="CPU",
        kind="cpu",
        verification="run",
        weights={
            "bf16": Support("yes", _EAGER),
            "int8": Support("yes", _OWN),
            "int4": Support("yes", _OWN),
            "fp8": Support("no", _NO_FP8),
        },
        activations={
            "bf16": Support("yes", _EAGER),
            "int8": Support("yes", _OWN),
            "fp8": Support("no", _NO_FP8),
        },
        memory_bytes=_MACHINE,
        bandwidth_bytes_s=_MACHINE,
        peak_ops_s={"bf16": UNKNOWN, "int8": UNKNOWN},
        notes=("int4 weights are widened to 8 bits in registers: no CPU multiplies 4-bit codes",),
    )
}
