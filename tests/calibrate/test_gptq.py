"""LDLQ against the textbook chain, against plain rounding, and on inputs that break factorising."""

import pytest
import torch

from calibrate.descent import descend
from calibrate.gptq import gptq, pooled
from calibrate.observe import Moments
from calibrate.rtn import rtn, search_scale
from glm5q import quant
from glm5q.types import IntScheme
from recipes.schema import Clip

GROUP = IntScheme(4, 64, "bfloat16", None)
CHANNEL = IntScheme(4, None, "bfloat16", None)
CLIP = Clip(steps=16, lowest=0.5)


def problem(
    rows: int = 48, columns: int = 256, tokens: int = 2000, stack: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [stack, rows, columns], mean Gram of correlated inputs with outlier columns."""
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(stack, rows, columns, generator=generator)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(stack, tokens, columns, generator=generator) @ (mix + torch.eye(columns))
    x[:, :, ::37] *= 8
    return weight, x.transpose(1, 2) @ x / tokens


def output_error(
    weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, gram: torch.Tensor
) -> float:
    difference = (quant.dequantize(codes, scale) - weight).double()
    return float(((difference @ gram.double()) * difference).sum())


def textbook(
    weight: torch.Tensor, gram: torch.Tensor, scale: torch.Tensor, damping: float
) -> torch.Tensor:
    """GPTQ as its paper writes it: Cholesky of the inverse, errors spread over what is left."""
    rows, columns = weight.shape
    damped = gram.double() + damping * gram.diagonal().mean().double() * torch.eye(columns)
    inverse = torch.linalg.inv(damped)
    upper = torch.linalg.cholesky(inverse, upper=True)
    work, codes = weight.double().clone(), torch.empty(rows, columns, dtype=torch.int8)
    group = columns // scale.shape[1]
    for column in range(columns):
        step = scale[:, column // group].double()
        code = (work[:, column] / step).round().clamp(-8, 7)
        codes[:, column] = code.to(torch.int8)
        error = (work[:, column] - code * step) / upper[column, column]
        work[:, column + 1 :] -= error.unsqueeze(1) * upper[column, column + 1 :]
    return codes


@pytest.mark.parametrize("scheme", [GROUP, CHANNEL], ids=["group", "channel"])
def test_equals_the_textbook(scheme: IntScheme) -> None:
    weight, gram = problem()
    scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), scheme, CLIP)
    mine = gptq(weight, scale, gram, scheme, 0.05, act_order=False).codes[0]
    theirs = textbook(weight[0], gram[0], scale[0], 0.05)
    assert float((mine != theirs).float().mean()) < 2e-3  # ties of float32 against float64


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scheme", [GROUP, CHANNEL], ids=["group", "channel"])
def test_beats_plain_rounding(scheme: IntScheme, act_order: bool) -> None:
    weight, gram = problem(stack=3)
    scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), scheme, CLIP)
    plain = output_error(weight, rtn(weight, scale, scheme), scale, gram)
    better = gptq(weight, scale, gram, scheme, 0.05, act_order).codes
    assert output_error(weight, better, scale, gram) < 0.8 * plain


def test_act_order_keeps_stored_groups() -> None:
    """Codes come back in stored column order, on the groups of that order."""
    weight, gram = problem()
    diagonal = torch.diag_embed(gram.diagonal(dim1=1, dim2=2))
    scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), GROUP, CLIP)
    codes = gptq(weight, scale, diagonal, GROUP, 0.01, act_order=True).codes
    assert torch.equal(codes, rtn(weight, scale, GROUP))  # no correlation: nothing to feed on


def test_clip_search_beats_full_range_where_inputs_are_uneven() -> None:
    weight, gram = problem()
    square = gram.diagonal(dim1=1, dim2=2)
    searched = search_scale(weight, square, GROUP, CLIP)
    full = quant.round_scale(quant.absmax_scale(weight, GROUP), GROUP)
    errors = [output_error(weight, rtn(weight, s, GROUP), s, gram) for s in (searched, full)]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("case", ["zero", "one token", "duplicated columns", "dead column", "nan"])
def test_degenerate_grams_are_survived(case: str) -> None:
    weight, gram = problem(columns=64)
    if case == "zero":
        gram = torch.zeros_like(gram)
    elif case == "one token":
        x = torch.randn(1, 64)
        gram = (x.T @ x).unsqueeze(0)
    elif case == "duplicated columns":
        gram[:, 1], gram[:, :, 1] = gram[:, 0].clone(), gram[:, :, 0].clone()
        gram[:, 1, 1] = gram[:, 0, 0]
    elif case == "dead column":
        gram[:, 5], gram[:, :, 5] = 0, 0
    else:
        gram[0, 3, 3] = torch.nan
    square = gram.diagonal(dim1=1, dim2=2).nan_to_num()
    scale = search_scale(weight, square, GROUP, CLIP)
    result = gptq(weight, scale, gram, GROUP, 0.05, act_order=True)
    rounded = quant.dequantize(result.codes, scale)
    assert bool(torch.isfinite(rounded).all())
    if case == "dead column":  # unseen is not useless: it must not be zeroed
        assert float(rounded[0, :, 5].abs().max()) > 0
    if case == "nan":
        assert bool(result.damping.isnan().all())
        assert torch.equal(result.codes, rtn(weight, scale, GROUP))


def test_pooling_leans_on_the_layer_where_tokens_are_few() -> None:
    gram = torch.stack([torch.eye(4) * 1000, torch.eye(4) * 2, torch.zeros(4, 4)])
    moments = Moments(gram.diagonal(dim1=1, dim2=2), torch.tensor([1000, 2, 0]), gram)
    mixed, share = pooled(moments, 1.0)
    layer = 1002 / 1002
    assert share.tolist() == pytest.approx([4 / 1004, 4 / 6, 1.0])
    assert float(mixed[2, 0, 0]) == pytest.approx(layer)
    own, none = pooled(moments, 0.0)
    assert none.tolist() == [0, 0, 1]  # without pooling an unseen expert still takes the layer's
    assert float(own[1, 0, 0]) == pytest.approx(1.0)


@pytest.mark.parametrize("scheme", [GROUP, CHANNEL], ids=["group", "channel"])
def test_descent_only_goes_down(scheme: IntScheme) -> None:
    weight, gram = problem(stack=2)
    scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), scheme, CLIP)
    codes = gptq(weight, scale, gram, scheme, 0.05, act_order=True).codes
    errors = [output_error(weight, codes, scale, gram)]
    for _ in range(3):
        codes, scale = descend(weight, codes, scale, gram, scheme, 1)
        errors.append(output_error(weight, codes, scale, gram))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]
    assert torch.equal(quant.round_scale(scale, scheme), scale)
    assert int(codes.min()) >= scheme.code_min
    assert int(codes.max()) <= scheme.code_max


def test_descent_leaves_no_single_better_code() -> None:
    weight, gram = problem(rows=6, columns=32)
    scheme = IntScheme(4, None, "bfloat16", None)
    scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), scheme, CLIP)
    codes = rtn(weight, scale, scheme)
    for _ in range(30):
        codes, scale = descend(weight, codes, scale, gram, scheme, 1)
    best = output_error(weight, codes, scale, gram)
    for row in range(6):
        for column in range(32):
            for change in (-1, 1):
                other = codes.clone()
                other[0, row, column] += change
                if -8 <= int(other[0, row, column]) <= 7:
                    assert output_error(weight, other, scale, gram) >= best * (1 - 1e-4)
