"""The matrix of select_topk: every row must equal a stable descending sort, bit for bit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fused_ops.op import OpRequest
from fused_ops.testkit import Case, Inputs, Verdict, generator, strided, wrong_form

DISTRIBUTIONS = (
    "gaussian",
    "rounded",
    "narrow",
    "equal",
    "zeros",
    "signed_zeros",
    "masked",
    "all_masked",
)
SHAPES = (
    (3, 1, 64),
    (5, 131, 64),
    (4, 2048, 2048),
    (7, 4099, 2048),
    (3, 9973, 4096),
    (1, 70001, 512),
)


def scores(distribution: str, rows: int, keys: int) -> Tensor:
    """float32 [rows, keys] of one kind of row."""
    source = generator("scores", distribution, rows, keys)
    gaussian = torch.randn((rows, keys), generator=source)
    uniform = torch.rand((rows, keys), generator=source)
    if distribution == "rounded":
        return (gaussian * 64).round() / 64
    if distribution == "narrow":
        return 10 + 1e-4 * gaussian  # about 400 distinct floats
    if distribution == "equal":
        return torch.full((rows, keys), -2.5)
    if distribution == "zeros":
        return torch.where(uniform < 0.99, 0.0, gaussian)
    if distribution == "signed_zeros":  # equal to each other, whatever their bits
        return torch.where(uniform < 0.5, torch.tensor(-0.0), torch.tensor(0.0))
    if distribution == "masked":  # causal: later keys of a row do not exist
        limit = torch.randint(0, keys + 1, (rows, 1), generator=source)
        return gaussian.masked_fill(torch.arange(keys) >= limit, -torch.inf)
    if distribution == "all_masked":
        return torch.full((rows, keys), -torch.inf)
    return gaussian


def expected(values: Tensor, topk: int) -> Tensor:
    """int32 [rows, topk] from a stable sort, one row at a time."""
    result = torch.full((values.shape[0], topk), -1, dtype=torch.int32)
    for row, line in enumerate(values):
        order = torch.sort(line, descending=True, stable=True).indices[:topk]
        kept = order[line[order] > -torch.inf].sort().values
        result[row, : kept.numel()] = kept.int()
    return result


def cases() -> list[Case]:
    return [
        _case(distribution, *shape, noncontiguous=noncontiguous)
        for shape in SHAPES
        for distribution in DISTRIBUTIONS
        for noncontiguous in ((False, True) if distribution == "rounded" else (False,))
    ]


def _case(distribution: str, rows: int, keys: int, topk: int, noncontiguous: bool) -> Case:
    shape = {"rows": rows, "keys": keys, "topk": topk}
    features = frozenset({"noncontiguous"} if noncontiguous else ())
    return Case(
        name=f"{distribution}-{rows}x{keys}-k{topk}{'-strided' if noncontiguous else ''}",
        request=OpRequest("select_topk", "f32", shape, features),
        build=partial(_build, distribution, rows, keys, topk, noncontiguous),
        judge=_judge,
    )


def _build(distribution: str, rows: int, keys: int, topk: int, noncontiguous: bool) -> Inputs:
    values = scores(distribution, rows, keys)
    return Inputs((strided(values) if noncontiguous else values, topk))


def _judge(inputs: Inputs, result: Tensor) -> Verdict:
    values, topk = inputs.args
    truth = expected(values, topk)
    problem = wrong_form(result, truth.shape, torch.int32)
    if problem is None and not torch.equal(result, truth):
        row = int((result != truth).any(1).nonzero()[0])
        missed = set(truth[row].tolist()) - set(result[row].tolist())
        problem = f"row {row} differs from a stable sort, {len(missed)} positions missed"
        if not missed:
            problem = (
                f"row {row}: the right positions in another order; ascending, -1 last, is asked"
            )
    return Verdict(0.0 if problem is None else float("inf"), 0.0, problem)


def timed_case(request: OpRequest) -> Case:
    """Gaussian rows of any size for timing, judged on three of them."""
    shape = request.shape
    return Case(
        name=f"gaussian-{shape['rows']}x{shape['keys']}-k{shape['topk']}",
        request=request,
        build=partial(_build, "gaussian", shape["rows"], shape["keys"], shape["topk"], False),
        judge=_judge_sample,
    )


def _judge_sample(inputs: Inputs, result: Tensor) -> Verdict:
    values, topk = inputs.args
    rows = [0, values.shape[0] // 2, values.shape[0] - 1]
    return _judge(Inputs((values[rows], topk)), result[rows])
