"""Index scores and the top-k they select, for training: Triton on a GPU, plain torch elsewhere."""
# ruff: noqa: N803
# mypy: disable-error-code="import-not-found,untyped-decorator,no-untyped-def,no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def kl_scores(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    """q [B, M, heads, dim], k [B, T, dim], gate [B, M, heads] -> scores [B, M, T]."""
    dots = torch.matmul(q.flatten(1, 2), k.transpose(1, 2)).unflatten(1, q.shape[1:3])
    return (dots.relu() * gate[..., None]).sum(2)


if triton is not None:

    @triton.jit
    def _score_kernel(
        q,
        k,
        gate,
        out,
        length,
        HEADS: tl.constexpr,
        DIM: tl.constexpr,
        ROWS: tl.constexpr,
        COLS: tl.constexpr,
        EXACT: tl.constexpr,
    ):
        row0, col0 = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
        batch = tl.program_id(2).to(tl.int64)
        if col0 < row0 + ROWS:
            row, col, d = row0 + tl.arange(0, ROWS), col0 + tl.arange(0, COLS), tl.arange(0, DIM)
            keys = tl.load(k + (batch * length + col[None]) * DIM + d[:, None])
            total = tl.zeros([ROWS, COLS], tl.float32)
            for head in range(HEADS):
                at = (batch * length + row) * HEADS + head
                query = tl.load(q + at[:, None] * DIM + d[None])
                if EXACT:
                    dot = tl.dot(query, keys, input_precision="ieee")
                else:
                    dot = tl.dot(query, keys, input_precision="tf32")
                total += tl.maximum(dot, 0.0) * tl.load(gate + at)[:, None]
            tl.store(out + (batch * length + row[:, None]) * length + col[None], total)

    @triton.jit
    def _select_kernel(scores, bias, length, TOPK: tl.constexpr, LENGTH: tl.constexpr):
        row = tl.program_id(0)
        base = (tl.program_id(1).to(tl.int64) * length + row) * length
        col = tl.arange(0, LENGTH)
        seen = col <= row
        score = tl.load(scores + base + col, mask=seen, other=float("-inf"))
        bits = score.to(tl.int32, bitcast=True)
        rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        least = tl.full([], -2147483648, tl.int32)
        if row >= TOPK:
            positive = tl.sum((rank >= 0).to(tl.int32), 0) >= TOPK
            least = tl.where(positive, 0, least)
            for step in range(31):
                trial = least + (1 << (30 - step))
                enough = tl.sum((rank >= trial).to(tl.int32), 0) >= TOPK
                least = tl.where(enough, trial, least)
        kept = seen & (rank >= least)
        tl.store(bias + base + col, tl.where(kept, 0.0, float("-inf")))


@torch.library.custom_op("glm5q_tiny::index_scores", mutates_args=())
def index_scores(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    """q [B, T, heads, dim], k [B, T, dim], gate [B, T, heads] -> scores [B, T, T].

    Entries after the query are undefined.
    """
    batch, length, heads, dim = q.shape
    if not q.is_cuda:
        out = torch.zeros(batch, length, length)
        for i in range(0, length, 64):
            rows, seen = slice(i, i + 64), slice(0, i + 64)
            dots = torch.matmul(q[:, rows].flatten(1, 2), k[:, seen].transpose(1, 2)).relu_()
            dots = dots.unflatten(1, (-1, heads))
            out[:, rows, seen] = torch.matmul(gate[:, rows, None], dots)[:, :, 0]
        return out
    q, k, gate = q.contiguous(), k.contiguous(), gate.contiguous()
    out = torch.empty(batch, length, length, device=q.device)
    exact = torch.get_float32_matmul_precision() == "highest"
    grid = (length // 64, length // 128, batch)
    _score_kernel[grid](q, k, gate, out, length, heads, dim, 64, 128, exact, num_warps=4)
    return out


@index_scores.register_fake
def _(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    del k, gate
    return q.new_empty(q.shape[0], q.shape[1], q.shape[1])


@torch.library.custom_op("glm5q_tiny::select_bias", mutates_args=())
def select_bias(scores: Tensor, topk: int, half: bool) -> Tensor:
    """Scores [B, T, T] -> 0 where selected and -inf elsewhere, bfloat16 if `half`."""
    batch, length, _ = scores.shape
    kind = torch.bfloat16 if half else torch.float32
    if not scores.is_cuda:
        at = torch.arange(length, device=scores.device)
        masked = scores.masked_fill(at > at[:, None], -torch.inf)
        least = masked.topk(min(topk, length), -1).values[..., -1:]
        kept = (masked >= least) & (at <= at[:, None])
        return torch.where(kept, 0.0, -torch.inf).to(kind)
    bias = torch.empty(batch, length, length, device=scores.device, dtype=kind)
    _select_kernel[(length, batch)](scores, bias, length, topk, length, num_warps=8)
    return bias


@select_bias.register_fake
def _(scores: Tensor, topk: int, half: bool) -> Tensor:
    del topk
    return scores.new_empty(scores.shape, dtype=torch.bfloat16 if half else torch.float32)
