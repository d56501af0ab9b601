"""Every calibration kernel compiles for an H200 in the dtypes it is launched with there.

The interpreter knows no bfloat16 types and no registers: what it runs may not compile. No GPU is
needed; that the machine code is right is judged on one.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

SIZES = "rows: i32, columns: i32, groups: i32"
SWEEP = (
    "gradient: *fp32, changes: *bf16, pitch: i32, weight: *bf16, scales: *fp32, gram: *bf16, "
    f"difference: *bf16, codes: *i8, {SIZES}, start: i32"
)
MIXTURE = "sums: *fp32, layer: *fp32, own: *fp32, share: *fp32, added: *fp32"
GRID = {"LOW": -8, "HIGH": 7}
KERNELS: dict[str, tuple[str, dict[str, object], int]] = {  # arguments, constants, warps
    "search_clip": (
        "weight: *bf16, square: *fp32, shares: *fp32, scales: *fp32, codes: *i8, rows: i32, "
        "columns: i32",
        GRID | {"STEPS": 32, "REACH": 7.5, "BFLOAT16": True, "WIDTH": 128, "SPAN": 128, "ROWS": 32,
                "PIECES": 4}, 4,
    ),
    "subtract_weight": (
        f"codes: *i8, scales: *fp32, weight: *bf16, out: *bf16, {SIZES}",
        {"BLOCK": 128, "ROWS": 512}, 4,
    ),
    "turn": ("x: *i8, out: *i8, rows: i32, columns: i32", {"SIDE": 128}, 4),
    "round_block": (
        "fed: *fp32, pitch: i32, weight: *bf16, scales: *fp32, order: *i32, corner: *fp32, "
        f"errors: *bf16, precise: *fp32, codes: *i8, {SIZES}, start: i32",
        GRID | {"BLOCK": 128, "MICRO": 16, "ROWS": 128, "DOT": "tf32x3"}, 4,
    ),
    "move_block": (SWEEP, GRID | {"WIDTH": 128, "BLOCK": 128, "ROWS": 128, "DOT": "tf32"}, 4),
    "refit_block": (SWEEP, {"BFLOAT16": True, "BLOCK": 128, "ROWS": 32, "DOT": "tf32"}, 8),
    "mix_grams": (f"{MIXTURE}, out: *bf16, columns: i32", {"SPAN": 1024}, 4),
    "gather_panel": (
        f"{MIXTURE}, order: *i32, out: *fp32, columns: i32, start: i32",
        {"SIDE": 256, "SPAN": 8192}, 8,
    ),
    "factor_square": (
        "panel: *fp32, work: *fp32, high: *bf16, low: *bf16, corner: *fp32, pitch: i32, "
        "start: i32, blocks: i32", {"SIDE": 256, "BLOCK": 128, "PART": 32, "DOT": "tf32x3"}, 8,
    ),
    "finish_panel": (
        "panel: *fp32, high: *bf16, low: *bf16, upper: *bf16, rest: *bf16, pitch: i32, "
        "columns: i32, width: i32, start: i32",
        {"SIDE": 256, "TALL": 128, "WIDE": 64, "DEEP": 64}, 8,
    ),
    "norm_rows": (
        "x: *fp32, added: *bf16, weight: *fp32, total: *fp32, out: *bf16, stride: i32, "
        "columns: i32, eps: fp32", {"ADD": True, "SPAN": 8192}, 8,
    ),
    "rotate_heads": (
        "x: *bf16, cos: *fp32, sin: *fp32, pitch: i32, head_pitch: i32, first: i32",
        {"HEADS": 64, "HALF": 32}, 4,
    ),
    "add_choices": (
        "rows: *bf16, place: *i64, gates: *fp32, shared: *bf16, hidden: *fp32, out: *fp32, "
        "columns: i32", {"CHOICES": 8, "SHARED": True, "SPAN": 2048}, 4,
    ),
    "gate_rows": ("both: *bf16, out: *bf16, width: i32", {"SPAN": 2048}, 4),
    "round_rows": (
        "x: *bf16, out: *bf16, stride: i32, columns: i32",
        {"REACH": 448.0, "FP8": True, "SPAN": 8192}, 8,
    ),
    "column_absmax": (
        "x: *bf16, out: *fp32, rows: i32, columns: i32, stride: i32",
        {"TALL": 1024, "STEP": 16, "SPAN": 128}, 4,
    ),
    "add_grams": (
        "x: *bf16, offsets: *i64, grams: *fp32, tiles: *i32, columns: i32, pitch: i32",
        {"TALL": 128, "WIDE": 256, "DEEP": 64, "DOT": "tf32"}, 8,
    ),
    "mirror_grams": ("grams: *fp32, tiles: *i32, columns: i32", {"SIDE": 64}, 4),
    "row_squares": ("x: *bf16, other: *bf16, out: *fp32, columns: i32", {"SPAN": 8192}, 8),
    "expand_codes": (
        "codes: *i8, scale: *fp32, out: *bf16, columns: i32, groups: i32", {"SPAN": 8192}, 8,
    ),
    "code_errors": (
        "codes: *i8, scale: *fp32, weight: *bf16, out: *fp32, columns: i32, groups: i32",
        {"SPAN": 8192}, 8,
    ),
    "norm_gradients": (
        "x: *fp32, slope: *bf16, weight: *fp32, other: *fp32, out: *fp32, half: *bf16, "
        "stride: i32, columns: i32, eps: fp32", {"ADD": True, "SPAN": 8192}, 8,
    ),
    "gate_gradients": (
        "both: *bf16, slope: *bf16, gates: *fp32, order: *i64, out: *bf16, of_gates: *fp32, "
        "squares: *fp32, width: i32", {"SPAN": 2048}, 8,
    ),
}  # fmt: skip
HELPERS = {
    "nearest", "stored_scale", "feed_micro", "halves", "columns_of", "eliminated",
    "nearest_e4m3", "expanded",
}  # fmt: skip


def jitted() -> dict[str, object]:
    import triton

    from calibrate.kernels import factors, gradients, rounding, rows

    return {
        name: value
        for module in (factors, gradients, rounding, rows)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    }


def test_every_kernel_is_named_here() -> None:
    assert set(jitted()) == set(KERNELS) | HELPERS


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments, constants, warps = KERNELS[name]
    signature = dict(re.findall(r"(\w+): (\S+?)(?:,|$)", arguments))
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=jitted()[name], signature=signature, constexprs=constants)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert made.metadata.shared <= 227 << 10  # what an H200 gives one program
    assert ".local" not in made.asm["ptx"]  # nothing that should be in registers
    if name == "add_grams":
        assert "wgmma" in made.asm["ptx"]
