"""Selection and indexing give the same bits run to run, whatever the threads and the split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_ops import testkit
from fused_ops.lightning_indexer import cases, cpu, reference
from fused_ops.lightning_indexer.topk_cases import DISTRIBUTIONS, expected, scores
from fused_ops.op import load
from fused_ops.sparse_attention import cases as attention_cases
from fused_ops.sparse_attention.cpu import sparse_attention
from fused_ops.sparse_attention.reference import combine
from fused_ops.sparse_attention.reference import sparse_attention as defined


def isas(op: str) -> list[str]:
    """The instruction sets that `op` is compiled for and this CPU runs."""
    compiled = (i for i in load(op).implementations if i.name.startswith("cpp-"))
    return [i.name.removeprefix("cpp-") for i in compiled if i.unavailable() is None]


@pytest.mark.parametrize("isa", isas("select_topk"))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_five_runs_are_bit_identical_and_a_stable_sort(isa: str, distribution: str) -> None:
    values = scores(distribution, 9, 8192)
    runs = []
    for threads in (1, 2, 1, 2, 1):
        torch.set_num_threads(threads)
        runs.append(cpu.select_topk(values, 2048, isa=isa))
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert torch.equal(runs[0], expected(values, 2048))
    assert torch.equal(runs[0], reference.select_topk(values, 2048))


@pytest.mark.parametrize("isa", isas("select_topk"))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_row_is_selected_as_a_stable_sort_does(isa: str, data: st.DataObject) -> None:
    floats = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -torch.inf])
    row = data.draw(st.lists(floats, min_size=1, max_size=200))
    topk = data.draw(st.integers(1, 220))
    values = torch.tensor([row], dtype=torch.float32)
    assert torch.equal(cpu.select_topk(values, topk, isa=isa), expected(values, topk))


@pytest.mark.parametrize("isa", isas("lightning_indexer"))
def test_indexer_does_not_depend_on_threads_or_on_how_queries_are_split(isa: str) -> None:
    spec = cases.Spec("bf16", 32, 64, (150,), (150,))
    inputs = cases.build(spec)
    query, key, weights, offsets, topk = inputs.args
    whole = cpu.lightning_indexer(*inputs.args, isa=isa)
    torch.set_num_threads(2)
    assert torch.equal(cpu.lightning_indexer(*inputs.args, isa=isa), whole)
    for start, end in ((0, 1), (1, 64), (64, 150)):  # chunks of a prefill, the first a decode
        part = cpu.lightning_indexer(
            query[start:end], key[:end], weights[start:end], torch.tensor([0, end - start]), topk,
            key_offsets=torch.tensor([0, end]), isa=isa,
        )  # fmt: skip
        assert torch.equal(part, whole[start:end])
    assert offsets.tolist() == [0, 150]


@pytest.mark.parametrize("isa", isas("sparse_attention"))
def test_attention_does_not_depend_on_threads(isa: str) -> None:
    for tokens in (3, 20):  # split over keys, and not
        spec = attention_cases.Spec("bf16", 8, 576, 512, 700, (tokens,), (900,))
        inputs = attention_cases.build(spec)
        first = sparse_attention(*inputs.args, **inputs.kwargs, isa=isa)
        torch.set_num_threads(2)
        second = sparse_attention(*inputs.args, **inputs.kwargs, isa=isa)
        torch.set_num_threads(1)
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_parts_of_the_keys_combine_to_the_whole() -> None:
    spec = attention_cases.Spec("f32", 8, 576, 512, 90, (7,), (200,))
    inputs = attention_cases.build(spec)
    query, latent, indices, *rest = inputs.args
    whole, lse = defined(*inputs.args, **inputs.kwargs)
    parts = [defined(query, latent, part, *rest, **inputs.kwargs) for part in indices.split(40, 1)]
    joined, joined_lse = combine(
        torch.stack([out for out, _ in parts]), torch.stack([part for _, part in parts])
    )
    assert testkit.relative_error(joined, whole.double()) < 4e-6
    assert torch.allclose(joined_lse, lse, atol=4e-6)
    assert (joined[1] == 0).all()  # nothing selected anywhere


def test_index_pages_split_into_codes_and_scales() -> None:
    key = torch.randn(3, 64, 128)
    codes, scale = reference.quantize_index(key, "fp8")
    pages = torch.cat(
        [codes.view(torch.uint8).flatten(1), scale.contiguous().view(torch.uint8).flatten(1)], 1
    )
    assert pages.shape == (3, 8448)  # vLLM's and SGLang's page
    found, found_scale = reference.split_index_pages(pages, 64)
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found_scale, scale)
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)  # powers of two
