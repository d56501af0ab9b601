"""What breaks rounding: unseen and doubled columns, experts short of tokens, zeros, nan.

Each trap on both routes: the loops, and the batched kernels under Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from calibrate.candidates import Candidates, LayerPlan
from calibrate.methods import choose
from calibrate.observe import HeldOutErrors
from glm5q import names, quant
from glm5q.layer import Codes, Layer
from tests.calibrate import traps
from tests.calibrate.traps import DEAD, EXPERTS, METHODS, SCHEME, TOKENS

SCRIPT = Path(traps.__file__)
STACKS = tuple(traps.stacks())


@dataclass(frozen=True)
class Answer:
    """What a route made of one stack: candidates, and the actions it recorded."""

    stack: traps.Stack
    found: Candidates
    said: tuple[str, ...]

    def rounded(self, method: str, expert: str) -> Tensor:
        return self.found.weight(method)[EXPERTS.index(expert)]

    def error(self, method: str, expert: str, x: Tensor) -> float:
        weight = self.stack.weight[EXPERTS.index(expert)]
        return float((x.double() @ (self.rounded(method, expert) - weight).double().T).norm())


Answers = Callable[[str], Answer]


def of_the_loops(name: str) -> Answer:
    stack = traps.stacks()[name]
    found, plan = traps.solve(stack)
    said = tuple(one.action for one in plan.fallbacks if one.expert is not None)
    return Answer(stack, found, said)


def of_the_kernels(file: Path, name: str) -> Answer:
    held = load_file(file)
    codes = {method: held[f"{name}/{method}/codes"] for method in METHODS}
    scales = {method: held[f"{name}/{method}/scales"] for method in METHODS}
    said = bytes(held[f"{name}/said"].tolist()).decode().splitlines()
    return Answer(traps.stacks()[name], Candidates(SCHEME, codes, scales), tuple(said))


@pytest.fixture(scope="module", params=["loops", "kernels"])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Gives the candidates of a stack by name, from one of the two routes."""
    if request.param == "loops":
        return of_the_loops
    if find_spec("triton") is None:
        pytest.skip("not run: no Triton here")
    file = tmp_path_factory.mktemp("traps") / "answers.safetensors"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(file)],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return lambda name: of_the_kernels(file, name)


@pytest.mark.parametrize("name", STACKS)
def test_every_code_and_scale_can_be_stored(answers: Answers, name: str) -> None:
    found = answers(name).found
    for method in METHODS:
        codes, scales = found.codes[method], found.scales[method]
        assert torch.equal(scales.to(torch.bfloat16).float(), scales), method
        assert bool((scales > 0).all()), method
        assert bool(torch.isfinite(found.weight(method)).all()), method
        assert -8 <= int(codes.min()) <= int(codes.max()) <= 7, method


@pytest.mark.parametrize("name", STACKS)
def test_zero_groups_have_scale_one_and_code_zero(answers: Answers, name: str) -> None:
    """The last row is zero, the one before below every scale that is stored."""
    found = answers(name).found
    for method in METHODS:
        assert bool((found.scales[method][:, -2:] == 1).all()), method
        assert not found.codes[method][:, -2:].any(), method


@pytest.mark.parametrize("name", STACKS)
def test_codes_are_of_the_stored_scale(answers: Answers, name: str) -> None:
    """Nearest on the scale as bfloat16 holds it, computed apart in float64."""
    answer = answers(name)
    steps = answer.found.scales["rtn"].to(torch.bfloat16).double()
    exact = answer.stack.weight.double() / steps
    nearest = exact.clamp(-8, 7)
    assert float((answer.found.codes["rtn"] - nearest).abs().max()) <= 0.5 + 1e-5


def test_unseen_columns_keep_their_rounded_weight(answers: Answers) -> None:
    answer = answers("experts")
    expert = EXPERTS.index("dead columns")
    codes, dead = answer.found.codes, list(DEAD)
    assert torch.equal(codes["gptq"][expert][:, dead], codes["rtn"][expert][:, dead])
    weight = answer.stack.weight[expert][:, dead]
    for method in METHODS:
        rounded = answer.rounded(method, "dead columns")[:, dead]
        assert float((rounded - weight).norm()) < 0.2 * float(weight.norm()), method


@pytest.mark.parametrize("expert", ["dead columns", "duplicated columns"])
def test_singular_grams_are_rounded_as_well_as_others(answers: Answers, expert: str) -> None:
    answer = answers("experts")
    fresh = traps.tokens_of(expert, seed=2)
    plain, *others = (answer.error(method, expert, fresh) for method in METHODS)
    assert max(others) < 0.92 * plain
    assert "plain rounding" not in answer.said


def test_an_expert_without_tokens_is_rounded_for_the_layers(answers: Answers) -> None:
    answer = answers("experts")
    fresh = traps.inputs(TOKENS, 2)
    plain, *others = (answer.error(method, "no token", fresh) for method in METHODS)
    assert max(others) < 0.97 * plain
    assert "100% of its Gram is the layer's" in answer.said


def chosen(answer: Answer, held_out: list[Tensor]) -> Codes:
    """What the held-out choice takes of a stack."""
    candidates = answer.found
    errors = HeldOutErrors(
        {names.DOWN: dict(candidates.to_measure(torch.float32))}, {names.DOWN: None}
    )
    bounds = torch.tensor([0, *(len(x) for x in held_out)]).cumsum(0)
    pairs = zip(held_out, answer.stack.weight, strict=True)
    outputs = torch.cat([x @ weight.T for x, weight in pairs])
    errors.experts(names.DOWN, torch.cat(held_out), bounds, outputs, torch.arange(len(outputs)))
    layer = Layer(1, {}, {names.DOWN: answer.stack.weight})
    plan = LayerPlan(1, {names.DOWN: candidates})
    taken = choose(layer, plan, errors)[0].matrices[names.DOWN]
    assert isinstance(taken, Codes)
    return taken


def test_no_expert_is_worse_than_plain_rounding_on_held_out_tokens(answers: Answers) -> None:
    """Whatever it saw; one token alone makes GPTQ worse than that, or this proves nothing."""
    answer = answers("experts")
    held_out = [traps.inputs(40, 10 + index) for index in range(len(EXPERTS))]
    taken = chosen(answer, held_out)
    rounded = quant.dequantize(taken.codes, taken.scale)
    for index, (expert, x) in enumerate(zip(EXPERTS, held_out, strict=True)):
        difference = (rounded[index] - answer.stack.weight[index]).double()
        error = float((x.double() @ difference.T).norm())
        assert error <= answer.error("rtn", expert, x) * (1 + 1e-5), expert
    starved = EXPERTS.index("one token")
    tried = [answer.error(method, "one token", held_out[starved]) for method in METHODS]
    assert max(tried) > 1.02 * tried[0]


def test_activations_of_zeros_leave_plain_rounding(answers: Answers) -> None:
    """One expert's, beside others; and a whole layer's, with weights whose products underflow."""
    for name, index in (("experts", EXPERTS.index("all zero")), ("zeros", 0)):
        found = answers(name).found
        plain = found.codes["rtn"][index]
        assert int(plain.abs().max()) >= 7
        assert torch.equal(found.codes["gptq"][index], plain), name
        assert float((found.codes["descent"][index] - plain).abs().max()) <= 1, name  # refitted
        weight, rounded = answers(name).stack.weight[index], found.weight("descent")[index]
        assert float((rounded - weight).norm()) < 0.2 * float(weight.norm()), name


def test_a_gram_that_holds_nan_is_plain_rounding_as_recorded(answers: Answers) -> None:
    answer = answers("nan")
    assert answer.said == ("plain rounding",)
    for method in ("gptq", "descent"):
        assert torch.equal(answer.found.codes[method], answer.found.codes["rtn"]), method
        assert torch.equal(answer.found.scales[method], answer.found.scales["rtn"]), method


@pytest.mark.parametrize("pooling", [0.0, 0.25])
def test_few_tokens_lean_on_the_layers(pooling: float) -> None:
    """Pooling is what makes experts of one and five tokens better than plain rounding."""
    stack = traps.stacks()["experts"]
    found, plan = traps.solve(stack, traps.PLAN.model_copy(update={"pooling": pooling}))
    answer = Answer(stack, found, ())
    fresh = traps.inputs(TOKENS, 2)
    for expert in ("one token", "few tokens"):
        plain, better = (answer.error(method, expert, fresh) for method in ("rtn", "gptq"))
        assert (better < 0.9 * plain) == (pooling > 0), expert
    told = {one.expert for one in plan.fallbacks}
    starved = {EXPERTS.index(expert) for expert in ("one token", "few tokens")}
    assert (starved <= told) == (pooling > 0)
