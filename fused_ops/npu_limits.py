"""What torch_npu's fused ops take on Atlas A2 and A3: the numbers, and what a Limit cannot say.

From the READMEs of CANN's ops-transformer (lightning_indexer, quant_lightning_indexer,
sparse_flash_attention, kv_quant_sparse_flash_attention, grouped_matmul), read 2026-11-30. Ascend
950 differs. npu_calls.py holds every call to the same numbers. Imports no torch.
"""

from __future__ import annotations

from fused_ops.op import Limit, OpRequest

INDEX_HEADS = Limit(1, 64)
INDEX_DIM = Limit(128, 128)
INDEX_COUNTS = (Limit(1, 2048), Limit(3072, 8192, multiple=1024))
QUANT_INDEX_COUNT = Limit(1, 2048)

LATENT_DIM, ROPE_DIM, ROW_BYTES, TILE = 512, 64, 656, 128
QUERY_DIM = Limit(LATENT_DIM + ROPE_DIM, LATENT_DIM + ROPE_DIM)
VALUE_DIM = Limit(LATENT_DIM, LATENT_DIM)
ATTENTION_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # 48 is Ascend 950's
ATTENTION_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)  # keys one index stands for
QUANT_ATTENTION_BLOCKS = (1, 2, 4, 8, 16)

PAGE = Limit(16, 1024, multiple=16)

EXPERTS = Limit(2, 1024)  # a list of counts must not have length 1
INT4_COLUMNS = Limit(256, 18432, multiple=256)
INT4_OUT = Limit(8, multiple=8)
INT4_GROUPS = (0, 256)  # 0: one scale a row
INNER = Limit(1, 65535)  # a matrix's last dimension

NO_LSE_WITH_PAGES = "gives no log-sum-exp with paged keys (return_softmax_lse with PA_BSND)"


def within(limits: tuple[Limit, ...], value: int) -> bool:
    """Whether `value` is inside one of `limits`."""
    return any(limit.refuse("", value) is None for limit in limits)


def lightning_indexer(request: OpRequest) -> str | None:
    """Returns why npu_lightning_indexer cannot run `request`, or None."""
    topk = request.shape.get("topk", 1)
    if not within(INDEX_COUNTS, topk):
        return f"topk {topk} is neither 1 to 2048 nor 3072 to 8192 in steps of 1024"
    return None


def sparse_attention(request: OpRequest) -> str | None:
    """Returns why npu_sparse_flash_attention cannot run `request`, or None."""
    if {"lse", "paged"} <= request.features:
        return NO_LSE_WITH_PAGES
    return attention_heads(request)


def attention_heads(request: OpRequest) -> str | None:
    """Returns why neither sparse attention takes the heads of `request`, or None."""
    heads = request.shape.get("heads", 1)
    return None if heads in ATTENTION_HEADS else f"heads {heads} is no power of two up to 128"


def int4_group(request: OpRequest) -> str | None:
    """Returns why int4 weights cannot have the scales of `request`, or None."""
    group = request.shape.get("group", 0)
    return None if group in INT4_GROUPS else f"group {group} is neither 256 nor 0, a whole row"
