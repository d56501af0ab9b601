"""Every constraint on a call of torch_npu's ops: what keeps it, what breaks it.

Each change is made to one call that keeps everything, and the rule it is listed under must be the
first that objects. What only values show is refused by the CPU functions; last here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_ops.expert_gemm import torch_npu as experts
from fused_ops.npu_calls import RULES, WHOLE, broken
from fused_ops.npu_support import call
from fused_ops.op import UnsupportedOp

Call = dict[str, Any]

TOKENS, PAGES, PAGE, SEQUENCES = 4, 9, 128, 2
WIDTHS = (512, 1536, 2048, 3072, 4096, 6144, 7168, 12_288)  # of GLM-5's and DeepSeek's experts


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def int32(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def int8(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int8)


def half(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float16)


def float32(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def int64(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def sequences(lengths: str, layout: str) -> Call:
    return {
        "actual_seq_lengths_query": int32(SEQUENCES),
        lengths: int32(SEQUENCES),
        "block_table": int32(SEQUENCES, 5),
        "layout_query": "TND",
        layout: "PA_BSND",
        "sparse_mode": 3,
        "pre_tokens": WHOLE,
        "next_tokens": WHOLE,
    }


def good(op: str) -> Call:
    """A call that keeps every rule."""
    index = {**sequences("actual_seq_lengths_key", "layout_key"), "sparse_count": 2048}
    attention = {
        **sequences("actual_seq_lengths_kv", "layout_kv"),
        "sparse_indices": int32(TOKENS, 1, 2048),
        "scale_value": 0.0625,
        "attention_mode": 2,
        "sparse_block_size": 1,
    }
    key, rows = empty(PAGES, PAGE, 1, 512), int8(PAGES, PAGE, 1, 656)
    grouped = {
        "group_list": int64(16),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        "act_type": 0,
    }
    calls: dict[str, Call] = {
        "npu_lightning_indexer": {
            "query": empty(TOKENS, 32, 128),
            "key": empty(PAGES, PAGE, 1, 128),
            "weights": float32(TOKENS, 32),
            **index,
        },
        "npu_quant_lightning_indexer": {
            "query": int8(TOKENS, 32, 128),
            "key": int8(PAGES, PAGE, 1, 128),
            "weights": half(TOKENS, 32),
            "query_dequant_scale": half(TOKENS, 32),
            "key_dequant_scale": half(PAGES, PAGE, 1),
            "query_quant_mode": 0,
            "key_quant_mode": 0,
            **index,
        },
        "npu_sparse_flash_attention": {
            "query": empty(TOKENS, 64, 512),
            "key": key,
            "value": key,
            "query_rope": empty(TOKENS, 64, 64),
            "key_rope": empty(PAGES, PAGE, 1, 64),
            "return_softmax_lse": False,
            **attention,
        },
        "npu_kv_quant_sparse_flash_attention": {
            "query": empty(TOKENS, 64, 576),
            "key": rows,
            "value": rows,
            "key_quant_mode": 2,
            "value_quant_mode": 2,
            "quant_scale_repo_mode": 1,
            "tile_size": 128,
            "rope_head_dim": 64,
            **attention,
        },
        "npu_grouped_matmul": {
            "x": [int8(100, 6144)],
            "weight": [int32(16, 6144, 512)],
            "scale": [int64(16, 1, 4096)],
            "bias": [float32(16, 4096)],
            "per_token_scale": [float32(100)],
            "output_dtype": torch.bfloat16,
            **grouped,
        },
        "npu_dynamic_quant": {"input": empty(5, 64)},
    }
    return calls[op]


UNPAGED_INDEX = {"layout_key": "TND", "block_table": None, "key": empty(300, 1, 128)}
W8A8 = {
    "weight": [int8(16, 6144, 4096)],
    "scale": [empty(16, 4096)],
    "bias": None,
    "output_dtype": torch.bfloat16,
}
SUMS = {**W8A8, "scale": None, "per_token_scale": None, "output_dtype": torch.int32}


def matmul(columns: int, out: int, groups: int = 1, **others: Any) -> Call:
    return {
        "x": [int8(100, columns)],
        "weight": [int32(16, columns, out // 8)],
        "scale": [int64(16, groups, out)],
        "bias": [float32(16, out)],
        **others,
    }


def heads(count: int, dim: int) -> Call:
    """Another number of query heads, in all that has them."""
    return {"query": empty(TOKENS, count, dim)}


def shared(lengths: str, layout: str, key: Callable[[int], Tensor]) -> dict[str, tuple[Any, Any]]:
    """Rules of the four ops on sequences: name -> (calls that keep it, calls that break it)."""
    return {
        "not_empty": ([{}], [{"actual_seq_lengths_query": int32(0)}]),
        "contiguous": ([{}], [{lengths: int32(4)[::2]}]),
        "layout": ([{}], [{"layout_query": "BNSD"}, {layout: "BSND"}]),
        "query_prefix_sums": (
            [{}],
            [{"actual_seq_lengths_query": None}, {"actual_seq_lengths_query": int64(SEQUENCES)}],
        ),
        "key_lengths": ([{}], [{lengths: None}]),
        "block_size": (
            [{"key": key(16)}, {"key": key(1024)}],
            [{"key": key(24)}, {"key": key(1040)}, {"block_table": None}],
        ),
        "key_heads": ([{}], [{"key": key(PAGE).expand(-1, -1, 2, -1).clone()}]),
        "sparse_mode": ([{"sparse_mode": 0}, {"sparse_mode": 3}], [{"sparse_mode": 4}]),
        "no_window": ([{}], [{"pre_tokens": 4096}, {"next_tokens": 0}]),
    }


def indexer(dtype: torch.dtype, *, quant: bool) -> dict[str, tuple[Any, Any]]:
    counts = (1, 2048) if quant else (1, 2048, 3072, 8192)
    wrong = (0, 2049, 3072) if quant else (0, 2049, 3000, 9216)
    return {
        "head_dim": ([{}], [{"query": empty(TOKENS, 32, 64, dtype=dtype)}]),
        "query_heads": (
            [{"query": empty(TOKENS, n, 128, dtype=dtype)} for n in (1, 64)],
            [{"query": empty(TOKENS, 65, 128, dtype=dtype)}],
        ),
        "sparse_count": (
            [{"sparse_count": count} for count in counts],
            [{"sparse_count": count} for count in wrong],
        ),
        **shared(
            "actual_seq_lengths_key",
            "layout_key",
            lambda page: empty(PAGES, page, 1, 128, dtype=dtype),
        ),
    }


def attention(dim: int, blocks: tuple[int, ...], wrong: tuple[int, ...], key: Any) -> Any:
    return {
        "attention_heads": (
            [heads(n, dim) for n in (1, 2, 4, 8, 16, 32, 64, 128)],
            [heads(n, dim) for n in (3, 48, 96, 256)],
        ),
        "attention_mode": ([{"attention_mode": 2}], [{"attention_mode": 0}]),
        "sparse_block_size": (
            [{"sparse_block_size": size} for size in blocks],
            [{"sparse_block_size": size} for size in wrong],
        ),
        "no_sinks": ([{"sinks": None}], [{"sinks": float32(64)}]),
        "indices": ([{}], [{"sparse_indices": int64(TOKENS, 1, 2048)}]),
        **shared("actual_seq_lengths_kv", "layout_kv", key),
    }


# op -> rule -> (changes that keep it, changes that break it)
TABLE: dict[str, dict[str, tuple[list[Call], list[Call]]]] = {
    "npu_lightning_indexer": {
        "dtype": (
            [{}, {"query": half(TOKENS, 32, 128), "key": half(PAGES, PAGE, 1, 128)}],
            [{"query": half(TOKENS, 32, 128)}, {"query": float32(TOKENS, 32, 128)}],
        ),
        "weights_dtype": (
            [{"weights": float32(TOKENS, 32)}, {"weights": empty(TOKENS, 32)}],
            [{"weights": half(TOKENS, 32)}],
        ),
        **indexer(torch.bfloat16, quant=False),
    },
    "npu_quant_lightning_indexer": {
        "dtype": ([{}], [{"query": empty(TOKENS, 32, 128)}, {"key": empty(PAGES, PAGE, 1, 128)}]),
        "half_scales": (
            [{}],
            [
                {"weights": empty(TOKENS, 32)},
                {"query_dequant_scale": float32(TOKENS, 32)},
                {"key_dequant_scale": float32(PAGES, PAGE, 1)},
            ],
        ),
        "quant_modes": ([{}], [{"query_quant_mode": 1}, {"key_quant_mode": 1}]),
        **indexer(torch.int8, quant=True),
    },
    "npu_sparse_flash_attention": {
        "dtype": (
            [{}],
            [{"query": float32(TOKENS, 64, 512)}, {"value": None}, {"key": half(9, 128, 1, 512)}],
        ),
        "latent_dim": ([{}], [{"query": empty(TOKENS, 64, 576)}]),
        "rope_dim": ([{}], [{"key_rope": None}, {"query_rope": empty(TOKENS, 64, 32)}]),
        "no_lse_with_pages": (
            [
                {},
                {
                    "return_softmax_lse": True,
                    "layout_kv": "TND",
                    "block_table": None,
                    "key": empty(300, 1, 512),
                    "value": empty(300, 1, 512),
                    "key_rope": empty(300, 1, 64),
                },
            ],
            [{"return_softmax_lse": True}],
        ),
        **attention(512, (1, 2, 64, 128), (0, 3, 256), lambda page: empty(PAGES, page, 1, 512)),
    },
    "npu_kv_quant_sparse_flash_attention": {
        "dtype": ([{}], [{"query": float32(TOKENS, 64, 576)}]),
        "int8_rows": (
            [{}],
            [{"key": int8(PAGES, PAGE, 1, 576)}, {"value": empty(PAGES, PAGE, 1, 656)}],
        ),
        "query_dim": ([{}], [heads(64, 512)]),
        "quant_modes": (
            [{}],
            [{"key_quant_mode": 0}, {"value_quant_mode": 1}, {"tile_size": 64}],
        ),
        "scales_in_rows": ([{}], [{"quant_scale_repo_mode": 0}]),
        **attention(576, (1, 2, 16), (0, 3, 32, 128), lambda page: int8(PAGES, page, 1, 656)),
    },
    "npu_grouped_matmul": {
        "x_dtype": ([{}, W8A8], [{"x": [empty(100, 6144)]}, {"weight": [empty(16, 6144, 4096)]}]),
        "one_tensor_each": (
            [{"split_item": 3}],
            [{"split_item": 0}, {"group_type": 2}, {"x": [int8(100, 6144)] * 2}],
        ),
        "count_mode": ([{}], [{"group_list_type": 0}, {"group_list": int32(16)}]),
        "experts": ([{}], [{"group_list": int64(1)}, {"group_list": int64(1025)}]),
        "no_activation": ([{}], [{"act_type": 5}]),
        "inner_dimension": (
            [{**W8A8, "x": [int8(1, 65535)], "weight": [int8(16, 65535, 8)]}],
            [{**W8A8, "x": [int8(1, 65536)]}, {**W8A8, "weight": [int8(16, 8, 65536)]}],
        ),
        "int4_scale": (
            [matmul(6144, 4096), matmul(6144, 4096, groups=24)],
            [matmul(6144, 4096, groups=48), {"scale": [float32(16, 1, 4096)]}],
        ),
        "int4_bias": (
            [{}],
            [
                {"bias": None},
                {"bias": [empty(16, 4096)]},
                {"bias": [float32(4096)]},
                {"bias": [float32(16, 512)]},
                {"bias": [float32(8, 4096)]},
            ],
        ),
        "int4_token_scale": ([{}], [{"per_token_scale": None}, {"per_token_scale": [half(100)]}]),
        "int4_output": (
            [{"output_dtype": torch.float16}],
            [{"output_dtype": torch.float32}, {"output_dtype": torch.int32}],
        ),
        "int4_columns": (
            [matmul(256, 64), matmul(18432, 64)],
            [matmul(320, 64), matmul(18688, 64)],
        ),
        "int4_out_of_eights": (
            [matmul(256, 8)],
            [{**matmul(256, 64), "scale": [int64(16, 1, 60)]}],
        ),
        "int4_asymmetric": (
            [
                {"offset": None},
                matmul(7168, 4096, offset=[float32(16, 1, 4096)], output_dtype=torch.float16),
                matmul(2048, 7168, offset=[float32(16, 1, 7168)], output_dtype=torch.float16),
            ],
            [
                {"offset": [float32(16, 1, 4096)], "output_dtype": torch.float16},
                matmul(7168, 4096, offset=[float32(16, 1, 4096)]),
                *(
                    matmul(columns, out, offset=[float32(16, 1, out)], output_dtype=torch.float16)
                    for columns in WIDTHS
                    for out in WIDTHS
                    if (columns, out) not in ((7168, 4096), (2048, 7168))
                ),
            ],
        ),
        "int8_scale": (
            [W8A8, SUMS, {**W8A8, "scale": [float32(16, 4096)], "output_dtype": torch.float16}],
            [
                {**W8A8, "scale": [float32(16, 4096)]},
                {**W8A8, "output_dtype": torch.float16},
                {**SUMS, "output_dtype": torch.bfloat16},
                {**SUMS, "per_token_scale": [float32(100)]},
            ],
        ),
    },
    "npu_dynamic_quant": {
        "dtype": ([{}, {"input": half(2, 64)}], [{"input": float32(5, 64)}, {"input": empty(64)}]),
    },
}


def test_every_rule_of_every_op_is_in_the_table() -> None:
    assert {op: [rule.name for rule in rules] for op, rules in RULES.items()} == {
        op: list(rules) for op, rules in TABLE.items()
    }
    assert all(keep and break_ for rules in TABLE.values() for keep, break_ in rules.values())


ROWS = [
    pytest.param(op, name, *pair, id=f"{op.removeprefix('npu_')}-{name}")
    for op, rules in TABLE.items()
    for name, pair in rules.items()
]


@pytest.mark.parametrize(("op", "name", "keep", "break_"), ROWS)
def test_a_call_that_keeps_a_rule_passes_and_one_that_breaks_it_does_not(
    op: str, name: str, keep: list[Call], break_: list[Call]
) -> None:
    for change in keep:
        assert broken(op, good(op) | change) is None
    for change in break_:
        rule = broken(op, good(op) | change)
        assert rule is not None
        assert rule.name == name


@pytest.mark.usefixtures("npu_ops")
def test_a_broken_call_is_not_made() -> None:
    wrong = good("npu_sparse_flash_attention") | {"attention_mode": 0}
    with pytest.raises(UnsupportedOp, match="npu_sparse_flash_attention: takes attention_mode 2"):
        call("npu_sparse_flash_attention", **wrong)


# What only values show: the functions under the schemas refuse it, the adapters make it so.
def index_call(**changes: Any) -> Call:
    arguments: Call = {
        "query": torch.ones((3, 2, 128), dtype=torch.int8),
        "key": torch.ones((5, 1, 128), dtype=torch.int8),
        "weights": torch.ones((3, 2), dtype=torch.float16),
        "query_dequant_scale": torch.ones((3, 2), dtype=torch.float16),
        "key_dequant_scale": torch.ones((5, 1), dtype=torch.float16),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "actual_seq_lengths_query": torch.tensor([1, 3], dtype=torch.int32),
        "actual_seq_lengths_key": torch.tensor([2, 5], dtype=torch.int32),
        "layout_query": "TND",
        "layout_key": "TND",
        "sparse_count": 4,
        "sparse_mode": 3,
        "pre_tokens": WHOLE,
        "next_tokens": WHOLE,
    }
    return arguments | changes


def attention_call(indices: list[int]) -> Call:
    key = torch.ones((5, 1, 512), dtype=torch.bfloat16)
    return {
        "query": torch.ones((1, 2, 512), dtype=torch.bfloat16),
        "key": key,
        "value": key,
        "query_rope": torch.ones((1, 2, 64), dtype=torch.bfloat16),
        "key_rope": torch.ones((5, 1, 64), dtype=torch.bfloat16),
        "sparse_indices": torch.tensor([[indices]], dtype=torch.int32),
        "scale_value": 1.0,
        "actual_seq_lengths_query": torch.tensor([1], dtype=torch.int32),
        "actual_seq_lengths_kv": torch.tensor([5], dtype=torch.int32),
        "sparse_block_size": 1,
        "layout_query": "TND",
        "layout_kv": "TND",
        "sparse_mode": 0,
        "pre_tokens": WHOLE,
        "next_tokens": WHOLE,
        "attention_mode": 2,
        "return_softmax_lse": True,
    }


@pytest.mark.usefixtures("npu_ops")
def test_weights_times_scales_outside_float16() -> None:
    call("npu_quant_lightning_indexer", **index_call())
    large = {"weights": torch.full((3, 2), 300.0).half()}
    large["query_dequant_scale"] = large["weights"]
    with pytest.raises(ValueError, match="leave float16"):
        call("npu_quant_lightning_indexer", **index_call(**large))


@pytest.mark.usefixtures("npu_ops")
def test_prefix_sums_that_fall_or_are_lengths() -> None:
    lengths = torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="prefix sums"):
        call("npu_quant_lightning_indexer", **index_call(actual_seq_lengths_query=lengths))


@pytest.mark.usefixtures("npu_ops")
def test_fewer_keys_than_asked_for_end_in_minus_one() -> None:
    chosen = call("npu_quant_lightning_indexer", **index_call())
    assert chosen[0, 0].tolist() == [0, 1, -1, -1]


@pytest.mark.usefixtures("npu_ops")
def test_valid_indices_come_first() -> None:
    call("npu_sparse_flash_attention", **attention_call([4, 0, -1]))
    with pytest.raises(ValueError, match="behind an invalid one"):
        call("npu_sparse_flash_attention", **attention_call([4, -1, 0]))
    with pytest.raises(ValueError, match="outside the sequence"):
        call("npu_sparse_flash_attention", **attention_call([5]))


@pytest.mark.usefixtures("npu_ops")
def test_int4_weights_are_fractal() -> None:
    codes = torch.ones((2, 8, 256), dtype=torch.int8)
    prepared = experts.prepare(pack(codes), torch.ones((2, 8, 1)), 256)
    arguments = {
        "x": [torch.ones((3, 256), dtype=torch.int8)],
        "weight": [prepared.weight],
        "scale": [prepared.scale],
        "bias": [prepared.bias],
        "per_token_scale": [torch.ones(3)],
        "group_list": torch.tensor([1, 2]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        "act_type": 0,
        "output_dtype": torch.bfloat16,
    }
    (result,) = call("npu_grouped_matmul", **arguments)
    assert (result == 256).all()
    with pytest.raises(ValueError, match="FRACTAL_NZ"):
        call("npu_grouped_matmul", **arguments | {"weight": [prepared.weight.clone()]})


def pack(codes: Tensor) -> Tensor:
    from glm5q.quant import pack_int4

    return pack_int4(codes)
