"""Gradients of row_gradients' own: the interpreter here, the same source on a GPU."""

from __future__ import annotations

import re

import pytest

from tests.calibrate.interpreted import answer

pytest.importorskip("triton", reason="not run: no Triton here")

KERNELS: dict[str, tuple[str, dict[str, object]]] = {  # arguments at full size, constants
    "norm_gradients": (
        "x: *fp32, slope: *bf16, weight: *fp32, other: *fp32, out: *fp32, half: *bf16, "
        "stride: i32, columns: i32, eps: fp32", {"ADD": True, "SPAN": 8192},
    ),
    "gate_gradients": (
        "both: *bf16, slope: *bf16, gates: *fp32, order: *i64, out: *bf16, of_gates: *fp32, "
        "squares: *fp32, width: i32", {"SPAN": 2048},
    ),
}  # fmt: skip


def test_gradients_are_autograds_of_float64() -> None:
    found: dict[str, float] = answer("interpret_gradients.py")
    assert len(found) == 9
    for name, difference in found.items():
        assert difference < 2e-5, name


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str) -> None:
    """For an H200, in the dtypes it is launched with there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from calibrate.kernels import gradients

    arguments, constants = KERNELS[name]
    signature = dict(re.findall(r"(\w+): (\S+?)(?:,|$)", arguments))
    signature |= dict.fromkeys(constants, "constexpr")
    kernel = vars(gradients)[name]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.metadata.shared <= 227 << 10  # what an H200 gives one program
    assert ".local" not in made.asm["ptx"]  # nothing that should be in registers
