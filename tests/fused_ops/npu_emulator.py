"""CPU functions under torch_npu's schemas, each written from CANN's description of its op.

They share no code with the adapters and refuse what the description forbids and only values show:
falling prefix sums, a valid index behind an invalid one, an index outside its sequence, weights x
scales outside float16, int4 weights that are not FRACTAL_NZ. Where the description leaves a result
open (nothing selected, a row of zeros) they return nonsense, so that nobody relies on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SCHEMAS = Path(__file__).parent / "data" / "npu_schemas.json"
FRACTAL_NZ = 29


def committed_schemas() -> dict[str, str]:
    """Returns op -> schema of torch_npu, as checked against its wheel by test_torch_npu_wheel."""
    found: dict[str, str] = json.loads(SCHEMAS.read_text())["schemas"]
    return found


def register(schemas: dict[str, str]) -> torch.library.Library:
    """Defines torch.ops.npu with these functions for CPU tensors. Keep the result: it undoes it."""
    library = torch.library.Library("npu", "DEF")
    for name, schema in schemas.items():
        library.define(schema)
        library.impl(name, FUNCTIONS[name], "CPU")
    return library


def spans(query_ends: Tensor, rows: int) -> list[tuple[int, int]]:
    ends = query_ends.tolist()
    if sorted(ends) != ends or ends[-1] != rows:
        raise ValueError(f"prefix sums {ends} fall or do not end at {rows} rows")
    return list(zip([0, *ends[:-1]], ends, strict=True))


def sequence_keys(
    keys: Tensor, lengths: Tensor, table: Tensor | None, layout: str, sequence: int
) -> Tensor:
    """One sequence's keys [keys, ...]: a stretch of TND rows, or its pages in the table's order."""
    if layout == "TND":
        start, end = spans(lengths, keys.shape[0])[sequence]
        return keys[start:end, 0]
    assert layout == "PA_BSND"
    assert table is not None
    assert table.shape[0] == lengths.numel()
    count, page = int(lengths[sequence]), keys.shape[1]
    pages = table[sequence, : -(-count // page)].tolist()
    if any(not 0 <= number < keys.shape[0] for number in table[sequence].tolist()):
        raise ValueError(f"the block table names a page that is not there: {pages}")
    empty = keys[:0, :, 0].flatten(0, 1)
    return torch.cat([empty, *(keys[number, :, 0] for number in pages)])[:count]


def top(scores: Tensor, count: int, sparse_mode: int) -> Tensor:
    """int32 [queries, count], largest score first, -1 where a query sees fewer keys."""
    queries, keys = scores.shape
    result = torch.full((queries, count), -1, dtype=torch.int32)
    for row in range(queries):
        seen = keys - queries + row + 1 if sparse_mode == 3 else keys
        order = scores[row, :seen].argsort(descending=True, stable=True)[:count]
        result[row, : order.numel()] = order.int()
    return result


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Top-k over keys of the sum over heads of W x ReLU(Q K')."""
    assert layout_query == "TND"
    parts = []
    for sequence, (start, end) in enumerate(spans(actual_seq_lengths_query, query.shape[0])):
        keys = sequence_keys(key, actual_seq_lengths_key, block_table, layout_key, sequence)
        dots = torch.einsum("qhd,kd->qhk", query[start:end].float(), keys.float()).relu()
        scores = (weights[start:end].float().unsqueeze(-1) * dots).sum(1)
        parts.append(top(scores, sparse_count, sparse_mode))
    return torch.cat(parts).unsqueeze(1), torch.empty(0)


def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_key: Tensor,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> Tensor:
    """As lightning_indexer of (ScaleQ ScaleK') x (Q K'), products of int8 in int32."""
    assert layout_query == "TND"
    assert query_quant_mode == key_quant_mode == 0
    if not (weights * query_dequant_scale).isfinite().all():
        raise ValueError("weights x query scales leave float16")
    parts = []
    for sequence, (start, end) in enumerate(spans(actual_seq_lengths_query, query.shape[0])):
        where = (actual_seq_lengths_key, block_table, layout_key, sequence)
        keys, scale = sequence_keys(key, *where), sequence_keys(key_dequant_scale, *where)
        sums = torch.einsum("qhd,kd->qhk", query[start:end].int(), keys.int()).float()
        factor = query_dequant_scale[start:end].float().unsqueeze(-1) * scale.float()
        scores = (weights[start:end].float().unsqueeze(-1) * (factor * sums).relu()).sum(1)
        parts.append(top(scores, sparse_count, sparse_mode))
    return torch.cat(parts).unsqueeze(1)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, indices: Tensor, scale: float, sparse_mode: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence: (out [queries, heads, value], max and sum of exponents [queries, heads])."""
    queries, heads, _ = query.shape
    out = torch.full((queries, heads, values.shape[1]), torch.nan)
    largest, total = torch.full((queries, heads), 7.0), torch.full((queries, heads), 7.0)
    for row in range(queries):
        invalid = (indices[row] == -1).nonzero()
        count = int(invalid[0]) if invalid.numel() else indices.shape[1]
        if (indices[row, count:] != -1).any():
            raise ValueError("a valid index stands behind an invalid one")
        chosen = indices[row, :count].long()
        if ((chosen < 0) | (chosen >= keys.shape[0])).any():
            raise ValueError("an index outside the sequence")
        if sparse_mode == 3:
            chosen = chosen[chosen <= keys.shape[0] - queries + row]
        if not chosen.numel():
            continue
        logits = (query[row].float() @ keys[chosen].float().T) * scale
        largest[row] = logits.amax(-1)
        exponents = (logits - largest[row].unsqueeze(1)).exp()
        total[row] = exponents.sum(-1)
        out[row] = exponents @ values[chosen].float() / total[row].unsqueeze(1)
    return out, largest, total


def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention over the chosen keys, latent and rotated features apart."""
    assert (layout_query, sparse_block_size, attention_mode) == ("TND", 1, 2)
    parts = []
    for sequence, (start, end) in enumerate(spans(actual_seq_lengths_query, query.shape[0])):
        where = (actual_seq_lengths_kv, block_table, layout_kv, sequence)
        nope, rope = sequence_keys(key, *where), sequence_keys(key_rope, *where)
        both = torch.cat([query[start:end], query_rope[start:end]], -1)
        keys, values = torch.cat([nope, rope], -1), sequence_keys(value, *where)
        parts.append(
            attend(both, keys, values, sparse_indices[start:end, 0], scale_value, sparse_mode)
        )
    out, largest, total = (torch.cat(part) for part in zip(*parts, strict=True))
    if not return_softmax_lse:
        return out.to(query.dtype), torch.empty(0), torch.empty(0)
    return out.to(query.dtype), largest.unsqueeze(0), total.unsqueeze(0)


def kv_quant_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor,
    actual_seq_lengths_kv: Tensor,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    **_: Any,
) -> Tensor:
    """As sparse_flash_attention; a row is int8 codes, rotated bfloat16, a float32 scale a tile."""
    assert (layout_query, sparse_block_size, attention_mode) == ("TND", 1, 2)
    assert (key_quant_mode, value_quant_mode, quant_scale_repo_mode) == (2, 2, 1)
    parts = []
    for sequence, (start, end) in enumerate(spans(actual_seq_lengths_query, query.shape[0])):
        where = (actual_seq_lengths_kv, block_table, layout_kv, sequence)
        rows = sequence_keys(key, *where)
        assert torch.equal(rows, sequence_keys(value, *where))
        width = rows.shape[1] - 2 * rope_head_dim - 4 * 4
        codes, rope, scale = rows.split([width, 2 * rope_head_dim, 16], -1)
        factor = scale.contiguous().view(torch.float32).repeat_interleave(tile_size, -1)
        values = codes.float() * factor
        keys = torch.cat([values, rope.contiguous().view(torch.bfloat16).float()], -1)
        indices = sparse_indices[start:end, 0]
        parts.append(attend(query[start:end], keys, values, indices, scale_value, sparse_mode)[0])
    return torch.cat(parts).to(query.dtype)


_fractal: list[Tensor] = []  # kept, so that no other tensor takes an address


def format_cast(tensor: Tensor, acl_format: int, **_: Any) -> Tensor:
    """The logical values stay where they are; only the device's own order changes."""
    assert acl_format == FRACTAL_NZ
    _fractal.append(tensor.clone(memory_format=torch.contiguous_format))
    return _fractal[-1].view_as(tensor)


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: torch.dtype | int | None = None,
    **_: Any,
) -> list[Tensor]:
    """int8 weights: x w x scale x token scale; int4: ((x - 8) w x scale + bias) x token scale."""
    assert (split_item, group_type, group_list_type, act_type) == (2, 0, 1, 0)
    dtype = DTYPES[output_dtype] if isinstance(output_dtype, int) else output_dtype
    if int(group_list.sum()) != x[0].shape[0]:
        raise ValueError("the groups' rows do not add up to x")
    ends = group_list.cumsum(0).tolist()
    parts = []
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        rows, matrix = x[0][start:end].long(), weight[0][expert]
        if matrix.dtype == torch.int32:
            assert scale is not None
            assert bias is not None
            if all(weight[0].data_ptr() != known.data_ptr() for known in _fractal):
                raise ValueError("int4 weights are not FRACTAL_NZ")
            part = int4_product(rows - 8, matrix, scale[0][expert]) + bias[0][expert]
        else:
            sums = rows @ matrix.long()
            part = sums.int() if scale is None else sums.float() * scale[0][expert].float()
        if per_token_scale is not None:
            part = part * per_token_scale[0][start:end].unsqueeze(1)
        parts.append(part)
    return [torch.cat(parts).to(dtype)]


def int4_product(rows: Tensor, words: Tensor, bits: Tensor) -> Tensor:
    """float32 [rows, out]; a word is eight int4 of a row of [in, out], the first one lowest."""
    shifts = torch.arange(0, 32, 4)
    nibbles = ((words.long().unsqueeze(-1) >> shifts) & 15).flatten(1)  # [in, out]
    codes = torch.where(nibbles > 7, nibbles - 16, nibbles)
    if (bits >> 32).any():
        raise ValueError("a scale is not float32 bits, widened")
    scale = bits.int().view(torch.float32)  # [groups, out]
    groups = scale.shape[0]
    sums = torch.bmm(
        rows.unflatten(1, (groups, -1)).transpose(0, 1), codes.unflatten(0, (groups, -1))
    )
    return (sums.float() * scale.unsqueeze(1)).sum(0)


def dynamic_quant(tensor: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """scale = a row's largest magnitude / 127, y = round(x / scale); zeros give anything."""
    scale = tensor.float().abs().amax(-1) / 127
    codes = (tensor.float() / scale.unsqueeze(-1)).round()
    return torch.where(codes.isnan(), 99.0, codes).to(torch.int8), scale


DTYPES = {3: torch.int32, 5: torch.float16, 15: torch.bfloat16}  # torch's ScalarType
FUNCTIONS = {
    "npu_lightning_indexer": lightning_indexer,
    "npu_quant_lightning_indexer": quant_lightning_indexer,
    "npu_sparse_flash_attention": sparse_flash_attention,
    "npu_kv_quant_sparse_flash_attention": kv_quant_sparse_flash_attention,
    "npu_grouped_matmul": grouped_matmul,
    "npu_dynamic_quant": dynamic_quant,
    "npu_format_cast": format_cast,
}
