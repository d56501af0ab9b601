"""The torch_npu adapters end to end on a CPU, their constraints, and the choice on Ascend.

The ops under them are npu_emulator's, with torch_npu's schemas. On an NPU the adapters run the
whole matrix with `TORCH_DEVICE_BACKEND_AUTOLOAD=0 pytest tests/fused_ops/test_all_ops.py -m npu`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_ops import npu_support, op, testkit
from fused_ops.expert_gemm import torch_npu as experts
from fused_ops.expert_gemm.cases import Spec as GemmSpec
from fused_ops.expert_gemm.cases import build as build_gemm
from fused_ops.expert_gemm.reference import expert_gemm, quantize_rows
from fused_ops.lightning_indexer.reference import lightning_indexer
from fused_ops.lightning_indexer.torch_npu import lightning_indexer as npu_indexer
from fused_ops.npu_support import ARGUMENTS
from fused_ops.op import Implementation, OpRequest, UnsupportedOp, choose
from fused_ops.sparse_attention.torch_npu import sparse_attention as npu_attention
from targets import base

ADAPTERS = [
    pytest.param(name, replace(implementation, available=None), id=f"{name}-{implementation.name}")
    for name in op.OPS
    for implementation in op.load(name).implementations
    if implementation.name.startswith("torch_npu")
]


@pytest.mark.usefixtures("npu_ops")
@pytest.mark.parametrize(("name", "implementation"), ADAPTERS)
def test_adapter_passes_the_matrix(
    name: str, implementation: Implementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = record(monkeypatch)
    function, dtypes = op.resolve(implementation.entry), implementation.dtypes
    verdicts = {
        case.name: testkit.run(case, function).problem
        for case in testkit.fitting(name, implementation, "ascend")
    }
    assert len(verdicts) > 1
    assert not {case: problem for case, problem in verdicts.items() if problem}
    fused = (op_entry(name, implementation.name).available or "").rpartition(":")[2]
    assert {called for called, _ in asked} == {fused}
    passed = set().union(*(set(arguments) for _, arguments in asked))
    scaled_here = {"bias", "scale", "per_token_scale"} if "int8+int8" in dtypes else set()
    assert passed == ARGUMENTS[fused] - scaled_here


def record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Collects (op, arguments) of every call the adapters make."""
    asked: list[tuple[str, dict[str, Any]]] = []
    broken = npu_support.broken

    def keep(name: str, arguments: dict[str, Any]) -> Any:
        asked.append((name, arguments))
        return broken(name, arguments)

    monkeypatch.setattr(npu_support, "broken", keep)
    return asked


def op_entry(name: str, implementation: str) -> Implementation:
    return next(i for i in op.load(name).implementations if i.name == implementation)


@pytest.mark.usefixtures("npu_ops")
def test_weights_of_any_size_stay_in_float16() -> None:
    """The op multiplies weights by query scales in float16; a query's own size does not matter."""
    source = testkit.generator("large weights")
    query = torch.randint(-9, 10, (5, 8, 128), generator=source).to(torch.int8)
    key = torch.randint(-9, 10, (200, 128), generator=source).to(torch.int8)
    weights = torch.randint(-8, 9, (5, 8), generator=source).float()
    weights[3] = 0
    offsets, key_offsets = torch.tensor([0, 5]), torch.tensor([0, 200])
    for size in (2.0**-30, 1.0, 2.0**30):
        scales = {"query_scale": torch.full((5, 8), size), "key_scale": torch.ones(200)}
        arguments = (query, key, weights, offsets, 16)
        ours = npu_indexer(*arguments, **scales, key_offsets=key_offsets)
        assert torch.equal(ours, lightning_indexer(*arguments, **scales, key_offsets=key_offsets))


@pytest.mark.usefixtures("npu_ops")
def test_a_cache_kept_split_is_taken_as_it_is() -> None:
    (case,) = (
        c
        for c in testkit.cases("sparse_attention")
        if c.request.dtype == "bf16" and "page" in c.request.shape and "output_only" in c.name
    )
    inputs = case.build()
    query, latent, *rest = inputs.args
    parts = (latent[..., :512].contiguous(), latent[..., 512:].contiguous())
    joined, _ = npu_attention(query, latent, *rest, **inputs.kwargs)
    split, lse = npu_attention(query, parts, *rest, **inputs.kwargs)
    assert lse is None
    assert torch.equal(joined, split)


@pytest.mark.usefixtures("npu_ops")
def test_scales_that_bfloat16_holds_are_left_to_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = build_gemm(GemmSpec("int8+int8", (5, 0, 17), 320, 48, group=0))
    x, weight, offsets = inputs.args
    scale = inputs.kwargs["weight_scale"].bfloat16().float()
    asked = record(monkeypatch)
    ours = experts.expert_gemm(
        x, weight, offsets, x_scale=inputs.kwargs["x_scale"], weight_scale=scale
    )
    reference = expert_gemm(
        x, weight, offsets, x_scale=inputs.kwargs["x_scale"], weight_scale=scale
    )
    assert torch.equal(ours, reference)
    ((_, arguments),) = asked
    assert arguments["scale"][0].dtype == arguments["output_dtype"] == torch.bfloat16


@pytest.mark.usefixtures("npu_ops")
def test_int4_weights_prepared_once_give_the_same() -> None:
    inputs = build_gemm(GemmSpec("int4+int8", (5, 0, 17), 512, 48, group=256))
    x, weight, offsets = inputs.args
    prepared = experts.prepare(weight, inputs.kwargs["weight_scale"], x.shape[1])
    assert prepared.weight.shape == (3, 512, 6)
    assert prepared.scale.shape == (3, 2, 48)
    once = experts.expert_gemm(x, prepared, offsets, x_scale=inputs.kwargs["x_scale"])
    assert torch.equal(once, experts.expert_gemm(*inputs.args, **inputs.kwargs))


def test_two_codes_a_byte_the_even_one_low() -> None:
    codes = torch.tensor([[1, -1, -8, 7]], dtype=torch.int8)
    assert experts.pack_outputs(codes).view(torch.uint8).tolist() == [[0xF1, 0x78]]


@pytest.mark.usefixtures("npu_ops")
def test_rows_are_quantized_as_the_reference_does() -> None:
    x = torch.randn((7, 96), generator=testkit.generator("rows")).bfloat16()
    x[2] = 0
    codes, scale = experts.quantize_rows(x)
    expected, expected_scale = quantize_rows(x, torch.int8)
    assert torch.equal(codes, expected)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("npu_ops")
def test_what_an_adapter_cannot_do_it_refuses() -> None:
    inputs = build_gemm(GemmSpec("int4+int8", (5, 3), 512, 48, group=0))
    with pytest.raises(UnsupportedOp, match=r"gives no torch\.float32 from codes"):
        experts.expert_gemm(*inputs.args, **inputs.kwargs, out_dtype=torch.float32)
    group = build_gemm(GemmSpec("int8+int8", (5, 3), 512, 48, group=256))
    with pytest.raises(UnsupportedOp, match="one scale a row of int8 weights"):
        experts.expert_gemm(*group.args, **group.kwargs)
    odd = build_gemm(GemmSpec("int4+int8", (5, 3), 512, 44, group=0))
    with pytest.raises(UnsupportedOp, match="44 outputs are no multiple of 8"):
        experts.expert_gemm(*odd.args, **odd.kwargs)
    (rows,) = (c for c in testkit.cases("sparse_attention") if c.name.startswith("fp8-h64"))
    with pytest.raises(UnsupportedOp, match="has no fp8_656 rows"):
        npu_attention(*rows.build().args, **rows.build().kwargs)


@pytest.mark.usefixtures("npu_ops")
def test_an_older_torch_npu_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(npu_support.lacking(name) is None for name in ARGUMENTS)
    names = npu_support.argument_names

    def older(name: str) -> frozenset[str] | None:
        found = names(name)
        return None if "quant" in name or found is None else found - {"return_softmax_lse"}

    monkeypatch.setattr(npu_support, "argument_names", older)
    monkeypatch.setattr(npu_support, "no_npu", lambda: None)
    refused = dict(choose(OpRequest("sparse_attention", "bf16", MLA), "ascend").refused)
    assert refused["torch_npu"] == (
        "this torch_npu's npu_sparse_flash_attention takes no return_softmax_lse"
    )
    refused = dict(choose(OpRequest("lightning_indexer", "int8", INDEX), "ascend").refused)
    assert refused["torch_npu-int8"] == (
        "this torch_npu has no npu_quant_lightning_indexer (2.13 does)"
    )
    case = next(
        c for c in testkit.cases("sparse_attention") if c.name.startswith("bf16-h64d576v512s128")
    )
    with pytest.raises(UnsupportedOp, match="takes no return_softmax_lse"):
        testkit.run(case, npu_attention)


# GLM-5 on one die: 64 heads, 32 index heads, int4 per channel; W8A8 experts of DeepSeek's kind.
INDEX = {"sequences": 4, "tokens": 2, "keys": 65536, "heads": 32, "dim": 128, "topk": 2048}
MLA = {"tokens": 64, "keys": 65536, "heads": 64, "dim": 576, "value_dim": 512, "selected": 2048}
GATE = {"experts": 16, "rows": 512, "in": 6144, "out": 4096, "group": 0}
DECODE = frozenset({"decode", "ragged", "paged"})

CHOSEN = [
    ("lightning_indexer", "bf16", {**INDEX, "page": 128}, DECODE, "torch_npu"),
    ("lightning_indexer", "int8", {**INDEX, "page": 128}, DECODE, "torch_npu-int8"),
    ("sparse_attention", "bf16", {**MLA, "page": 128}, DECODE, "torch_npu"),
    ("sparse_attention", "bf16", MLA, frozenset({"lse"}), "torch_npu"),
    ("sparse_attention", "int8", {**MLA, "page": 128}, DECODE, "torch_npu-int8"),
    ("expert_gemm", "int4+int8", GATE, frozenset({"ragged", "empty"}), "torch_npu"),
    ("expert_gemm", "int4+int8", {**GATE, "group": 256}, frozenset(), "torch_npu"),
    ("expert_gemm", "int8+int8", GATE, frozenset(), "torch_npu-int8"),
]


@pytest.mark.parametrize(("name", "dtype", "shape", "features", "expected"), CHOSEN)
def test_glm5_runs_on_the_fused_ops(
    name: str,
    dtype: str,
    shape: dict[str, int],
    features: frozenset[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(npu_support, "unavailable", lambda _: None)
    choice = base.load("ascend-910c").choose(OpRequest(name, dtype, shape, features))
    assert choice.chosen.name == expected
    assert all(why for _, why in choice.refused)


def test_without_torch_npu_the_next_runs_and_it_is_said() -> None:
    if npu_support.find_spec("torch_npu"):
        pytest.skip("not run: torch_npu is installed")
    for name, dtype, shape, features, expected in CHOSEN:
        choice = base.load("ascend-910c").choose(OpRequest(name, dtype, shape, features))
        assert not choice.chosen.name.startswith("torch_npu")
        assert dict(choice.refused)[expected] == (
            "torch_npu is not installed (pip install glm5q[ascend], beside CANN)"
        )


def test_an_installed_torch_npu_without_cann_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> Any:
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(npu_support, "find_spec", lambda _: object())
    monkeypatch.setattr(npu_support, "import_module", broken)
    assert "does not load (libhccl.so" in (npu_support.no_npu() or "")


# name of the constraint, op, implementation, dtype, request that is refused, what is said
REFUSED = [
    ("head_dim", "lightning_indexer", "torch_npu", "bf16", {**INDEX, "dim": 64}, "dim 64 is"),
    ("query_heads", "lightning_indexer", "torch_npu", "bf16", {**INDEX, "heads": 65}, "heads 65"),
    ("count", "lightning_indexer", "torch_npu", "bf16", {**INDEX, "topk": 2049}, "topk 2049 is"),
    ("page", "lightning_indexer", "torch_npu", "bf16", {**INDEX, "page": 24}, "no multiple of 16"),
    ("page", "lightning_indexer", "torch_npu", "bf16", {**INDEX, "page": 2048}, "above 1024"),
    ("dtype", "lightning_indexer", "torch_npu", "fp8", INDEX, "has no fp8"),
    ("count", "lightning_indexer", "torch_npu-int8", "int8", {**INDEX, "topk": 3072}, "above 2048"),
    ("heads", "sparse_attention", "torch_npu", "bf16", {**MLA, "heads": 48}, "no power of two"),
    ("heads", "sparse_attention", "torch_npu-int8", "int8", {**MLA, "heads": 48}, "no power of"),
    ("rope", "sparse_attention", "torch_npu", "bf16", {**MLA, "dim": 512}, "dim 512 is below 576"),
    ("value", "sparse_attention", "torch_npu", "bf16", {**MLA, "value_dim": 256}, "value_dim 256"),
    ("page", "sparse_attention", "torch_npu", "bf16", {**MLA, "page": 8}, "page 8 is below 16"),
    ("dtype", "sparse_attention", "torch_npu", "fp8", MLA, "has no fp8"),
    ("group", "expert_gemm", "torch_npu", "int4+int8", {**GATE, "group": 128}, "neither 256 nor 0"),
    ("columns", "expert_gemm", "torch_npu", "int4+int8", {**GATE, "in": 6016}, "multiple of 256"),
    ("columns", "expert_gemm", "torch_npu", "int4+int8", {**GATE, "in": 18688}, "above 18432"),
    ("out", "expert_gemm", "torch_npu", "int4+int8", {**GATE, "out": 4092}, "no multiple of 8"),
    ("experts", "expert_gemm", "torch_npu", "int4+int8", {**GATE, "experts": 1}, "below 2"),
    ("group", "expert_gemm", "torch_npu-int8", "int8+int8", {**GATE, "group": 256}, "above 0"),
    ("columns", "expert_gemm", "torch_npu-int8", "int8+int8", {**GATE, "in": 65536}, "above 65535"),
    ("fp8", "expert_gemm", "torch_npu", "int4+fp8", GATE, "has no int4+fp8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "implementation", "dtype", "shape", "said"),
    [pytest.param(*row[1:], id=f"{row[2]}-{row[0]}-{row[3]}") for row in REFUSED],
)
def test_a_request_outside_is_refused_with_the_number(
    name: str,
    implementation: str,
    dtype: str,
    shape: dict[str, int],
    said: str,
) -> None:
    entry = replace(op_entry(name, implementation), available=None)
    assert said in (entry.refuse(OpRequest(name, dtype, shape), "ascend") or "")


def test_what_the_fused_op_refuses_another_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_support, "unavailable", lambda _: None)
    chip = base.load("ascend-910c")
    choice = chip.choose(OpRequest("expert_gemm", "int4+int8", {**GATE, "group": 128}))
    assert not choice.chosen.name.startswith("torch_npu")
    assert dict(choice.refused)["torch_npu"] == "group 128 is neither 256 nor 0, a whole row"
    assert dict(choice.refused)["torch_npu-int8"] == "has no int4+int8"
    on_cpu = dict(choose(OpRequest("lightning_indexer", "bf16", INDEX), "cpu").refused)
    assert on_cpu["torch_npu"] == "is for ascend, not cpu"


def test_requests_at_the_edges_are_taken() -> None:
    inside = [
        *(
            ("lightning_indexer", "torch_npu", "bf16", {**INDEX, "topk": k})
            for k in (1, 3072, 4096)
        ),
        *(("lightning_indexer", "torch_npu", "bf16", {**INDEX, "heads": h}) for h in (1, 64)),
        *(("lightning_indexer", "torch_npu", "bf16", {**INDEX, "page": p}) for p in (16, 1024)),
        *(("sparse_attention", "torch_npu", "bf16", {**MLA, "heads": h}) for h in (1, 2, 4, 128)),
        ("sparse_attention", "torch_npu-int8", "int8", {**MLA, "page": 1024}),
        *(("expert_gemm", "torch_npu", "int4+int8", {**GATE, "in": k}) for k in (256, 18432)),
        ("expert_gemm", "torch_npu", "int4+int8", {**GATE, "out": 8}),
        ("expert_gemm", "torch_npu-int8", "int8+int8", {**GATE, "in": 65535, "out": 1}),
    ]
    for name, implementation, dtype, shape in inside:
        entry = replace(op_entry(name, implementation), available=None)
        assert entry.refuse(OpRequest(name, dtype, shape), "ascend") is None


def test_log_sum_exp_and_pages_exclude_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_support, "unavailable", lambda _: None)
    paged = {**MLA, "page": 128}
    both = OpRequest("sparse_attention", "bf16", paged, frozenset({"lse", "paged"}))
    assert "log-sum-exp" in dict(choose(both, "ascend").refused)["torch_npu"]
    int8 = OpRequest("sparse_attention", "int8", paged, frozenset({"lse", "paged"}))
    assert dict(choose(int8, "ascend").refused)["torch_npu-int8"] == "lacks lse"
