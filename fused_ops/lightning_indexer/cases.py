"""The matrix of lightning_indexer: dtype x shape x ragged x paged x ties x non-contiguous x primes.

Two kinds of values. Small whole numbers make every sum exact whatever its order, so the result must
equal a stable sort of float64 scores bit for bit, with many ties. Gaussian values allow as much
regret (a missed key's score above a chosen one's) as torch's own bfloat16 scores can cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_ops.lightning_indexer.contract import OP
from fused_ops.lightning_indexer.reference import quantize_index
from fused_ops.lightning_indexer.topk_cases import expected
from fused_ops.op import OpRequest
from fused_ops.testkit import (
    Case,
    Inputs,
    Verdict,
    bounds,
    generator,
    matmul,
    paged,
    strided,
    worst,
    wrong_form,
)

PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16}
FLOOR = 2e-6  # float32 sums of 64 heads x 128 products


@dataclass(frozen=True)
class Spec:
    """`tokens` and `keys` a sequence; `values`: gaussian, whole, or dead (every ReLU is 0)."""

    dtype: str
    heads: int
    topk: int
    tokens: tuple[int, ...]
    keys: tuple[int, ...]
    values: str = "gaussian"
    dim: int = 128
    page: int = 0
    noncontiguous: bool = False

    @property
    def name(self) -> str:
        parts = [self.dtype, self.values, f"h{self.heads}d{self.dim}k{self.topk}"]
        parts.append("q" + "_".join(map(str, self.tokens)) + "-k" + "_".join(map(str, self.keys)))
        parts += [f"page{self.page}"] if self.page else []
        parts += ["strided"] if self.noncontiguous else []
        return "-".join(parts)

    @property
    def features(self) -> frozenset[str]:
        found = {"ragged"} if len(self.tokens) > 1 else set()
        found |= {"paged"} if self.page else set()
        found |= {"decode"} if self.tokens != self.keys else set()
        found |= {"noncontiguous"} if self.noncontiguous else set()
        return frozenset(found)


def specs() -> list[Spec]:
    prefill, ragged = ((211,), (211,)), ((1, 0, 131, 67), (1, 0, 131, 67))
    decode, drafts = ((1, 1, 1, 1), (1, 70, 263, 0 + 64)), ((3, 2), (197, 89))
    found = []
    for dtype in ("f32", "bf16", "fp8", "int8"):
        found += [
            Spec(dtype, 32, 64, *prefill),
            Spec(dtype, 32, 64, *prefill, values="whole"),
            Spec(dtype, 8, 64, *ragged, values="whole"),
            Spec(dtype, 13, 64, *ragged, values="dead", noncontiguous=True),
            Spec(dtype, 64, 64, *decode, values="whole"),
            Spec(dtype, 32, 64, *drafts, page=64),
            Spec(dtype, 32, 64, *drafts, values="whole", page=16),
        ]
    found += [
        Spec("bf16", 32, 4096, *prefill, values="whole"),
        Spec("bf16", 16, 1, *ragged, values="whole"),
        Spec("bf16", 8, 4, (9, 2), (9, 2), values="whole"),
        Spec("bf16", 3, 17, *prefill, values="whole", dim=67, noncontiguous=True),
        Spec("bf16", 8, 2048, (7,), (5003,), values="whole"),
        Spec("bf16", 32, 256, (2,), (1009,), noncontiguous=True),
    ]
    return found


def cases() -> list[Case]:
    return [_case(spec) for spec in specs()]


def _case(spec: Spec) -> Case:
    shape = {
        "sequences": len(spec.tokens),
        "tokens": max(spec.tokens),
        "keys": max(spec.keys),
        "heads": spec.heads,
        "dim": spec.dim,
        "topk": spec.topk,
    }
    shape |= {"page": spec.page} if spec.page else {}
    return Case(
        name=spec.name,
        request=OpRequest("lightning_indexer", spec.dtype, shape, spec.features),
        build=partial(build, spec),
        judge=partial(_judge, spec),
    )


def build(spec: Spec) -> Inputs:
    """Inputs of one point, with the unpaged keys kept aside for the truth."""
    source = generator(spec.name)
    query = _values(spec, (sum(spec.tokens), spec.heads, spec.dim), source)
    key = _values(spec, (sum(spec.keys), spec.dim), source)
    if spec.values == "dead":
        query, key = query.abs() + 1, -key.abs() - 1
    weights = torch.randn((sum(spec.tokens), spec.heads), generator=source)
    weights = (weights * 4).round() if spec.values != "gaussian" else weights / 64
    kwargs: dict[str, Any] = {}
    if spec.dtype in PLAIN:
        query, key = query.to(PLAIN[spec.dtype]), key.to(PLAIN[spec.dtype])
    elif spec.values == "gaussian":
        query, kwargs["query_scale"] = quantize_index(query, spec.dtype)
        key, kwargs["key_scale"] = quantize_index(key, spec.dtype)
    else:  # whole numbers as codes, scales powers of two: still exact
        dtype = torch.int8 if spec.dtype == "int8" else torch.float8_e4m3fn
        query, key = query.to(dtype), key.to(dtype)
        exponents = torch.randint(-2, 3, (sum(spec.keys) + 1,), generator=source)
        kwargs["key_scale"] = torch.exp2(exponents[1:].float())
        kwargs["query_scale"] = torch.full(query.shape[:2], float(2 ** int(exponents[0])))
    if spec.tokens != spec.keys:
        kwargs["key_offsets"] = bounds(spec.keys)
    if spec.noncontiguous:
        query, key = strided(query), strided(key)
    if spec.page:
        shuffle = int(torch.randint(1 << 30, (1,), generator=source))
        for name, tensor in (("key", key), ("key_scale", kwargs.get("key_scale"))):
            if tensor is not None:
                cache, kwargs["page_table"] = paged(
                    tensor, spec.keys, spec.page, generator(shuffle)
                )
                kwargs[name] = cache
        key = kwargs.pop("key")
    return Inputs((query, key, weights, bounds(spec.tokens), spec.topk), kwargs)


def _values(spec: Spec, shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    gaussian = torch.randn(shape, generator=source)
    return gaussian if spec.values == "gaussian" else gaussian.round().clamp(-3, 3)


def score_lists(inputs: Inputs, keys: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Scores [tokens, keys] a sequence, -inf after a query; products in `dtype`, rest float64."""
    query, key, weights, offsets, _ = inputs.args
    scale, table = inputs.kwargs.get("key_scale"), inputs.kwargs.get("page_table")
    weights = weights.double() * inputs.kwargs.get("query_scale", torch.ones(())).double()
    starts = bounds(keys).tolist()
    result = []
    for sequence, count in enumerate(keys):
        rows = slice(int(offsets[sequence]), int(offsets[sequence + 1]))
        position = torch.arange(count)
        at: Any = starts[sequence] + position
        if table is not None:
            at = (table[sequence].long()[position // key.shape[1]], position % key.shape[1])
        seen_scale = 1.0 if scale is None else scale[at].double()
        dots = matmul(query[rows], key[at].T, dtype).double().clamp(min=0)  # [tokens, heads, keys]
        scores = torch.einsum("qhk,qh->qk", dots, weights[rows]) * seen_scale
        last = count - scores.shape[0] + torch.arange(scores.shape[0]).unsqueeze(1)
        result.append(scores.masked_fill(position > last, -torch.inf))
    return result


def _judge(spec: Spec, inputs: Inputs, result: Tensor) -> Verdict:
    if problem := wrong_form(result, (sum(spec.tokens), spec.topk), torch.int32):
        return Verdict(float("inf"), 0.0, problem)
    truth = score_lists(inputs, spec.keys, torch.float64)
    parts = result.split(list(spec.tokens))
    if spec.values != "gaussian":
        for scores, part in zip(truth, parts, strict=True):
            if not torch.equal(part, expected(scores, spec.topk)):
                return Verdict(float("inf"), 0.0, "differs from a stable sort of exact scores")
        return Verdict(0.0, 0.0, None)
    plain = score_lists(inputs, spec.keys, PLAIN.get(spec.dtype, torch.bfloat16))
    error = allowed = 0.0
    for scores, rough, part in zip(truth, plain, parts, strict=True):
        for line, rough_line, chosen in zip(scores, rough, part, strict=True):
            if problem := wrong_choice(chosen, line):
                return Verdict(float("inf"), 0.0, problem)
            error = max(error, regret(chosen, line))
            seen = line > -torch.inf
            off = (line[seen] - rough_line[seen]).abs().max() / line[seen].abs().max()
            allowed = max(allowed, 2 * OP.error_multiple[spec.dtype] * float(off) + FLOOR)
    problem = None if error <= allowed else f"regret {error:.3g}, allowed {allowed:.3g}"
    return Verdict(error, allowed, problem)


def wrong_choice(chosen: Tensor, scores: Tensor) -> str | None:
    """Returns what is wrong with the form of one query's choice [topk], or None."""
    real = chosen[chosen >= 0].long()
    wanted = min(chosen.numel(), int((scores > -torch.inf).sum()))
    if real.numel() != wanted or not torch.equal(chosen[:wanted].long(), real):
        return f"{real.numel()} positions chosen before the first -1, expected {wanted}"
    if (real.diff() <= 0).any():
        return "positions are not ascending and distinct"
    if real.numel() and (int(real.max()) >= scores.numel() or (scores[real] == -torch.inf).any()):
        return "a position after the query was chosen"
    return None


def regret(chosen: Tensor, scores: Tensor) -> float:
    """Returns by how much a missed key beats a chosen one, relative to the row's largest score."""
    real = chosen[chosen >= 0].long()
    missed = scores.clone()
    missed[real] = -torch.inf
    if not real.numel() or missed.max() == -torch.inf:
        return 0.0
    size = scores[scores > -torch.inf].abs().max()
    return max(0.0, float((missed.max() - scores[real].min()) / size))


def timed_case(request: OpRequest) -> Case:
    """A case of any size for timing: whole sequences, judged on a few of their queries."""
    shape = request.shape
    count = shape.get("sequences", 1)
    spec = Spec(
        request.dtype,
        shape["heads"],
        shape["topk"],
        (shape["tokens"],) * count,
        (shape["keys"],) * count,
        dim=shape["dim"],
    )
    return Case(spec.name, request, partial(build, spec), partial(_judge_sample, spec))


def _judge_sample(spec: Spec, inputs: Inputs, result: Tensor) -> Verdict:
    """Judges four queries of the last sequence, first to last, each as a decode of its own."""
    query, key, weights, offsets, topk = inputs.args
    start, first_key = int(offsets[-2]), sum(spec.keys[:-1])
    verdicts = []
    for row in sorted({0, spec.tokens[-1] // 3, 2 * spec.tokens[-1] // 3, spec.tokens[-1] - 1}):
        seen = spec.keys[-1] - spec.tokens[-1] + row + 1
        at, keys = slice(start + row, start + row + 1), slice(first_key, first_key + seen)
        kwargs = {"key_offsets": bounds((seen,))}
        for name, part in (("query_scale", at), ("key_scale", keys)):
            if name in inputs.kwargs:
                kwargs[name] = inputs.kwargs[name][part]
        one = Inputs((query[at], key[keys], weights[at], bounds((1,)), topk), kwargs)
        alone = replace(spec, tokens=(1,), keys=(seen,))
        verdicts.append(_judge(alone, one, result[at]))
    return worst(verdicts)
