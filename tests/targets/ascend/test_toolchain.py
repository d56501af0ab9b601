"""What is read from the compilers' modules, and what is said where they are not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_ops.op import OpRequest, choose
from fused_ops.triton_ascend import Launch
from glm5q.errors import UserError
from targets.ascend import environment, lower, toolchain, x86
from targets.ascend.chips import DIES
from targets.ascend.kernels import TILES, VARIANTS
from targets.ascend.toolchain import Hivm, Linalg

PLANNED = """\
    %0 = hivm.hir.pointer_cast(%c1024_i64) : memref<2x16x16xbf16, #hivm.address_space<cbuf>>
    %1 = hivm.hir.pointer_cast(%c0_i64, %c4096_i64_7) : memref<100xi1, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%c2048_i64) : memref<2x1x16x16xf32, #hivm.address_space<cc>>
    %3 = hivm.hir.pointer_cast(%arg2) : memref<9xi8, strided<[1]>, #hivm.address_space<gm>>
"""
TARGET = ", ".join(
    f'#dlti.dl_entry<"{name}", {value} : i32>'
    for name, value in {
        "CUBE_CORE_COUNT": 24, "VECTOR_CORE_COUNT": 48, "UB_SIZE": 1572864, "L1_SIZE": 4194304,
        "L0C_SIZE": 1048576,
    }.items()
)  # fmt: skip
FUNCTIONS = """
  func.func @k_infer_workspace_shape_function() -> index attributes {} {
  func.func private @vexp(memref<?xf32>)
  func.func @k_mix_aic(%arg0: i64) attributes {} {
  func.func @k_mix_aiv(%arg0: i64) attributes {} {
"""


def test_use_is_the_highest_byte_of_each_memory() -> None:
    assert toolchain.usage(PLANNED) == {"L1": 1024 + 1024, "UB": 4096 + 13, "L0C": 2048 + 2048}


def test_a_buffer_that_is_not_understood_is_no_silent_zero() -> None:
    with pytest.raises(ValueError, match="not a planned buffer"):
        toolchain.usage("%0 = hivm.hir.pointer_cast(%x) : memref<?xi8, #hivm.address_space<ub>>")


def module(text: str = FUNCTIONS + PLANNED + TARGET) -> Hivm:
    return Hivm(text, toolchain.usage(text), toolchain.sizes(text), toolchain.functions(text), ())


@pytest.mark.parametrize(
    ("change", "cube", "says"),
    [
        (("", ""), True, None),
        (("", ""), False, "expected k"),
        (("@k_mix_aiv", "@k_other"), True, "expected k_mix_aic, k_mix_aiv"),
        (("UB_SIZE\", 1572864", "UB_SIZE\", 2031616"), True, "planned for"),
        (("CORE_COUNT\", 24", "CORE_COUNT\", 20"), True, "planned for"),
        (("%c4096_i64_7", "%c196600_i64"), True, "UB: 196613 bytes used, 196608 there"),
        (("address_space<cc>", "address_space<cbuf>"), True, "no memory planned"),
    ],
)  # fmt: skip
def test_a_module_is_held_to_the_chips_table(
    change: tuple[str, str], cube: bool, says: str | None
) -> None:
    found = module(
        (FUNCTIONS + PLANNED + TARGET).replace(*change)
        if change[0]
        else FUNCTIONS + PLANNED + TARGET
    )
    why = lower.problem(found, Linalg("", "k", cube), DIES["ascend-910c"][0])
    assert why is None if says is None else says in str(why)


def test_a_store_that_reads_its_tile_first_is_seen() -> None:
    clean = """
      %view = memref.reinterpret_cast %arg2 to offset: [0] : memref<?xf32> to memref<4xf32>
      %room = memref.alloc() : memref<4xf32>
      memref.copy %view, %room : memref<4xf32> to memref<4xf32>
      %out = memref.reinterpret_cast %arg3 to offset: [0] : memref<?xf32> to memref<4xf32>
      bufferization.materialize_in_destination %t in writable %out : (tensor<4xf32>) -> ()
    """
    assert toolchain.rewritten(clean) == set()
    assert toolchain.rewritten(clean + "memref.copy %out, %room : memref<4xf32>") == {3}


def test_what_the_compilers_way_to_x86_gets_wrong_is_put_right() -> None:
    not_ = "hfusion.elemwise_unary {fun = #hfusion.unary_fn<vnot>}"
    text = toolchain.upstream(
        f"""#map = affine_map<(d0) -> (d0)>
        %1 = {not_} ins(%0 : tensor<4xi1>) outs(%e : tensor<4xi1>) -> tensor<4xi1>
        %3 = hfusion.cumsum %2 : tensor<4xi32> cum_dims = [0] reverse = false -> tensor<4xi32>"""
    )
    assert text.startswith("#map = affine_map<(d0) -> (d0)>\nmodule {")
    assert "%1 = arith.xori %0, %ones_1 : tensor<4xi1>" in text
    assert "%3 = func.call @prefix_sum_4(%2) : (tensor<4xi32>) -> tensor<4xi32>" in text
    assert "func.func private @prefix_sum_4" in text
    with pytest.raises(toolchain.StageError, match="not understood: <vnot>"):
        toolchain.upstream(f"%1 = {not_} ins(%0 : tensor<?xi1>) outs(%e : tensor<?xi1>)")


def test_whole_numbers_that_are_one_become_constants() -> None:
    launch = VARIANTS[0].launch(TILES["sparse_attention"])
    signature, constants = x86.specialize(launch, x86.kernel_file(launch.module))
    assert constants["sequences"] == 1
    assert "sequences" not in signature
    assert signature["query"] == "*bf16"
    assert next(iter(signature)) == "query"


def test_a_launch_that_does_not_fit_its_kernel_is_our_bug(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text("def k(x, n, N): ...")
    launch = Launch("m", "k", (1,), {"x": torch.zeros(1)}, {"N": 1, "M": 2})
    with pytest.raises(TypeError, match="disagree on M, n"):
        x86.specialize(launch, file)


def test_an_empty_folder_lacks_both_compilers_and_says_how_to_get_them(tmp_path: Path) -> None:
    lines = environment.missing_compilers(tmp_path)
    if sys.version_info[:2] == (3, 11):
        assert [line.split(" ")[0] for line in lines] == [
            "triton-ascend==3.2.0",
            "ascendnpu-ir==1.2.0",
        ]
    assert all("; " in line for line in lines)
    with pytest.raises(UserError, match=r"not installed under .*; run glm5q lower"):
        lower.lower("ascend-910c", tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


def test_missing_llvm_is_said_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LLVM", Path("/nowhere"))
    (line,) = environment.missing_numeric()
    assert "mlir-translate and llc" in line
    assert "apt-get install mlir-19-tools llvm-19" in line


def test_another_python_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    with pytest.raises(UserError, match=r"Python 3\.11"):
        environment.setup(tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_what_a_stage_shows_is_never_said_to_be_an_npu() -> None:
    assert "there is no NPU object code, and it never ran on an NPU" in lower.PROVES[lower.L2]
    assert "a stub stood in for the closed hivmc" in lower.PROVES[lower.L2]
    assert "run on this CPU and not on an NPU" in lower.PROVES[lower.L3]
    assert "nothing of the mapping, the NPU's exp" in lower.PROVES[lower.L3]


def test_the_stub_is_labelled_and_makes_no_object_code(tmp_path: Path) -> None:
    script, module, out = tmp_path / "hivmc", tmp_path / "in.mlir", tmp_path / "out"
    script.write_text(toolchain.STUB)
    assert toolchain.STUB.splitlines()[1].startswith("# STUB of hivmc")
    assert "NO object code" in toolchain.STUB.splitlines()[1]
    said = subprocess.run(["/bin/sh", script, "--version"], capture_output=True, check=True)
    assert said.stdout == b"hivmc stub, produces no object code\n"
    module.write_text("module {}")
    subprocess.run(["/bin/sh", script, module, "-o", out], cwd=tmp_path, check=True)
    assert (tmp_path / "out.o").read_bytes() == b""
    assert (tmp_path / "final.mlir").read_text() == "module {}"


def test_an_unknown_chip_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use one of ascend-910b, ascend-910c"):
        lower.lower("h200", tmp_path, tmp_path)


@pytest.mark.parametrize("op", TILES)
def test_without_an_npu_triton_is_refused_and_says_why(op: str) -> None:
    dtype = {"select_topk": "f32", "expert_gemm": "int4+int8"}.get(op, "bf16")
    shape = {"dim": 576, "value_dim": 512} if op == "sparse_attention" else {"dim": 128}
    refused = dict(choose(OpRequest(op, dtype, shape), "ascend").refused)
    assert "NPU" in refused["triton-ascend"]


def test_padded_rows_are_refused_for_what_a_gather_reads() -> None:
    request = OpRequest("sparse_attention", "bf16", {"heads": 3, "dim": 67, "value_dim": 53})
    assert "value_dim 53" in dict(choose(request, "ascend").refused)["triton-ascend"]
    request = OpRequest("lightning_indexer", "bf16", {"heads": 3, "dim": 67, "topk": 8})
    assert "dim 67" in dict(choose(request, "ascend").refused)["triton-ascend"]
