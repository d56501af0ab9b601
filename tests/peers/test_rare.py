"""Rare experts: how rare they come out, what else changes, and how rows on them are judged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from calibrate.data import Windows
from glm5q.pipeline.common import embedded_checkpoint
from tests.peers import judge, rare, record, session
from tests.small import GLM5, write_checkpoint

TOKENS = torch.randint(0, 256, (6, 400), generator=torch.Generator().manual_seed(3))
MEAN = TOKENS.numel() * GLM5["num_experts_per_tok"] / GLM5["n_routed_experts"]


def test_rare_experts_are_as_rare_in_transformers(tmp_path: Path) -> None:
    """A quarter of eight experts get a fiftieth of the mean tokens, counted by transformers."""
    before = written(tmp_path / "before")
    folder = tmp_path / "rare"
    shutil.copytree(tmp_path / "before", folder)
    rare.make(folder, TOKENS, 0.25)
    own, counts = counted(tmp_path / "before"), counted(folder)
    chosen = rare.of(folder)
    assert sorted(counts) == sorted(chosen) == [1, 2]
    for number, experts in chosen.items():
        assert len(experts) == 2
        for expert, count in enumerate(counts[number]):
            if expert in experts:
                assert count == pytest.approx(rare.FRACTION * MEAN, rel=0.25)
            elif number == 1:  # the next layer's inputs are others
                assert count >= own[number][expert]
    after = tensors(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{n}.{rare.BIAS}" for n in (1, 2)}
    assert before.keys() == after.keys()


def test_a_damaged_rare_expert_is_seen_where_it_is_met(tmp_path: Path) -> None:
    """One rare expert of the first MoE layer is zeroed: nothing before it is met can differ."""
    source, theirs = tmp_path / "source", tmp_path / "theirs"
    written(source)
    rare.make(source, TOKENS, 0.25)
    shutil.copytree(source, theirs)
    judging = judge.Judge(Windows("made up", TOKENS, 1, 0), source, reuse=False)
    same = judging.row(theirs)
    assert (same["kl_mean"], same["rare"]["kl_mean"], same["rare"]["output_error"]) == (0, 0, 0)
    damage(theirs, f"model.layers.1.mlp.experts.{rare.of(source)[1][0]}.down_proj.weight")
    found = judging.row(theirs)
    assert found["rare"]["output_error"] == pytest.approx(1 / 4)  # one of two in one of two layers
    assert found["rare"]["common_output_error"] == 0
    assert found["rare"]["kl_mean"] > 3 * found["kl_mean"] > 0
    assert found["rare"]["kl_of_rare"]["mean"] == pytest.approx(found["kl_mean"])
    assert found["rare"]["kl_of_common"]["mean"] == 0
    assert found["rare"]["tokens"] == pytest.approx(4 * rare.FRACTION * MEAN, rel=0.25)


def test_a_common_experts_damage_is_no_rare_ones(tmp_path: Path) -> None:
    source, theirs = tmp_path / "source", tmp_path / "theirs"
    written(source)
    rare.make(source, TOKENS, 0.25)
    shutil.copytree(source, theirs)
    common = next(e for e in range(8) if e not in rare.of(source)[2])
    damage(theirs, f"model.layers.2.mlp.experts.{common}.down_proj.weight")
    found = judge.Judge(Windows("made up", TOKENS, 1, 0), source, reuse=False).row(theirs)
    assert found["rare"]["output_error"] == found["rare"]["kl_of_rare"]["mean"] == 0
    assert found["rare"]["kl_of_common"]["mean"] == pytest.approx(found["kl_mean"])
    assert found["rare"]["common_output_error"] == pytest.approx(1 / 12)  # of six in two layers


def test_an_ordinary_checkpoint_has_no_rare_experts(tmp_path: Path) -> None:
    written(tmp_path / "source")
    row = judge.Judge(Windows("made up", TOKENS[:2], 1, 0), tmp_path / "source", reuse=False)
    assert "rare" not in row.row(tmp_path / "source")


def test_another_model_has_its_own_files(tmp_path: Path) -> None:
    """Folders and identities apart; a changed checkpoint under a staged name is refused."""
    written(tmp_path / "sibling")
    windows = Windows("made up", TOKENS, 1, 0)
    models = [
        session.Session(tmp_path / "build", session.Model(folder, share), windows, 0)
        for folder in (embedded_checkpoint(), tmp_path / "sibling")
        for share in (0.0, 0.25)
    ]
    assert len({model.source for model in models}) == 4
    assert len({model.runs for model in models}) == 4
    plain, made_rare = models[2:]
    for model in (plain, made_rare):
        session.stage(model)
    assert rare.of(plain.source) == {}
    assert len(rare.of(made_rare.source)) == 2
    identities = [session.identity(model, {"tool": "a"}) for model in (plain, made_rare)]
    assert identities[0]["source"] != identities[1]["source"]
    damage(tmp_path / "sibling", "model.norm.weight")
    with pytest.raises(click.UsageError, match=r"remove .*source-sibling "):
        session.stage(plain)


def test_a_record_says_how_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["driver", "build/peers", "--output", "a.json", "--rare", "0.25", "--output", "b.json"]
    monkeypatch.setattr("sys.argv", asked)
    assert record.asked_for() == ' PEERS_ARGS="--rare 0.25"'
    monkeypatch.setattr("sys.argv", asked[:4])
    assert record.asked_for() == ""


def written(folder: Path) -> dict[str, Tensor]:
    """A checkpoint as transformers takes it: float32, correction bias and all."""
    write_checkpoint(folder, GLM5, dtype=torch.float32)
    return tensors(folder)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def damage(folder: Path, name: str) -> None:
    for file in folder.glob("*.safetensors"):
        stored = load_file(file)
        if name in stored:
            save_file(stored | {name: torch.zeros_like(stored[name])}, file, {"format": "pt"})
            return
    raise KeyError(name)


def counted(folder: Path) -> dict[int, list[int]]:
    """Tokens each expert is handed in transformers' own forward, by layer."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    counts: dict[int, list[int]] = {}
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):

            def count(_module: Any, given: Any, number: int = number) -> None:
                found = torch.bincount(given[1].flatten(), minlength=GLM5["n_routed_experts"])
                counts[number] = found.tolist()

            layer.mlp.experts.register_forward_pre_hook(count)
    with torch.no_grad():
        model(TOKENS)
    return counts
