"""The matrix of sparse_attention: dtype x heads x dims x -1 x all-masked x paged x decode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops.op import OpRequest
from fused_ops.sparse_attention.contract import KV_FORMATS, OP
from fused_ops.sparse_attention.reference import pack_rows, unpack_rows
from fused_ops.testkit import (
    Case,
    Inputs,
    Verdict,
    bounds,
    compare,
    generator,
    matmul,
    paged,
    strided,
    worst,
)

FLOOR = 2e-6  # float32 sums of 2048 products
LSE_FLOOR = 2e-6


@dataclass(frozen=True)
class Spec:
    """`tokens` and `keys` a sequence; `loud` logits let one weight take nearly all.

    Without `lse` the log-sum-exp is not judged and may be None.
    """

    dtype: str
    heads: int
    dim: int
    value_dim: int
    selected: int
    tokens: tuple[int, ...]
    keys: tuple[int, ...]
    page: int = 0
    noncontiguous: bool = False
    loud: bool = False
    lse: bool = True

    @property
    def name(self) -> str:
        parts = [self.dtype, f"h{self.heads}d{self.dim}v{self.value_dim}s{self.selected}"]
        parts.append("q" + "_".join(map(str, self.tokens)) + "-k" + "_".join(map(str, self.keys)))
        parts += [f"page{self.page}"] if self.page else []
        parts += ["strided"] if self.noncontiguous else []
        parts += ["loud"] if self.loud else []
        parts += [] if self.lse else ["output_only"]
        return "-".join(parts)

    @property
    def features(self) -> frozenset[str]:
        found = {"ragged"} if len(self.tokens) > 1 else set()
        found |= {"paged"} if self.page else set()
        found |= {"decode"} if self.tokens != self.keys else set()
        found |= {"noncontiguous"} if self.noncontiguous else set()
        found |= {"lse"} if self.lse else set()
        return frozenset(found)


def specs() -> list[Spec]:
    ragged = (1, 0, 11, 5)
    found = []
    for dtype in KV_FORMATS:
        found += [
            Spec(dtype, 64, 576, 512, 128, (23,), (23,)),
            Spec(dtype, 8, 576, 512, 61, ragged, ragged),
            Spec(dtype, 11, 576, 512, 1021, (1, 1), (701, 37), page=64),
            Spec(dtype, 16, 576, 512, 300, (3,), (509,), page=16, loud=True),
            Spec(dtype, 128, 576, 512, 64, (9,), (101,), noncontiguous=True),
            Spec(dtype, 8, 576, 512, 61, ragged, ragged, noncontiguous=True, lse=False),
            Spec(dtype, 16, 576, 512, 300, (3, 4), (509, 37), page=16, loud=True, lse=False),
        ]
    for dtype in ("f32", "bf16"):
        found += [
            Spec(dtype, 8, 512, 512, 97, (13,), (13,)),  # no rotated part
            Spec(dtype, 3, 67, 53, 49, (13, 4), (29, 4), noncontiguous=True),
            Spec(dtype, 1, 16, 8, 1, (10,), (10,)),
        ]
    return [*found, Spec("bf16", 64, 576, 512, 2048, (1,), (3001,))]


def cases() -> list[Case]:
    return [_case(spec) for spec in specs()]


def _case(spec: Spec) -> Case:
    shape = {
        "tokens": sum(spec.tokens),
        "keys": sum(spec.keys),
        "heads": spec.heads,
        "dim": spec.dim,
        "value_dim": spec.value_dim,
        "selected": spec.selected,
    }
    shape |= {"page": spec.page} if spec.page else {}
    return Case(
        name=spec.name,
        request=OpRequest("sparse_attention", spec.dtype, shape, spec.features),
        build=partial(build, spec),
        judge=partial(_judge, spec),
    )


def build(spec: Spec) -> Inputs:
    source = generator(spec.name)
    dtype = torch.float32 if spec.dtype == "f32" else torch.bfloat16
    query = torch.randn((sum(spec.tokens), spec.heads, spec.dim), generator=source)
    latent = torch.randn((sum(spec.keys), spec.dim), generator=source)
    latent[:, : spec.value_dim] *= 1 + torch.rand((spec.value_dim,), generator=source) * 3
    query, latent = (query * (20 if spec.loud else 1)).to(dtype), latent.to(dtype)
    kwargs: dict[str, Any] = {}
    if KV_FORMATS[spec.dtype] != "plain":
        kwargs["kv_format"] = KV_FORMATS[spec.dtype]
        latent = pack_rows(latent, KV_FORMATS[spec.dtype])
    if spec.tokens != spec.keys:
        kwargs["key_offsets"] = bounds(spec.keys)
    indices = _indices(spec, source)
    if spec.noncontiguous:
        query, latent, indices = strided(query), strided(latent), strided(indices)
    if spec.page:
        latent, kwargs["page_table"] = paged(latent, spec.keys, spec.page, source)
    scale = 1 / 16 if spec.dim == 576 else spec.dim**-0.5
    return Inputs((query, latent, indices, bounds(spec.tokens), scale, spec.value_dim), kwargs)


def _indices(spec: Spec, source: torch.Generator) -> Tensor:
    """Random positions with repeats; some -1, some far out of range, some rows all -1."""
    parts = []
    for tokens, keys in zip(spec.tokens, spec.keys, strict=True):
        chosen = torch.randint(0, max(keys, 1), (tokens, spec.selected), generator=source)
        kind = torch.rand(chosen.shape, generator=source)
        chosen[kind < 0.15] = -1
        chosen[kind > 0.98] = keys
        chosen[kind > 0.99] = 2**31 - 1
        chosen[kind > 0.995] = -(2**31)
        if tokens > 2:
            chosen[1] = -1
            chosen[2, 1:] = -1
        parts.append(chosen)
    return torch.cat(parts).to(torch.int32)


def attend(inputs: Inputs, keys: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One query at a time: products and weights in `dtype`, softmax in float32 or wider."""
    query, latent, indices, offsets, scale, value_dim = inputs.args
    kv_format, table = inputs.kwargs.get("kv_format", "plain"), inputs.kwargs.get("page_table")
    soft = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.zeros((*query.shape[:2], value_dim), dtype=dtype)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=soft)
    starts = bounds(keys).tolist()
    for sequence, count in enumerate(keys):
        for token in range(int(offsets[sequence]), int(offsets[sequence + 1])):
            chosen = indices[token].long()
            chosen = chosen[(chosen >= 0) & (chosen < count)]
            if not chosen.numel():
                continue
            at: Any = starts[sequence] + chosen
            if table is not None:
                pages = table[sequence].long()[chosen // latent.shape[1]]
                at = (pages, chosen % latent.shape[1])
            rows = unpack_rows(latent[at], kv_format)
            logits = matmul(query[token], rows.T, dtype).to(soft) * scale
            lse[token] = logits.logsumexp(-1)
            out[token] = matmul(logits.softmax(-1), rows[:, :value_dim], dtype)
    return out, lse


def _judge(spec: Spec, inputs: Inputs, result: tuple[Tensor, Any]) -> Verdict:
    if not isinstance(result, tuple) or len(result) != 2:
        return Verdict(float("inf"), 0.0, "did not return (output, log-sum-exp)")
    dtype = inputs.args[0].dtype
    truth, plain = attend(inputs, spec.keys, torch.float64), attend(inputs, spec.keys, dtype)
    multiple = OP.error_multiple[spec.dtype]
    verdicts = [compare(result[0], truth[0], plain[0], dtype, multiple, FLOOR)]
    if spec.lse:
        verdicts.append(compare(result[1], truth[1], plain[1], torch.float32, multiple, LSE_FLOOR))
    return worst(verdicts)


def timed_case(request: OpRequest) -> Case:
    """Distinct random positions of one cache, any size, for timing; judged on a few tokens."""
    shape = request.shape
    spec = Spec(
        request.dtype,
        shape["heads"],
        shape["dim"],
        shape["value_dim"],
        shape["selected"],
        (shape["tokens"],),
        (shape["keys"],),
    )
    return Case(spec.name, request, partial(_build_timed, spec), partial(_judge_sample, spec))


def _build_timed(spec: Spec) -> Inputs:
    inputs = build(spec)
    source = generator("timed", spec.name)
    lists = [torch.randperm(spec.keys[0], generator=source) for _ in range(spec.tokens[0])]
    indices = torch.stack([order[: spec.selected].sort().values for order in lists]).int()
    return Inputs((*inputs.args[:2], indices, *inputs.args[3:]), inputs.kwargs)


def _judge_sample(spec: Spec, inputs: Inputs, result: tuple[Tensor, Any]) -> Verdict:
    query, latent, indices, _, *rest = inputs.args
    rows = sorted({0, spec.tokens[0] // 2, spec.tokens[0] - 1})
    kwargs = {"key_offsets": bounds(spec.keys)} | inputs.kwargs
    few = Inputs((query[rows], latent, indices[rows], bounds((len(rows),)), *rest), kwargs)
    output, lse = result
    alone = replace(spec, tokens=(len(rows),), lse=lse is not None)
    return _judge(alone, few, (output[rows], None if lse is None else lse[rows]))
