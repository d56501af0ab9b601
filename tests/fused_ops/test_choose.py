"""The choice answers for every implementation, and the tables are readable without torch."""

import subprocess
import sys
from dataclasses import replace

import pytest

from fused_ops import build
from fused_ops.op import Limit, OpRequest, UnsupportedOp, choose, cost, load
from glm5q.errors import UserError
from targets import base

GLM5 = {"tokens": 4096, "keys": 4096, "heads": 32, "dim": 128, "topk": 2048}
EXPERT = {"experts": 1, "rows": 1, "in": 6144, "out": 4096, "group": 128}


def test_the_first_that_fits_runs_and_the_others_are_answered_for() -> None:
    choice = choose(OpRequest("lightning_indexer", "bf16", GLM5), "cpu")
    names = [i.name for i in load("lightning_indexer").implementations]
    assert {choice.chosen.name, *(name for name, _ in choice.refused)} == set(names)
    assert all(why for _, why in choice.refused)
    after = dict(choice.refused)["eager"] if choice.chosen.name != "eager" else "preferred"
    assert "preferred" in after


def test_without_a_compiler_eager_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_outcome", lambda: "no C++ compiler found (install g++)")
    choice = base.load("cpu").choose(OpRequest("sparse_attention", "bf16", {"heads": 64}))
    assert choice.chosen.name == "eager"
    assert dict(choice.refused)["cpp-avx2"] == "no C++ compiler found (install g++)"


def test_each_kind_of_refusal_says_what_is_missing() -> None:
    refused = dict(choose(OpRequest("expert_gemm", "int4+fp8", EXPERT), "cpu").refused)
    assert refused["cpp-avx2"] == "has no int4+fp8"
    odd = OpRequest("expert_gemm", "int4+int8", {**EXPERT, "group": 12})
    assert dict(choose(odd, "cpu").refused)["cpp-portable"] == "group 12 is no multiple of 8"
    refused = dict(choose(OpRequest("expert_gemm", "int4+int8", EXPERT), "cuda").refused)
    assert refused["cpp-avx2"] == "is for cpu, not cuda"
    unknown = OpRequest("lightning_indexer", "bf16", GLM5, frozenset({"sinks"}))
    with pytest.raises(UnsupportedOp, match="eager lacks sinks"):
        choose(unknown, "cpu")


def test_chips_of_one_kind_are_told_apart_by_name() -> None:
    mla = {"tokens": 64, "keys": 4096, "heads": 64, "dim": 576, "value_dim": 512, "selected": 64}
    request = OpRequest("sparse_attention", "bf16", mla)
    (gluon,) = (i for i in load("sparse_attention").implementations if i.name == "gluon")
    portable = replace(gluon, available=None)
    for target, why in {
        "h200": None,
        "h20": None,
        "a100": "is for h20, h200, not a100",
        "rtx-4090": "is for h20, h200, not rtx-4090",
        None: None,
    }.items():
        assert portable.refuse(request, "cuda", target) == why
    assert portable.refuse(request, "cpu", "cpu") == "is for cuda, not cpu"
    refused = dict(base.load("a100").choose(request).refused)
    assert refused["gluon"] == "is for h20, h200, not a100"
    assert dict(choose(request, "cuda", "rtx-4090").refused)["gluon"].endswith("not rtx-4090")
    single = OpRequest("sparse_attention", "f32", mla)
    assert dict(base.load("h200").choose(single).refused)["gluon"] == "has no f32"


def test_nothing_runs_on_a_declared_chip() -> None:
    with pytest.raises(UnsupportedOp, match="lightning_indexer: nothing runs it on declared"):
        base.load("metax-c500").choose(OpRequest("lightning_indexer", "bf16", GLM5))


def test_the_ops_own_limits_come_first() -> None:
    with pytest.raises(UnsupportedOp, match="topk 8192 is above 4096"):
        choose(OpRequest("lightning_indexer", "bf16", {**GLM5, "topk": 8192}), "cpu")
    with pytest.raises(UserError, match="no such op"):
        load("flash_attention")


def test_limits() -> None:
    limit = Limit(8, 64, multiple=8)
    assert limit.refuse("heads", 64) is None
    assert limit.refuse("heads", 4) == "heads 4 is below 8"
    assert limit.refuse("heads", 72) == "heads 72 is above 64"
    assert limit.refuse("heads", 12) == "heads 12 is no multiple of 8"


def test_costs_are_the_measured_ones() -> None:
    """FLOPs and bytes as counted beside the measurements on H200, 2026-11-30."""
    indexer = cost(OpRequest("lightning_indexer", "fp8", {**GLM5, "keys": 65536}))
    pairs = 4096 * (65536 - 4096) + 4096 * 4097 // 2
    assert indexer.flop == 2 * pairs * 32 * 128
    shape = {"tokens": 4096, "keys": 131072, "heads": 64, "dim": 576, "value_dim": 512}
    attention = cost(OpRequest("sparse_attention", "bf16", {**shape, "selected": 2048}))
    assert attention.flop == 2 * 4096 * 64 * 2048 * 1088
    assert attention.bytes == pytest.approx(0.755e9, rel=0.002)
    decode = {**shape, "tokens": 64, "keys": 64 * 32768, "selected": 2048}
    rows = cost(OpRequest("sparse_attention", "fp8", decode)).bytes
    assert rows == 64 * (2048 * 656 + 64 * 1088 * 2 + 4 * 2048 + 64 * 4)
    expert = {"experts": 256, "active": 226, "rows": 512, "in": 6144, "out": 4096, "group": 128}
    assert cost(OpRequest("expert_gemm", "int4+int8", expert)).bytes == (
        226 * 4096 * 6144 * (1 / 2 + 4 / 128) + 512 * (6144 + 4) + 2 * 512 * 4096
    )
    assert indexer.floor_s(1294e12, 4.26e12) == pytest.approx(1.646e-3, rel=0.01)


def test_reading_the_tables_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fused_ops import op; from targets import base;"
        "[op.load(name) for name in op.OPS];"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
