"""Runs one op's Triton kernel in Triton's interpreter: `python -m tests.fused_ops.interpret NAME`.

A process of its own, as TRITON_INTERPRET counts when a kernel's module is first imported.
"""

from __future__ import annotations

import sys

import torch

from fused_ops import op, testkit
from fused_ops.lightning_indexer.reference import index_scores, select_topk

# The interpreter cuts float32 to bfloat16 instead of rounding (3.6.0): what is bfloat16 all through
# is judged on a GPU only.
SMALL = {
    "select_topk": lambda name, shape: shape["keys"] < 150 or name.startswith("rounded-4x2048"),
    "lightning_indexer": lambda name, shape: (
        shape["tokens"] <= 9 and shape["keys"] <= 300 and name[:4] in ("bf16", "int8")
    ),
    "sparse_attention": lambda name, shape: (
        (shape["tokens"] * shape["selected"] <= 900 and shape["heads"] <= 16 and name[:3] == "f32")
        or (name.startswith("bf16-h11") and shape["selected"] > 1)
    ),
    "expert_gemm": lambda name, _: "float32_out" in name,
    "expert_swiglu": lambda _, shape: shape["rows"] * shape["in"] < 12000,
}


def lists() -> int:
    """Checks lists that are cut and keys that are shared out; segments are shortened for it."""
    from fused_ops.lightning_indexer import triton_launch as launch

    tiles = launch.TILES | {"SEGMENT": 128}
    topk_tiles = launch.TOPK_TILES | {"SEGMENT": 128}
    source = torch.Generator().manual_seed(0)
    wrong = 0
    for pattern, tokens, keys, topk in (
        ("gaussian", 2, 1500, 37),
        ("ties", 3, 1400, 64),
        ("rising", 5, 900, 16),
        ("zeros", 1, 2000, 20),
    ):
        query = torch.randn((tokens, 4, 16), generator=source)
        key = torch.randn((keys, 16), generator=source)
        weights = torch.rand((tokens, 4), generator=source)
        if pattern == "ties":
            query, key, weights = query.round(), key.round(), torch.ones(tokens, 4)
        elif pattern == "rising":  # every key is better than all before it
            query, key = query.abs(), torch.arange(keys).unsqueeze(1).expand(keys, 16) / keys
        elif pattern == "zeros":
            query, key = query.abs(), -key.abs()
            key[::50] *= -1
        offsets, key_offsets = torch.tensor([0, tokens]), torch.tensor([0, keys])
        found = launch.lightning_indexer(
            query, key, weights, offsets, topk, key_offsets=key_offsets,
            tiles=tiles, topk_tiles=topk_tiles,
        )  # fmt: skip
        scores = index_scores(query, key, weights)
        past = torch.arange(keys - tokens, keys).unsqueeze(1)
        scores = scores.masked_fill(torch.arange(keys).unsqueeze(0) > past, -torch.inf)
        chosen = select_topk(scores, topk)
        selected = launch.select_topk(scores, topk, tiles=topk_tiles)
        for name, one in (("indexer", found), ("selection", selected)):
            if not torch.equal(one, chosen):
                print(f"{pattern}: the {name} differs")
                wrong += 1
    print("8 lists")
    return wrong


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
    sys.exit(lists() if sys.argv[1] == "lists" else main(sys.argv[1]))
