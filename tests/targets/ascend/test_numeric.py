"""Stage L3: the IR on this CPU against each op's definition; and faults planted in the kernels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from fused_ops import testkit
from targets.ascend.kernels import TILES
from targets.ascend.numeric import Judged, judge
from tests.conftest import ASCEND

DIE = "Ascend910_9382"
# What each op's matrix must have reached: part of a case's name -> how many cases at least.
REACHED = {
    "sparse_attention": {"bf16": 9, "page": 2, "q1_0_11_5": 2, "s2048": 1, "loud": 2},
    "lightning_indexer": {"bf16": 11, "int8": 7, "page": 4, "q1_0_131_67": 5, "strided": 3},
    "select_topk": {"zeros": 12, "masked": 12, "k2048": 9, "70001": 9},
    "expert_gemm": {"int4+int8": 11, "int8+int8": 11, "extreme": 6, "r5_0_17_1_0": 6, "67": 2},
}

pytestmark = pytest.mark.ascend


@pytest.mark.parametrize("op", TILES)
def test_the_ir_passes_the_matrix_of_its_op(op: str) -> None:
    judged = judge(op, ASCEND, DIE)
    assert [case for case in judged if case.problem] == []
    for part, least in REACHED[op].items():
        assert sum(part in case.case for case in judged) >= least, part


def test_inputs_hold_what_the_names_promise() -> None:
    """-1 among the indices, whole rows of it; negative four-bit codes in both halves of a byte."""
    cases = {case.name: case for case in testkit.cases("sparse_attention")}
    indices = cases["bf16-h8d576v512s61-q1_0_11_5-k1_0_11_5"].build().args[2]
    assert (indices == -1).any()
    assert (indices == -1).all(1).any()
    gemm = {case.name: case for case in testkit.cases("expert_gemm")}
    words = gemm["int4+int8-r1-96x384-g128"].build().args[1]
    assert all(((words >> (4 * nibble)) & 8).any() for nibble in range(8))


def planted(
    folder: Path, op: str, module: str, text: str, fault: str, containing: str
) -> list[Judged]:
    """Judges `op` with `text` of its kernel replaced by `fault`."""
    name = f"fused_ops.{module}.triton_ascend_kernel"
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(text) == 1
    changed = folder / "kernel.py"
    changed.write_text(source.replace(text, fault))
    return judge(op, ASCEND, DIE, sources={name: changed}, containing=containing)


def test_a_logical_shift_of_four_bit_codes_is_caught(tmp_path: Path) -> None:
    (case,) = planted(
        tmp_path,
        "expert_gemm",
        "expert_gemm",
        "tl.dot(second, packed >> 4,",
        "tl.dot(second, (packed.to(tl.uint8, bitcast=True) >> 4).to(tl.int8),",
        "int4+int8-r1-96x384-g128",
    )
    assert case.problem
    assert case.error > 100 * case.allowed


@pytest.mark.parametrize(
    ("op", "module", "text", "fault", "containing", "says"),
    [
        pytest.param(
            "sparse_attention", "sparse_attention",
            "chosen = (position >= 0) & (position < keys)",
            "position = tl.maximum(position, 0)\n        chosen = position < keys",
            "q1_0_11_5", "error", id="-1 attended",
        ),
        pytest.param(
            "sparse_attention", "sparse_attention", "tl.where(chosen, position, 0)", "position",
            "q1_0_11_5", "signal 11", id="unclamped row",
        ),
        pytest.param(
            "select_topk", "lightning_indexer", "<= room)", "< room)", "zeros-7x4099", "differs",
            id="one of equal scores lost",
        ),
        pytest.param(
            "lightning_indexer", "lightning_indexer", "tl.minimum(token, end - 1)", "token",
            "bf16-whole-h32d128k64-q211-k211", "signal 11", id="unclamped query",
        ),
        pytest.param(
            "lightning_indexer", "lightning_indexer", "mask=(row < end)[:, None])",
            "mask=(row < end)[:, None] & (position[None, :] < sees + tl.arange(0, Q)[:, None]))",
            "bf16-whole-h32d128k64-q211-k211", "no rectangle", id="store under a triangle",
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_caught(
    tmp_path: Path, op: str, module: str, text: str, fault: str, containing: str, says: str
) -> None:
    judged = planted(tmp_path, op, module, text, fault, containing)
    assert judged
    assert any(says in (case.problem or "") for case in judged), judged
