"""What breaks sums over tokens: many of them, massive ones, zeros, pads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from calibrate.data import load_windows
from calibrate.gptq import gptq, layer_mean
from calibrate.observe import Statistics, capped
from calibrate.ranges import EXACT, Ranges
from calibrate.rtn import search_scale
from calibrate.states import advance, embed, forward
from glm5q import names, pipeline, quant
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.errors import RecipeError
from glm5q.layer import runnable
from recipes import files
from tests import small
from tests.calibrate import traps
from tests.runs import edit_recipe, small_run

CHUNK, CHUNKS = 8192, 128  # over a million tokens, as many at once as a CPU runs
LENGTH, WINDOWS = 32, 6


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_million_tokens_do_not_drift(device: str) -> None:
    """Moments, an expert's and the layer's, against float64; bfloat16 inputs, a mean far from 0.

    1e-4 is far under what damping adds; on a CPU 2e-5 was found.
    """
    statistics = Statistics({names.DOWN})
    generator = torch.Generator().manual_seed(0)
    x = (3 + torch.randn(CHUNK, 64, generator=generator)).to(device, torch.bfloat16)
    bounds = torch.tensor([0, CHUNK - 3, CHUNK])  # and an expert of three tokens a chunk
    for _ in range(CHUNKS):
        statistics.experts(names.DOWN, x, bounds, x[:, :1], torch.arange(CHUNK))
    statistics.complete()
    parts = (x[:-3].double(), x[-3:].double())
    exact = CHUNKS * torch.stack([part.T @ part for part in parts])
    moments = statistics.of(names.DOWN)
    assert moments.gram is not None
    assert moments.tokens.tolist() == [CHUNKS * (CHUNK - 3), CHUNKS * 3]
    whole = exact.sum(0, keepdim=True) / (CHUNKS * CHUNK)
    found = (
        (moments.gram, exact),
        (moments.square, exact.diagonal(dim1=1, dim2=2)),
        (layer_mean(moments), whole),
    )
    for summed, truth in found:
        assert float(((summed.double() - truth) / truth).abs().max()) < 1e-4


def test_magnitudes_are_counted_past_float32s_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 18 million values a histogram in float32 forgets two: the 99.9th percentile moves."""
    monkeypatch.setattr("calibrate.ranges.SAMPLED_ROWS", 1)
    rows, columns = EXACT // 4096 + 300, 4096
    ranges = Ranges.of_width(columns, torch.device("cpu"))
    ranges.add(torch.full((1, 1), 1.5).expand(rows, columns), torch.ones(1, 1))
    assert float(ranges.histogram.sum()) == rows * columns


# Massive tokens


def with_massive(count: int = 8, tokens: int = 8192) -> tuple[Tensor, Tensor]:
    """Returns (all tokens, the normal ones): `count` in few channels, thirty times the length."""
    x = traps.inputs(tokens, 0)
    loud = torch.zeros(count, traps.COLUMNS)
    loud[:, ::9] = torch.randn(count, 15, generator=torch.Generator().manual_seed(1))
    loud *= 30 * x.norm(dim=1).mean() / loud.norm(dim=1, keepdim=True)
    return torch.cat((loud, x)), x


def gram_of(x: Tensor, cap: bool) -> Tensor:
    statistics = Statistics({names.DOWN}, token_cap=cap)
    bounds = torch.tensor([0, len(x)])
    statistics.experts(names.DOWN, x, bounds, x, torch.arange(len(x)))
    statistics.complete()
    return layer_mean(statistics.of(names.DOWN)).cpu()


def normal_error(gram: Tensor, normal: Tensor) -> float:
    """|output error| on normal tokens of a matrix rounded by GPTQ on a Gram."""
    weight = traps.weights(1, 0.02)
    scale = search_scale(weight, gram.diagonal(dim1=1, dim2=2), traps.SCHEME, traps.PLAN.clip)
    codes = gptq(weight, scale, gram, traps.SCHEME, 0.05, act_order=True).codes
    return float((normal @ (quant.dequantize(codes, scale) - weight)[0].T).norm())


@pytest.mark.parametrize("device", DEVICES)
def test_massive_tokens_do_not_make_the_gram(device: str) -> None:
    """Capped, rounding is nearly as good on normal tokens as if there were no others."""
    x, normal = with_massive()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    grams = (
        gram_of(t.to(device, dtype), cap) for t, cap in ((normal, False), (x, False), (x, True))
    )
    without, open_, bounded = (normal_error(gram, normal) for gram in grams)
    assert open_ > 1.12 * without
    assert bounded < 1.03 * without


@pytest.mark.parametrize("rows", [1, 7, 1500, 8192])
def test_a_row_is_capped_at_twice_the_quantile(rows: int) -> None:
    """The definition in float64, sorted by hand; a row's direction stays."""
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
    x[0] *= 100
    exact = x.double().numpy()
    square = (exact**2).sum(1)
    quantile = np.sort(square)[int(0.999 * (rows - 1))]
    expected = exact * np.sqrt(np.minimum(1, 2 * quantile / square))[:, None]
    np.testing.assert_allclose(capped(x).numpy(), expected, rtol=1e-5, atol=1e-7)


def test_a_cap_of_zero_is_none() -> None:
    """Where hardly a row is not zero, those few still count; and no rows are no error."""
    x = torch.zeros(2000, 4)
    x[7] = 5
    assert torch.equal(capped(x), x)
    assert capped(x[:0]).shape == (0, 4)


def test_the_cap_is_a_step_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name it reaches every Gram; no shipped recipe asks; another type is an error."""
    for name in files.shipped():
        efforts = files.load(name).efforts
        assert not efforts.fast.token_cap
        assert not efforts.best.token_cap
    asked = small_run(tmp_path)
    edit_recipe(asked.recipes[0], lambda raw: raw["efforts"]["fast"].update(token_cap=True))
    made: list[Statistics] = []
    original = Statistics.complete
    monkeypatch.setattr(Statistics, "complete", lambda self: (made.append(self), original(self)))
    pipeline.calibrate(asked)
    assert made
    assert all(statistics.token_cap for statistics in made)
    raw = yaml.safe_load(Path(asked.recipes[0]).read_text())
    raw["efforts"]["fast"]["token_cap"] = 1
    with pytest.raises(RecipeError, match="token_cap"):
        files.parse(yaml.safe_dump(raw), "own.yaml")


# Pads


def unequal(path: Path) -> Path:
    """Documents of 3 to 90 tokens of the small checkpoints' tokenizer, none of them id 5."""
    texts = ["".join(chr(43 + (i * j) % 70) for j in range(3 + 7 * i % 88)) for i in range(1, 60)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Tensor]:
    """A checkpoint whose pad is not its end of sequence, and windows of unequal documents."""
    folder = tmp_path_factory.mktemp("pads")
    raw = small.GLM5 | {"pad_token_id": 5, "num_hidden_layers": 2}
    source = open_checkpoint(small.write_checkpoint(folder / "source", raw))
    file = unequal(folder / "text.jsonl")
    return source, load_windows(file, source.root, 256, LENGTH, WINDOWS, 0).tokens


def test_no_window_holds_a_pad(padded: tuple[Checkpoint, Tensor]) -> None:
    """Documents are packed: every position is text or the end of one, and no two ends in a row."""
    flat = padded[1].flatten()
    assert not bool((flat == 5).any())
    ends = flat == 0
    assert bool(ends.any())
    assert not bool((ends[1:] & ends[:-1]).any())


def test_every_token_counts_once(padded: tuple[Checkpoint, Tensor]) -> None:
    """However the windows are chunked; a routed token once an expert that it was sent to."""
    source, tokens = padded
    config = source.config
    states = embed(source, tokens)
    states = advance(config, 0, runnable(source.layer(0)), states)
    weights = runnable(source.layer(1))
    for at_once in (1, 4, WINDOWS):
        statistics = Statistics({names.DOWN, names.GATE_UP})
        forward(config, weights, replace(states, chunk_tokens=at_once * LENGTH), statistics)
        count = WINDOWS * LENGTH
        assert statistics.of("self_attn.o_proj").tokens.tolist() == [count]
        for path in (names.GATE_UP, names.DOWN):
            assert int(statistics.of(path).tokens.sum()) == count * config.num_experts_per_tok
