"""Triton kernels in Triton's interpreter, at sizes it manages: the source, not its lowering."""

from importlib.util import find_spec

import pytest
import torch

from fused_ops import op, testkit

if find_spec("triton") is None:
    pytest.skip("not run: triton is not installed", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a GPU runs the whole matrix, test_all_ops.py", allow_module_level=True)

# The interpreter cuts float32 to bfloat16 instead of rounding (3.6.0): expert_gemm's own bfloat16
# output is judged on a GPU only.
SMALL = {
    "select_topk": lambda name, shape: shape["keys"] < 150 or name.startswith("rounded-4x2048"),
    "lightning_indexer": lambda name, shape: (
        shape["tokens"] <= 9 and shape["keys"] <= 300 and name[:4] in ("bf16", "int8")
    ),
    "sparse_attention": lambda name, shape: (
        (shape["tokens"] * shape["selected"] < 900 and shape["heads"] <= 16)
        or name.startswith("bf16-h11")
    ),
    "expert_gemm": lambda name, _: "float32_out" in name,
}


@pytest.mark.parametrize("name", SMALL)
def test_kernel_passes_in_the_interpreter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when a kernel's module is first imported
    (implementation,) = (i for i in op.load(name).implementations if i.name == "triton")
    function = op.resolve(implementation.entry)
    verdicts = {
        case.name: testkit.run(case, function).problem
        for case in testkit.fitting(name, implementation, "cuda")
        if SMALL[name](case.name, case.request.shape)
    }
    assert verdicts
    assert not {case: problem for case, problem in verdicts.items() if problem}
