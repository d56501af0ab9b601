"""Candidates and the choice between them: each on its own scale, each entry its better one."""

from __future__ import annotations

import torch

from calibrate.candidates import Candidates, LayerPlan, find_candidates
from calibrate.methods import choose
from calibrate.observe import HeldOutErrors, Moments
from glm5q import names, quant
from glm5q.layer import Codes, Layer
from glm5q.types import IntScheme
from recipes.schema import Gptq

SCHEME = IntScheme(4, 32, "bfloat16", None)
PLAN = Gptq.model_validate(
    {
        "method": "gptq", "bits": 4, "group_size": 32, "scale_dtype": "bfloat16",
        "activation": None, "clip": {"steps": 8, "lowest": 0.6}, "damping": 0.05,
        "act_order": True, "pooling": 0.0,
    }
)  # fmt: skip


def problem() -> tuple[torch.Tensor, Moments]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 24, 96, generator=generator)
    mix = torch.eye(96) + torch.randn(96, 96, generator=generator) / 10
    x = torch.randn(3, 500, 96, generator=generator) @ mix
    gram = x.transpose(1, 2) @ x
    return weight, Moments(gram.diagonal(dim1=1, dim2=2), torch.full((3,), 500), gram)


def test_candidates_get_better_each_on_its_own_scale() -> None:
    weight, moments = problem()
    plain, descended = (
        find_candidates(1, names.GATE_UP, weight, moments, PLAN, LayerPlan(descent=rounds))
        for rounds in (0, 3)
    )
    assert (list(plain.codes), list(descended.codes)) == (["rtn", "gptq"], ["rtn", "descent"])
    assert moments.gram is not None
    errors = []
    for found, method in ((plain, "rtn"), (plain, "gptq"), (descended, "descent")):
        difference = found.weight(method) - weight
        errors.append(float(((difference @ moments.gram) * difference).sum()))
    assert errors[1] < 0.9 * errors[0]
    assert errors[2] < 0.97 * errors[1]
    assert not torch.equal(descended.scales["descent"], plain.scales["gptq"])


def test_each_entry_takes_its_better_candidate() -> None:
    codes = {m: torch.full((3, 4, 32), c, dtype=torch.int8) for m, c in (("rtn", 1), ("gptq", 2))}
    scales = {m: torch.full((3, 4, 1), s) for m, s in (("rtn", 0.5), ("gptq", 0.25))}
    plan = LayerPlan(0, {names.DOWN: Candidates(SCHEME, codes, scales)})
    errors = HeldOutErrors({}, {})
    # Entry 0 does better plain, 1 with GPTQ, 2 saw no token and follows the sum: GPTQ.
    errors.squared[names.DOWN, "rtn"] = torch.tensor([1.0, 9.0, 0.0], dtype=torch.float64)
    errors.squared[names.DOWN, "gptq"] = torch.tensor([2.0, 3.0, 0.0], dtype=torch.float64)
    errors.reference[names.DOWN] = torch.tensor([10.0, 10.0, 0.0], dtype=torch.float64)
    layer, methods = choose(Layer(1, {}, {names.DOWN: torch.zeros(3, 4, 32)}), plan, errors)
    assert methods[names.DOWN] == ["rtn", "gptq", "gptq"]
    taken = layer.matrices[names.DOWN]
    assert isinstance(taken, Codes)
    assert taken.codes[:, 0, 0].tolist() == [1, 2, 2]
    assert taken.scale[:, 0, 0].tolist() == [0.5, 0.25, 0.25]
    assert quant.dequantize(taken.codes, taken.scale)[0, 0, 0] == 0.5
