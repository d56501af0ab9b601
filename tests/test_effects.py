"""`glm5q effects` on the embedded checkpoint: what it measures, recommends and refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from calibrate.data import load_windows
from calibrate.needle import answers
from glm5q import tiny
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.config import ModelConfig
from glm5q.errors import DataError, UserError
from glm5q.layer import Layer
from glm5q.pipeline import EffectsOptions, measure_effects
from glm5q.pipeline.effects import TOPK_KL, _planted, _tokenizer, recommend
from glm5q.tiny.recall import DIGITS, Planter
from reports.effects import Effects, TopkEffect


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Effects:
    record = tmp_path_factory.mktemp("effects") / "effects.json"
    asked = EffectsOptions(
        tiny.path(), tiny.path(), output=record, windows=2, sequence_length=264,
        needle_windows=1, needle_length=512,
    )  # fmt: skip
    run, page = measure_effects(asked)
    assert page is not None
    assert 'id="needles"' in page.read_text()
    assert run.effects is not None
    return run.effects


def test_a_smaller_k_costs_more_and_its_own_nothing(found: Effects) -> None:
    by_k = {point.k: point for point in found.sweep}
    assert by_k[256].kl < 1e-9
    assert by_k[13].kl > by_k[53].kl > by_k[256].kl
    assert by_k[13].attention_mass < by_k[53].attention_mass < by_k[256].attention_mass < 1
    assert min(by_k) == 13  # 5 % of the window
    assert max(by_k) == 256
    assert found.recommended_k in by_k


def test_the_latent_loses_more_in_fp8_than_in_int8(found: Effects) -> None:
    """Three bits of mantissa against seven bits below a tile's largest."""
    kl = {(row.part, row.grid): row.kl for row in found.caches}
    assert kl["latent", "fp8"] > 2 * kl["latent", "int8"] > 0
    assert kl["indexer", "fp8"] > 0
    assert {row.nbytes < row.plain_nbytes for row in found.caches} == {True}


def test_the_source_finds_what_it_was_told(found: Effects) -> None:
    """It was trained to: with the most recent keys alone it finds nothing (card.json)."""
    assert [row.length for row in found.needles] == [512] * 3
    assert sorted(row.distance for row in found.needles) == [128, 256, 384]
    for row in found.needles:
        assert row.found_source == row.found_quantized == 1  # the source twice
        assert row.nll_source == pytest.approx(row.nll_quantized)
        assert row.nll_source < 0.01


def test_an_answer_is_the_fact_told_so_many_tokens_before() -> None:
    folder = tiny.path()
    text = load_windows(folder / "heldout.jsonl", folder, 4032, 2 * 1024, 2, 0).tokens
    tokens, starts = _planted(Planter(_tokenizer(folder)), text, 300, 0)
    assert tokens.shape == (2, 1024)
    for window in range(2):
        for start in starts[window].tolist():
            answer = tokens[window, start : start + DIGITS]
            assert torch.equal(answer, tokens[window, start - 300 : start - 300 + DIGITS])


def test_with_an_indexer_turned_round_it_finds_nothing() -> None:
    """Eight keys a query are enough, if they are the right ones."""
    folder = tiny.path()
    text = load_windows(folder / "heldout.jsonl", folder, 4032, 2 * 512, 1, 0).tokens
    tokens, starts = _planted(Planter(_tokenizer(folder)), text, 384, 0)
    found = answers(Turned(open_checkpoint(folder)), tokens, starts, DIGITS)
    assert not bool(found.right.any())
    assert float(found.nll.min()) > 0.5


@dataclass(frozen=True)
class Turned:
    """The embedded checkpoint attending to the 8 tokens that its indexer likes least."""

    source: Checkpoint

    @property
    def config(self) -> ModelConfig:
        return replace(self.source.config, index_topk=8)

    def layer(self, number: int) -> Layer:
        layer, path = self.source.layer(number), "self_attn.indexer.weights_proj"
        weight = layer.matrices[path]
        assert isinstance(weight, torch.Tensor)
        return layer.with_matrices({path: -weight})

    def top_tensor(self, name: str) -> torch.Tensor:
        return self.source.top_tensor(name)


def point(k: int, kl: float, error: float) -> TopkEffect:
    return TopkEffect(
        k=k, share=0.1, attention_mass=0.9, kl=kl, kl_error=error, flop=1.0, nbytes=1.0
    )


def test_the_rule_counts_two_standard_errors() -> None:
    sweep = [point(64, TOPK_KL / 2, TOPK_KL / 3), point(128, TOPK_KL / 2, TOPK_KL / 5)]
    assert recommend([*sweep, point(256, 0.0, 0.0)], 256) == 128
    assert recommend([point(64, 1.0, 0.0)], 256) == 256


def test_what_cannot_be_is_refused(glm5: Path, texts: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="no text"):
        measure_effects(EffectsOptions(glm5))
    few = EffectsOptions(
        glm5, data=texts[1], windows=2, sequence_length=32, only=("needle",), needle_length=64
    )
    with pytest.raises(UserError, match="too few whole words"):
        measure_effects(few)
    with pytest.raises(UserError, match="2 x index_topk 256 at least"):
        measure_effects(EffectsOptions(tiny.path(), only=("needle",), needle_length=500))
    with pytest.raises(UserError, match="max_position_embeddings"):
        measure_effects(EffectsOptions(tiny.path(), sequence_length=5000))
