"""Timing: everything that fits takes turns, is judged in the same run, and is never mixed up."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.lightning_indexer import cpu as indexer
from fused_ops.lightning_indexer.reference import select_topk
from fused_ops.op import OPS, Implementation, OpRequest, choose
from fused_ops.testkit import Inputs
from glm5q.errors import UserError
from targets.bench import _call, _of_the_first, bench
from targets.shapes import DEFAULTS
from tests.fused_ops.conftest import one_thread  # noqa: F401 - for every test here

SMALL = [
    OpRequest(
        "lightning_indexer",
        dtype,
        {"tokens": 40, "keys": 90, "heads": 8, "dim": 128, "topk": 64},
        frozenset({"decode"}),
    )
    for dtype in ("bf16", "fp8")
]
SMALL += [
    OpRequest("select_topk", "f32", {"rows": 9, "keys": 300, "topk": 64}),
    OpRequest(
        "sparse_attention",
        "fp8",
        {"tokens": 5, "keys": 90, "heads": 8, "dim": 576, "value_dim": 512, "selected": 64},
        frozenset({"decode"}),
    ),
    OpRequest(
        "expert_gemm",
        "int4+int8",
        {"experts": 3, "rows": 7, "in": 256, "out": 48, "group": 128},
        frozenset({"ragged"}),
    ),
]


@pytest.mark.parametrize("request_", SMALL, ids=lambda r: f"{r.op}-{r.dtype}")
def test_all_that_fit_are_timed_and_judged(request_: OpRequest) -> None:
    result = bench("cpu", request_, rounds=3)
    names = {timing.implementation for timing in result.timings}
    assert "eager" in names
    assert names.isdisjoint({name for name, _ in result.refused})
    for timing in result.timings:
        assert timing.problem is None
        assert timing.rounds == 3
        assert 0 < timing.low_s <= timing.median_s <= timing.high_s
        assert timing.floor_s is None  # a CPU's peak is not known
    assert result.ratio("eager", "eager") == 1.0
    assert len(result.lines()) == 1 + len(result.timings) + len(result.refused)


def test_a_wrong_result_is_reported_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scores: Tensor, topk: int) -> Tensor:
        return select_topk(scores, topk).flip(1)

    monkeypatch.setattr(indexer, "select_topk_portable", broken)
    result = bench("cpu", SMALL[2], rounds=1, only=frozenset({"cpp-portable", "eager"}))
    problems = {timing.implementation: timing.problem for timing in result.timings}
    if "cpp-portable" not in problems:
        pytest.skip(f"not run: {dict(result.refused)['cpp-portable']}")
    assert "another order" in str(problems["cpp-portable"])
    assert problems["eager"] is None
    assert any("WRONG" in line for line in result.lines())


def spied(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """An entry, and a prepare, that give back what they were called with."""
    return {"args": args, **kwargs}


def test_a_recipes_tiles_reach_the_call_and_the_weights() -> None:
    x, weight, offsets, scale = torch.ones(2, 4), torch.ones(1), torch.ones(1), torch.ones(1)
    inputs = Inputs((x, weight, offsets), {"weight_scale": scale})
    implementation = Implementation(
        "spy", f"{__name__}:spied", frozenset({"cpu"}), frozenset(), frozenset(),
        prepare=f"{__name__}:spied", tuned={"tiles": "mine", "other_tiles": "absent"},
    )  # fmt: skip
    called = _call(implementation, inputs, {"mine": {"N": 3}, "another": {"N": 4}})()
    prepared = called.pop("args")[1]
    assert called == {"tiles": {"N": 3}}
    assert prepared == {"args": (weight, scale, 4), "tiles": {"N": 3}}
    assert set(_call(implementation, inputs, {})()) == {"args"}


def test_threads_are_put_back_and_unknown_names_refused() -> None:
    bench("cpu", SMALL[2], rounds=1, threads=2, only=frozenset({"eager"}))
    assert torch.get_num_threads() == 1
    with pytest.raises(UserError, match="no such target"):
        bench("h300", SMALL[2])


def test_the_default_shapes_are_within_the_ops_limits() -> None:
    for kind, requests in DEFAULTS.items():
        assert {request.op for request in requests} == set(OPS) - {"expert_swiglu"}
        assert all(choose(request, kind).chosen for request in requests)


def test_a_compilation_is_no_time_of_a_kernel() -> None:
    """On a GPU the first call compiles: on an H200 3 s of it stood as the time of a 5 ms kernel."""
    assert _of_the_first((3.0, 3.0), "cuda", 1.5) == []
    assert _of_the_first((3.0, 3.0), "cpu", 1.5) == [(3.0, 3.0)]
    assert _of_the_first((1.0, 1.0), "cpu", 1.5) == []
