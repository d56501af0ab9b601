"""The kit itself: each planted fault must be found, or a passing matrix means nothing."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops import testkit
from fused_ops.expert_gemm.reference import expert_gemm, expert_swiglu
from fused_ops.lightning_indexer import reference as indexer
from fused_ops.lightning_indexer.reference import lightning_indexer, select_topk
from fused_ops.sparse_attention.reference import sparse_attention
from glm5q.quant import pack_int4, unpack_int4

Fault = Callable[..., Any]


def topk_highest_index(scores: Tensor, topk: int) -> Tensor:
    last = scores.shape[1] - 1
    flipped = select_topk(scores.flip(1), topk).long()
    found = torch.where(flipped >= 0, last - flipped, 2**31).sort(1).values
    return torch.where(found <= last, found, -1).int()


def topk_unordered(scores: Tensor, topk: int) -> Tensor:
    return select_topk(scores, topk).flip(1)


def topk_bit_patterns(scores: Tensor, topk: int) -> Tensor:
    """-0 below +0, as a radix selection without canonical zeros has it."""
    lower = torch.nextafter(torch.tensor(0.0), torch.tensor(-1.0))
    negative_zero = (scores == 0) & torch.signbit(scores)
    return select_topk(torch.where(negative_zero, lower, scores), topk)


def topk_half(scores: Tensor, topk: int) -> Tensor:
    """Scores kept as float16, as kernels with a coarse first histogram and no rescan behave."""
    return select_topk(scores.half().float(), topk)


def topk_keeps_masked(scores: Tensor, topk: int) -> Tensor:
    return select_topk(scores.clamp(min=-1e30), topk)


def indexer_highest_index(*args: Any, **kwargs: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "select_topk", topk_highest_index)
        return lightning_indexer(*args, **kwargs)


def indexer_scale_twice(*args: Any, **kwargs: Any) -> Tensor:
    if "key_scale" in kwargs:
        kwargs["key_scale"] = kwargs["key_scale"] ** 2
    return lightning_indexer(*args, **kwargs)


def indexer_without_relu(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return lightning_indexer(query.float().abs().to(query.dtype), *args, **kwargs)


def indexer_from_the_left(*args: Any, **kwargs: Any) -> Tensor:
    """Queries placed at the first positions of a longer sequence instead of the last."""
    result = lightning_indexer(*args, **kwargs)
    return result if "key_offsets" not in kwargs else result.clamp(max=0)


def indexer_pages_in_order(*args: Any, **kwargs: Any) -> Tensor:
    if "page_table" in kwargs:
        table = kwargs["page_table"]
        kwargs["page_table"] = torch.arange(table.numel(), dtype=table.dtype).view_as(table)
        kwargs["page_table"] %= args[1].shape[0]
    return lightning_indexer(*args, **kwargs)


def attention_nan(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse = sparse_attention(*args, **kwargs)
    out[0, 0, 0] = torch.nan
    return out, lse


def attention_wraps(q: Tensor, kv: Tensor, indices: Tensor, *rest: Any, **kw: Any) -> Any:
    """-1 read as the last key, as plain indexing does."""
    return sparse_attention(q, kv, torch.where(indices == -1, 0, indices), *rest, **kw)


def attention_nan_where_empty(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse = sparse_attention(*args, **kwargs)
    return torch.where(torch.isinf(lse).unsqueeze(-1), torch.nan, out), lse


def attention_log2(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    out, lse = sparse_attention(*args, **kwargs)
    return out, lse * 1.4426950408889634


def attention_scale_twice(
    q: Tensor, kv: Tensor, i: Tensor, o: Tensor, s: float, *r: Any, **k: Any
) -> Any:
    return sparse_attention(q, kv, i, o, s * s, *r, **k)


def attention_two_percent(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """As far off as softmax weights rounded to e4m3 are (2.5e-2, measured on H200)."""
    out, lse = sparse_attention(*args, **kwargs)
    return (out.float() * 1.02).to(out.dtype), lse


def gemm_scale_twice(*args: Any, **kwargs: Any) -> Tensor:
    if "weight_scale" in kwargs:
        kwargs["weight_scale"] = kwargs["weight_scale"] ** 2
    return expert_gemm(*args, **kwargs)


def gemm_scale_folded(*args: Any, **kwargs: Any) -> Tensor:
    """Group scales rounded to e4m3 before the product."""
    if "weight_scale" in kwargs:
        kwargs["weight_scale"] = kwargs["weight_scale"].to(torch.float8_e4m3fn).float()
    return expert_gemm(*args, **kwargs)


def gemm_high_nibble_first(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if weight.dtype == torch.int32:
        codes = unpack_int4(weight, weight.shape[-1] * 8)
        weight = pack_int4(codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
    return expert_gemm(x, weight, *args, **kwargs)


def gemm_logical_shift(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Four-bit codes read as unsigned."""
    if weight.dtype == torch.int32:
        weight = unpack_int4(weight, x.shape[1]) & 15
    return expert_gemm(x, weight, *args, **kwargs)


def gemm_next_expert(x: Tensor, weight: Tensor, offsets: Tensor, **kwargs: Any) -> Tensor:
    """An expert without rows skipped when counting experts."""
    counts = offsets.diff()
    counts = torch.cat([counts[counts > 0], counts[counts == 0]])
    return expert_gemm(x, weight, torch.cat([offsets[:1], counts.cumsum(0)]), **kwargs)


def gemm_saturates(x: Tensor, weight: Tensor, offsets: Tensor, **kwargs: Any) -> Tensor:
    """Pairs of byte products summed in 16 bits, as vpmaddubsw on codes + 128 does."""
    if (x.dtype, weight.dtype) != (torch.int8, torch.int8) or x.shape[1] % 2:
        return expert_gemm(x, weight, offsets, **kwargs)
    scale, rows = kwargs["weight_scale"], []
    for expert, (start, end) in enumerate(pairwise(offsets.tolist())):
        left = x[start:end].float().unflatten(1, (scale.shape[2], -1, 2)).unsqueeze(1)
        right = (weight[expert].float() + 128).unflatten(1, (scale.shape[2], -1, 2))
        sums = (left * right).sum(-1).clamp(-32768, 32767).sum(-1) - 128 * left.sum((-1, -2))
        rows.append((sums * scale[expert]).sum(-1))
    result = torch.cat(rows) * kwargs["x_scale"].unsqueeze(1)
    return result.to(kwargs.get("out_dtype", torch.bfloat16))


def swiglu_up_first(x: Tensor, weight: Tensor, offsets: Tensor, **kwargs: Any) -> Any:
    half = weight.shape[1] // 2
    kwargs["weight_scale"] = kwargs["weight_scale"].roll(half, 1)
    return expert_swiglu(x, weight.roll(half, 1), offsets, **kwargs)


def swiglu_one_scale(*args: Any, **kwargs: Any) -> Any:
    """One scale for the whole tensor, not one a row."""
    codes, scale = expert_swiglu(*args, **kwargs)
    return codes, scale.amax().expand_as(scale).contiguous() if scale.numel() else scale


FAULTS: list[tuple[str, Fault]] = [
    ("select_topk", topk_highest_index),
    ("select_topk", topk_unordered),
    ("select_topk", topk_bit_patterns),
    ("select_topk", topk_half),
    ("select_topk", topk_keeps_masked),
    ("lightning_indexer", indexer_highest_index),
    ("lightning_indexer", indexer_scale_twice),
    ("lightning_indexer", indexer_without_relu),
    ("lightning_indexer", indexer_from_the_left),
    ("lightning_indexer", indexer_pages_in_order),
    ("sparse_attention", attention_nan),
    ("sparse_attention", attention_wraps),
    ("sparse_attention", attention_nan_where_empty),
    ("sparse_attention", attention_log2),
    ("sparse_attention", attention_scale_twice),
    ("sparse_attention", attention_two_percent),
    ("expert_gemm", gemm_scale_twice),
    ("expert_gemm", gemm_scale_folded),
    ("expert_gemm", gemm_high_nibble_first),
    ("expert_gemm", gemm_logical_shift),
    ("expert_gemm", gemm_next_expert),
    ("expert_gemm", gemm_saturates),
    ("expert_swiglu", swiglu_up_first),
    ("expert_swiglu", swiglu_one_scale),
]


@pytest.mark.parametrize(("name", "fault"), [pytest.param(*f, id=f[1].__name__) for f in FAULTS])
def test_a_planted_fault_is_found(name: str, fault: Fault) -> None:
    problems = {case.name: v.problem for case, v in testkit.check(name, fault) if v.problem}
    assert problems
    assert not any("raised" in problem for problem in problems.values())


def test_the_tie_fault_shows_only_where_there_are_ties() -> None:
    problems = {c.name for c, v in testkit.check("select_topk", topk_highest_index) if v.problem}
    kinds = {name.split("-")[0] for name in problems}
    assert kinds == {"rounded", "narrow", "equal", "zeros", "signed_zeros"}


def test_a_nan_never_passes() -> None:
    truth = torch.ones(3, 4, dtype=torch.float64)
    result = truth.float()
    result[1, 2] = torch.nan
    verdict = testkit.compare(result, truth, result, torch.float32, 1e9, 1e9)
    assert verdict.problem
    assert testkit.relative_error(truth.float(), truth) == 0.0


def test_rows_of_zeros_must_be_zero() -> None:
    truth = torch.zeros(2, 3, dtype=torch.float64)
    assert testkit.relative_error(torch.zeros(2, 3), truth) == 0.0
    assert testkit.relative_error(torch.full((2, 3), 1e-30), truth) == float("inf")


def test_what_a_port_raises_is_its_result() -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise ValueError("no paging")

    verdicts = testkit.check("select_topk", broken)
    assert {v.problem for _, v in verdicts} == {"raised ValueError: no paging"}
