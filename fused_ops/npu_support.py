"""What the torch_npu adapters share: is the op there, are its arguments, layouts, the call itself.

The ops are torch_npu's, `torch.ops.npu.*`, whose schemas change between its versions: they are read
when an op is chosen and when it is called. vllm-ascend carries copies of its own under
`torch.ops._C_ascend.*` with other names and defaults; those are not used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fused_ops.npu_calls import WHOLE, broken
from fused_ops.op import UnsupportedOp

FRACTAL_NZ = 29  # ACL_FORMAT_FRACTAL_NZ
NONE = torch.iinfo(torch.int32).max  # sorts -1 behind every position

_SEQUENCES = frozenset(
    {"actual_seq_lengths_query", "block_table", "layout_query", "sparse_mode", "pre_tokens",
     "next_tokens", "query", "key"}
)  # fmt: skip
_INDEXER = _SEQUENCES | {"actual_seq_lengths_key", "layout_key", "sparse_count", "weights"}
_ATTENTION = _SEQUENCES | {
    "actual_seq_lengths_kv", "layout_kv", "attention_mode", "scale_value", "sparse_block_size",
    "sparse_indices", "value",
}  # fmt: skip

# what the adapters pass, by op
ARGUMENTS: dict[str, frozenset[str]] = {
    "npu_lightning_indexer": _INDEXER,
    "npu_quant_lightning_indexer": _INDEXER
    | {"query_dequant_scale", "key_dequant_scale", "query_quant_mode", "key_quant_mode"},
    "npu_sparse_flash_attention": _ATTENTION | {"query_rope", "key_rope", "return_softmax_lse"},
    "npu_kv_quant_sparse_flash_attention": _ATTENTION
    | {"key_quant_mode", "value_quant_mode", "quant_scale_repo_mode", "tile_size", "rope_head_dim"},
    "npu_grouped_matmul": frozenset(
        {"x", "weight", "bias", "scale", "per_token_scale", "group_list", "split_item",
         "group_type", "group_list_type", "act_type", "output_dtype"}
    ),
    "npu_dynamic_quant": frozenset({"input"}),
}  # fmt: skip


def no_npu() -> str | None:
    """Returns why nothing of torch_npu runs here, or None. Imports torch_npu where it is found."""
    if find_spec("torch_npu") is None:
        return "torch_npu is not installed (pip install glm5q[ascend], beside CANN)"
    try:
        import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu does not load ({error}); it needs CANN, see glm5q doctor"
    return None if vars(torch)["npu"].is_available() else "no Ascend NPU here"


def unavailable(op: str) -> str | None:
    """Returns why `op` of torch_npu cannot be called here as the adapters call it, or None."""
    return no_npu() or lacking(op)


def lacking(op: str) -> str | None:
    """Returns what the loaded torch_npu lacks for `op`: the op, or arguments; or None."""
    names = argument_names(op)
    if names is None:
        return f"this torch_npu has no {op} (2.13 does)"
    missing = ARGUMENTS[op] - names
    return f"this torch_npu's {op} takes no {', '.join(sorted(missing))}" if missing else None


def argument_names(op: str) -> frozenset[str] | None:
    """Returns the names `op` takes in the loaded torch_npu, or None if it has no such op."""
    overloads = getattr(torch.ops.npu, op, None)
    if overloads is None:
        return None
    return frozenset(argument.name for argument in overloads.default._schema.arguments)


def call(op: str, **arguments: Any) -> Any:
    """Calls torch.ops.npu.`op`. Raises UnsupportedOp for a constraint broken or a name it lacks."""
    if rule := broken(op, arguments):
        raise UnsupportedOp(f"{op}: {rule.why} ({rule.name})")
    if unknown := arguments.keys() - (argument_names(op) or frozenset()):
        raise UnsupportedOp(lacking(op) or f"{op} takes no {', '.join(sorted(unknown))}")
    return getattr(torch.ops.npu, op)(**arguments)


def fractal(weight: Tensor) -> Tensor:
    """Returns `weight` in FRACTAL_NZ order, of the same shape."""
    # by position: the first argument's name differs between torch_npu's own files
    result: Tensor = torch.ops.npu.npu_format_cast(weight, FRACTAL_NZ)
    return result


def sequences(
    offsets: Tensor,
    key_offsets: Tensor | None,
    page_table: Tensor | None,
    device: torch.device,
    *,
    lengths: str,
    layout: str,
) -> dict[str, Any]:
    """Returns the arguments that bound sequences: TND queries, TND or PA_BSND keys.

    Prefix sums without the leading 0 for TND; pages want each sequence's own number of keys.
    `lengths` and `layout` are the op's names for the keys'.
    """
    keys = offsets if key_offsets is None else key_offsets
    paged = page_table is not None
    bounds = keys.diff() if paged else keys[1:]
    arguments = {
        "actual_seq_lengths_query": offsets[1:].to(device, torch.int32).contiguous(),
        lengths: bounds.to(device, torch.int32).contiguous(),
        "layout_query": "TND",
        layout: "PA_BSND" if paged else "TND",
        "pre_tokens": WHOLE,
        "next_tokens": WHOLE,
    }
    if page_table is not None:  # an unused entry must still name a page
        arguments["block_table"] = page_table.to(device, torch.int32).clamp(min=0).contiguous()
    return arguments


def one_head(cache: Tensor, page_table: Tensor | None) -> Tensor:
    """Returns keys [keys, 1, ...] or [pages, page, 1, ...], contiguous, from ones without heads."""
    return cache.unsqueeze(1 if page_table is None else 2).contiguous()


def ascending(positions: Tensor) -> Tensor:
    """Returns int32 [..., n] in ascending order, -1 after the last."""
    ordered = torch.where(positions < 0, NONE, positions).sort(-1).values
    return torch.where(ordered == NONE, -1, ordered).to(torch.int32)
