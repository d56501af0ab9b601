"""Short text made more of, a ridge on Grams, and scales of either sign."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from calibrate.descent import descend
from calibrate.gptq import gptq, with_ridge
from calibrate.rtn import rtn, search_scale
from calibrate.top_up import topped_up
from glm5q import quant
from glm5q.errors import RecipeError
from glm5q.formats.quantized import open_any
from glm5q.pipeline import CalibrateOptions, calibrate
from glm5q.types import IntScheme
from recipes import files
from recipes.schema import Clip, TopUp
from tests.small import GLM5, write_checkpoint, write_text

INT4 = IntScheme(4, 32, "bfloat16", None)
SIGNED = Clip(steps=16, lowest=0.5, signed=True)
POSITIVE = Clip(steps=16, lowest=0.5)


def error(weight: Tensor, codes: Tensor, scale: Tensor, gram: Tensor) -> float:
    difference = (quant.dequantize(codes, scale) - weight).double()
    return float(((difference @ gram.double()) * difference).sum())


def skewed(seed: int, rows: int = 24, columns: int = 64) -> tuple[Tensor, Tensor]:
    """A stack of one matrix with a long positive tail, and its Gram."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(1, rows, columns, generator=generator).exp() - 1
    x = torch.randn(256, columns, generator=generator) @ torch.randn(
        columns, columns, generator=generator
    )
    return weight, (x.T @ x / 256).unsqueeze(0)


@pytest.mark.parametrize("seed", range(4))
def test_either_sign_is_never_worse_and_mostly_better(seed: int) -> None:
    weight, gram = skewed(seed)
    square = gram.diagonal(dim1=1, dim2=2)
    alone = torch.diag_embed(square)
    found = {}
    for clip in (POSITIVE, SIGNED):
        scale = search_scale(weight, square, INT4, clip)
        codes = rtn(weight, scale, INT4)
        assert int(codes.min()) >= -8
        assert int(codes.max()) <= 7
        assert torch.equal(quant.round_scale(scale, INT4), scale)
        found[clip.signed] = error(weight, codes, scale, alone), scale
    assert bool((found[True][1] < 0).any())
    assert bool((found[False][1] > 0).all())
    assert found[True][0] < 0.98 * found[False][0]


def test_a_turned_weight_has_the_turned_scale() -> None:
    """What is symmetric: the same codes for -w at -s, whichever tail is longer."""
    weight, gram = skewed(5)
    square = gram.diagonal(dim1=1, dim2=2)
    scale = search_scale(weight, square, INT4, SIGNED)
    turned = search_scale(-weight, square, INT4, SIGNED)
    assert torch.equal(turned, -scale)
    assert torch.equal(rtn(weight, scale, INT4), rtn(-weight, turned, INT4))


@pytest.mark.parametrize("seed", range(3))
def test_descent_from_negative_scales_refits_them(seed: int) -> None:
    weight, gram = skewed(seed)
    scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), INT4, SIGNED)
    codes = gptq(weight, scale, gram, INT4, 0.01, True).codes
    after, refitted = descend(weight, codes, scale, gram, INT4, 2)
    assert torch.equal(refitted.sign(), scale.sign())
    changed = refitted != scale
    assert bool(changed[scale < 0].any())
    assert error(weight, after, refitted, gram) < error(weight, codes, scale, gram)


def test_a_ridge_adds_its_share_of_the_mean_diagonal() -> None:
    _, gram = skewed(0)
    mean = gram.diagonal(dim1=1, dim2=2).mean()
    expected = gram + 0.25 * mean * torch.eye(64)
    torch.testing.assert_close(with_ridge(gram.clone(), 0.25), expected)
    assert torch.equal(with_ridge(gram.clone(), 0.0), gram)


def test_a_ridge_helps_on_text_that_was_not_seen() -> None:
    """Few tokens of a wide input: their own Gram fits them, and only them."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(64, 64, generator=generator)
    few, many = (torch.randn(n, 64, generator=generator) @ mixing for n in (80, 4096))
    weight = torch.randn(1, 64, 64, generator=generator)
    seen, other = ((x.T @ x / len(x)).unsqueeze(0) for x in (few, many))
    found = {}
    for ridge in (0.0, 0.3):
        gram = with_ridge(seen.clone(), ridge)
        scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), INT4, POSITIVE)
        codes = gptq(weight, scale, gram, INT4, 0.01, True).codes
        codes, scale = descend(weight, codes, scale, gram, INT4, 2)
        found[ridge] = error(weight, codes, scale, other)
    assert found[0.3] < found[0.0]


def test_copies_come_between_the_text_and_what_is_held_out() -> None:
    tokens = torch.arange(6 * 100).view(6, 100) % 50
    wanted = TopUp(tokens=1600, exchanged=0.3)
    made = topped_up(tokens, 2, wanted, 50)
    assert made.shape == (4 * 4 + 2, 100)  # 400 tokens, so four times that
    assert torch.equal(made[:4], tokens[:4])
    assert torch.equal(made[-2:], tokens[-2:])
    share = (made[4:-2] != tokens[:4].repeat(3, 1)).float().mean()
    assert 0.25 < float(share) < 0.34
    assert 0 <= int(made.min()) <= int(made.max()) < 50
    assert not torch.equal(made[4:8], made[8:12])
    assert torch.equal(made, topped_up(tokens, 2, wanted, 50))


@pytest.mark.parametrize("wanted", [None, TopUp(tokens=799, exchanged=0.3)])
def test_text_that_is_long_enough_stays(wanted: TopUp | None) -> None:
    tokens = torch.arange(600).view(6, 100)
    assert topped_up(tokens, 2, wanted, 600) is tokens


def recipe(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(files.text("a100"))
    raw["weights"]["routed_expert"] |= {"group_size": 32} | changes
    return raw


def test_signed_is_refused_where_it_is_known_to_break() -> None:
    clip = {"steps": 8, "lowest": 0.5, "signed": True}
    assert files.validated(recipe(clip=clip), "x")
    with pytest.raises(RecipeError, match=r"routed_expert\.clip\.signed: vLLM's Marlin"):
        files.validated(recipe(clip=clip, activation="int8"), "x")
    raw = recipe()
    raw["weights"]["attention"]["clip"] |= {"signed": True}
    with pytest.raises(RecipeError, match=r"attention\.clip\.signed: eight bits"):
        files.validated(raw, "x")


def test_unknown_top_up_key_is_an_error() -> None:
    raw = recipe()
    raw["efforts"]["best"] = {"descent": 1, "guidance": False, "top_up": {"tokens": 8, "share": 1}}
    with pytest.raises(RecipeError, match=r"efforts\.best\.top_up"):
        files.validated(raw, "x")


def test_a_run_with_all_of_it_twice_is_byte_equal_and_says_so(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", GLM5)
    raw = recipe(clip={"steps": 8, "lowest": 0.5, "signed": True}, ridge=0.2)
    steps = {"descent": 1, "guidance": True, "top_up": {"tokens": 1024, "exchanged": 0.5}}
    raw |= {"name": "small", "efforts": {"fast": steps, "best": steps}}
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(raw))
    text = write_text(tmp_path / "text.jsonl", 4000)
    for name in ("one", "two"):
        calibrate(
            CalibrateOptions(
                source, (str(file),), tmp_path / name, data=text, windows=6, sequence_length=64,
                evaluation_windows=1,
            )
        )  # fmt: skip
    one, two = (sorted((tmp_path / n).glob("*.safetensors")) for n in ("one", "two"))
    assert [f.read_bytes() for f in one] == [f.read_bytes() for f in two]
    notes = json.loads((tmp_path / "one" / "report.json").read_text())["notes"]
    assert any("windows with exchanged tokens were added, so no guidance" in n for n in notes)
    layer = open_any(tmp_path / "one").layer(1)
    experts = layer.matrices["mlp.experts.gate_up_proj"]
    assert not isinstance(experts, Tensor)
    assert bool((experts.scale < 0).any())
    assert (int(experts.codes.min()), int(experts.codes.max())) == (-8, 7)
