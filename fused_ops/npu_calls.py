"""Every documented constraint on a call of torch_npu's fused ops, as a table.

A call is its arguments by name. What depends on a tensor's values (prefix sums that do not fall,
-1 last, weights x scales inside float16) is not looked at here: it would wait for the device, and
the adapters make it so. Numbers and their source are in npu_limits.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops import npu_limits as limits
from fused_ops.op import Limit

Call = Mapping[str, Any]

WHOLE = 2**63 - 1  # pre_tokens and next_tokens: no window
HALVES = (torch.float16, torch.bfloat16)
ASYMMETRIC = ((7168, 4096), (2048, 7168))  # (columns, out) of int4 weights with an offset


@dataclass(frozen=True)
class Rule:
    """`holds` says whether a call keeps it; `why` completes "npu_...: "."""

    name: str
    holds: Callable[[Call], bool]
    why: str


def broken(op: str, call: Call) -> Rule | None:
    """Returns the first rule of `op` that `call` breaks, or None."""
    return next((rule for rule in RULES[op] if not rule.holds(call)), None)


def _tensors(call: Call) -> list[Tensor]:
    values = [value if isinstance(value, list) else [value] for value in call.values()]
    return [part for value in values for part in value if isinstance(part, Tensor)]


def _is_int32(call: Call, name: str) -> bool:
    tensor = call.get(name)
    return tensor is not None and tensor.dtype == torch.int32 and tensor.dim() == 1


def _pages(key_layout: str) -> Callable[[Call], bool]:
    def holds(call: Call) -> bool:
        if call[key_layout] != "PA_BSND":
            return True
        table = call.get("block_table")
        return (
            table is not None
            and table.dtype == torch.int32
            and limits.PAGE.refuse("", call["key"].shape[1]) is None
        )

    return holds


def _sequences(keys: str, key_layout: str) -> tuple[Rule, ...]:
    """What the four ops on sequences share; `keys` and `key_layout` are their names for them."""
    return (
        Rule("not_empty", lambda c: all(t.numel() for t in _tensors(c)), "takes no empty tensor"),
        Rule(
            "contiguous",
            lambda c: all(t.is_contiguous() for t in _tensors(c)),
            "takes contiguous tensors only",
        ),
        Rule(
            "layout",
            lambda c: (
                c["layout_query"] in ("BSND", "TND")
                and c[key_layout] in ("PA_BSND", c["layout_query"])
            ),
            "takes BSND or TND queries, and keys as the queries or PA_BSND",
        ),
        Rule(
            "query_prefix_sums",
            lambda c: c["layout_query"] != "TND" or _is_int32(c, "actual_seq_lengths_query"),
            "TND needs actual_seq_lengths_query, int32 prefix sums",
        ),
        Rule(
            "key_lengths",
            lambda c: c[key_layout] == "BSND" or _is_int32(c, keys),
            f"TND and PA_BSND need {keys}, int32",
        ),
        Rule("block_size", _pages(key_layout), "takes pages of 16 to 1024 tokens in steps of 16"),
        Rule("key_heads", lambda c: c["key"].shape[-2] == 1, "takes one key head"),
        Rule("sparse_mode", lambda c: c["sparse_mode"] in (0, 3), "takes sparse_mode 0 or 3"),
        Rule(
            "no_window",
            lambda c: c["pre_tokens"] == WHOLE and c["next_tokens"] == WHOLE,
            "takes pre_tokens and next_tokens 2^63 - 1 only",
        ),
    )


def _indexer(counts: tuple[Limit, ...]) -> tuple[Rule, ...]:
    return (
        Rule(
            "head_dim",
            lambda c: c["query"].shape[-1] == c["key"].shape[-1] == limits.INDEX_DIM.minimum,
            "takes 128 features a head",
        ),
        Rule(
            "query_heads",
            lambda c: limits.INDEX_HEADS.refuse("", c["query"].shape[-2]) is None,
            "takes 1 to 64 query heads",
        ),
        Rule(
            "sparse_count",
            lambda c: limits.within(counts, c["sparse_count"]),
            "takes sparse_count "
            + " or ".join(f"{one.minimum} to {one.maximum}" for one in counts)
            + (" in steps of 1024" if len(counts) > 1 else ""),
        ),
        *_sequences("actual_seq_lengths_key", "layout_key"),
    )


def _attention(blocks: tuple[int, ...]) -> tuple[Rule, ...]:
    return (
        Rule(
            "attention_heads",
            lambda c: c["query"].shape[-2] in limits.ATTENTION_HEADS,
            "takes 1, 2, 4, 8, 16, 32, 64 or 128 query heads",
        ),
        Rule("attention_mode", lambda c: c["attention_mode"] == 2, "takes attention_mode 2 only"),
        Rule(
            "sparse_block_size",
            lambda c: c["sparse_block_size"] in blocks,
            f"takes sparse_block_size powers of two up to {blocks[-1]}",
        ),
        Rule("no_sinks", lambda c: c.get("sinks") is None, "takes no sinks"),
        Rule(
            "indices",
            lambda c: c["sparse_indices"].dtype == torch.int32,
            "takes int32 sparse_indices",
        ),
        *_sequences("actual_seq_lengths_kv", "layout_kv"),
    )


def _grouped(holds: Callable[[Call], bool], int4: bool) -> Callable[[Call], bool]:
    """A rule of int4 weights (eight an int32) or of int8 ones; the other kind keeps it."""
    return lambda c: holds(c) if (c["weight"][0].dtype == torch.int32) == int4 else True


def _int4_scale(call: Call) -> bool:
    """One scale a row, or one for 256 columns: [experts, 1 or in / 256, out]."""
    scale, columns = call["scale"][0], call["x"][0].shape[1]
    return (
        scale.dtype == torch.int64
        and scale.dim() == 3
        and scale.shape[1] in (1, columns // limits.INT4_GROUPS[1])
    )


def _int4_offset(call: Call) -> bool:
    if call.get("offset") is None:
        return True
    weight = call["weight"][0]
    shape = (weight.shape[1], weight.shape[2] * 8)
    return call["output_dtype"] == torch.float16 and shape in ASYMMETRIC


def _int8_scale(call: Call) -> bool:
    """(scale, out): bfloat16 gives bfloat16, float32 float16, none the int32 sums."""
    scale = call.get("scale")
    if scale is None:
        return call.get("per_token_scale") is None and call["output_dtype"] == torch.int32
    pair = (scale[0].dtype, call["output_dtype"])
    return pair in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16))


def _bias_is_float32(call: Call) -> bool:
    bias, weight = call.get("bias"), call["weight"][0]
    return (
        bias is not None
        and bias[0].dtype == torch.float32
        and tuple(bias[0].shape) == (weight.shape[0], weight.shape[2] * 8)
    )


RULES: dict[str, tuple[Rule, ...]] = {
    "npu_lightning_indexer": (
        Rule(
            "dtype",
            lambda c: c["query"].dtype in HALVES and c["key"].dtype == c["query"].dtype,
            "takes float16 or bfloat16 queries and keys, both alike",
        ),
        Rule(
            "weights_dtype",
            lambda c: c["weights"].dtype in (torch.float32, c["query"].dtype),
            "takes weights as the queries, or float32",
        ),
        *_indexer(limits.INDEX_COUNTS),
    ),
    "npu_quant_lightning_indexer": (
        Rule(
            "dtype",
            lambda c: c["query"].dtype == c["key"].dtype == torch.int8,
            "takes int8 queries and keys",
        ),
        Rule(
            "half_scales",
            lambda c: all(
                c[name].dtype == torch.float16
                for name in ("weights", "query_dequant_scale", "key_dequant_scale")
            ),
            "takes weights and both scales in float16",
        ),
        Rule(
            "quant_modes",
            lambda c: c["query_quant_mode"] == c["key_quant_mode"] == 0,
            "takes quant modes 0, one scale a token and head",
        ),
        *_indexer((limits.QUANT_INDEX_COUNT,)),
    ),
    "npu_sparse_flash_attention": (
        Rule(
            "dtype",
            lambda c: c["query"].dtype in HALVES
            and all(
                c[name] is not None and c[name].dtype == c["query"].dtype
                for name in ("key", "value")
            ),
            "takes query, key and value in one of float16 and bfloat16; no value needs CANN 9.2",
        ),
        Rule(
            "latent_dim",
            lambda c: c["query"].shape[-1] == c["key"].shape[-1] == limits.LATENT_DIM,
            "takes 512 latent features",
        ),
        Rule(
            "rope_dim",
            lambda c: all(
                c.get(name) is not None and c[name].shape[-1] == limits.ROPE_DIM
                for name in ("query_rope", "key_rope")
            ),
            "needs 64 rotated features, apart",
        ),
        Rule(
            "no_lse_with_pages",
            lambda c: not (c["return_softmax_lse"] and c["layout_kv"] == "PA_BSND"),
            limits.NO_LSE_WITH_PAGES,
        ),
        *_attention(limits.ATTENTION_BLOCKS),
    ),
    "npu_kv_quant_sparse_flash_attention": (
        Rule("dtype", lambda c: c["query"].dtype in HALVES, "takes float16 or bfloat16 queries"),
        Rule(
            "int8_rows",
            lambda c: c["key"].dtype == c["value"].dtype == torch.int8
            and c["key"].shape[-1] == limits.ROW_BYTES,
            "takes int8 rows of 656 bytes: 512 codes, 64 bfloat16, 4 float32 scales",
        ),
        Rule(
            "query_dim",
            lambda c: c["query"].shape[-1] == limits.QUERY_DIM.minimum,
            "takes 576 query features",
        ),
        Rule(
            "quant_modes",
            lambda c: c["key_quant_mode"] == c["value_quant_mode"] == 2
            and (c["tile_size"], c["rope_head_dim"]) == (limits.TILE, limits.ROPE_DIM),
            "takes quant modes 2, tiles of 128 and 64 rotated features",
        ),
        Rule(
            "scales_in_rows",
            lambda c: c["quant_scale_repo_mode"] == 1,
            "takes quant_scale_repo_mode 1",
        ),
        *_attention(limits.QUANT_ATTENTION_BLOCKS),
    ),
    "npu_grouped_matmul": (
        Rule(
            "x_dtype",
            lambda c: c["x"][0].dtype == torch.int8
            and c["weight"][0].dtype in (torch.int8, torch.int32),
            "is used with int8 rows, and weights int8 or int4 (eight an int32)",
        ),
        Rule(
            "one_tensor_each",
            lambda c: len(c["x"]) == len(c["weight"]) == 1
            and c["weight"][0].dim() == 3
            and (c["group_type"], c["split_item"]) in ((0, 2), (0, 3)),
            "is used with one x, one weight [experts, in, out] and one result",
        ),
        Rule(
            "count_mode",
            lambda c: c["group_list_type"] == 1 and c["group_list"].dtype == torch.int64,
            "takes int64 rows an expert (group_list_type 1)",
        ),
        Rule(
            "experts",
            lambda c: limits.EXPERTS.refuse("", c["group_list"].shape[0]) is None
            and c["group_list"].shape[0] == c["weight"][0].shape[0],
            "takes 2 to 1024 experts",
        ),
        Rule("no_activation", lambda c: c["act_type"] == 0, "is used with act_type 0"),
        Rule(
            "inner_dimension",
            lambda c: limits.INNER.refuse("", c["x"][0].shape[1]) is None
            and limits.INNER.refuse("", c["weight"][0].shape[2]) is None,
            "takes fewer than 65536 columns and outputs",
        ),
        Rule("int4_scale", _grouped(_int4_scale, True), "takes int64 [experts, groups, out]"),
        Rule(
            "int4_bias",
            _grouped(_bias_is_float32, True),
            "needs a float32 bias [experts, out]: 8 x the sum of weight x scale",
        ),
        Rule(
            "int4_token_scale",
            _grouped(
                lambda c: bool(c.get("per_token_scale"))
                and c["per_token_scale"][0].dtype == torch.float32,
                True,
            ),
            "needs a float32 per_token_scale",
        ),
        Rule(
            "int4_output",
            _grouped(lambda c: c["output_dtype"] in HALVES, True),
            "gives float16 or bfloat16",
        ),
        Rule(
            "int4_columns",
            _grouped(
                lambda c: limits.INT4_COLUMNS.refuse("", c["x"][0].shape[1]) is None, True
            ),
            "takes columns up to 18432 in steps of 256",
        ),
        Rule(
            "int4_out_of_eights",
            _grouped(
                lambda c: c["weight"][0].shape[2] * 8 == c["scale"][0].shape[-1], True
            ),
            "takes outputs in steps of 8",
        ),
        Rule(
            "int4_asymmetric",
            _grouped(_int4_offset, True),
            "takes an offset with float16 out and 7168 x 4096 or 2048 x 7168 only",
        ),
        Rule(
            "int8_scale",
            _grouped(_int8_scale, False),
            "gives bfloat16 with bfloat16 scales, float16 with float32 ones, int32 with none",
        ),
    ),
    "npu_dynamic_quant": (
        Rule(
            "dtype",
            lambda c: c["input"].dtype in HALVES and c["input"].dim() > 1,
            "takes float16 or bfloat16 rows",
        ),
    ),
}  # fmt: skip
