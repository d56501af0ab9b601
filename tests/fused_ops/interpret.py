"""Runs one op's Triton kernel in Triton's interpreter: `python -m tests.fused_ops.interpret NAME`.

A process of its own, as TRITON_INTERPRET counts when a kernel's module is first imported.
"""

from __future__ import annotations

import sys

from fused_ops import op, testkit

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


def main(name: str) -> int:
    """Prints each case that fails, and how many ran; returns 1 if one failed or none ran."""
    (implementation,) = (i for i in op.load(name).implementations if i.name == "triton")
    function = op.resolve(implementation.entry)
    verdicts = {
        case.name: testkit.run(case, function).problem
        for case in testkit.fitting(name, implementation, "cuda")
        if SMALL[name](case.name, case.request.shape)
    }
    problems = {case: problem for case, problem in verdicts.items() if problem}
    for case, problem in problems.items():
        print(f"{case}: {problem}")
    print(f"{len(verdicts)} cases")
    return 1 if problems or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
