"""The forward against transformers, layer by layer, in float32 on random small configs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate import block
from calibrate.block import rms_norm
from calibrate.states import advance, embed
from fused_ops.chunk import CPU_ELEMENTS
from glm5q import names
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.layer import runnable
from tests import small

LENGTH = 100  # over six times index_topk
CONFIGS: dict[str, dict[str, Any]] = {
    "glm-5": small.GLM5,
    "glm-5.2, shared indexers": small.GLM52,
    "without mtp": small.NO_MTP,
    "half of the tokens chosen, odd sizes": small.GLM5
    | {"index_topk": 50, "qk_nope_head_dim": 20, "v_head_dim": 28, "num_experts_per_tok": 3},
}


def forward_layers(checkpoint: Checkpoint, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Hidden states after the embedding and every layer, [windows, length, hidden]."""
    states = embed(checkpoint, tokens)
    hidden = [states.hidden]
    for number in range(checkpoint.config.num_hidden_layers):
        weights = runnable(checkpoint.layer(number))
        states = advance(checkpoint.config, number, weights, states)
        hidden.append(states.hidden)
    return hidden


@pytest.mark.parametrize("raw", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_layer_equals_transformers(tmp_path: Path, raw: dict[str, Any]) -> None:
    root = small.write_checkpoint(tmp_path, raw, dtype=torch.float32)
    checkpoint = open_checkpoint(root, latent_norm_eps=1e-6)
    tokens = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(
        root, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)
    mine = forward_layers(checkpoint, tokens)
    norm = checkpoint.top_tensor(names.FINAL_NORM)
    mine[-1] = rms_norm(mine[-1], norm, checkpoint.config.rms_norm_eps)
    for number, (ours, theirs) in enumerate(zip(mine, output.hidden_states, strict=True)):
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        assert difference < 1e-5, f"after layer {number - 1}: {difference:.2e}"
    logits = mine[-1] @ checkpoint.top_tensor(names.LM_HEAD).T
    assert float((logits - output.logits).abs().max()) < 1e-5 * float(output.logits.abs().max())


def test_attending_all_keys_at_once_is_attending_each_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's way where the indexer chooses every key; it then does not score them."""
    raw = small.GLM5 | {"index_topk": LENGTH}
    checkpoint = open_checkpoint(small.write_checkpoint(tmp_path, raw, dtype=torch.float32))
    tokens = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    chosen = forward_layers(checkpoint, tokens)
    monkeypatch.setattr(block._Run, "_attends_all", lambda *_: LENGTH)
    monkeypatch.setattr(block, "lightning_indexer", None)
    for ours, theirs in zip(forward_layers(checkpoint, tokens), chosen, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_latent_norm_eps_is_an_option(tmp_path: Path) -> None:
    root = small.write_checkpoint(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(0))
    with_config = forward_layers(open_checkpoint(root), tokens)[-1]
    with_option = forward_layers(open_checkpoint(root, latent_norm_eps=1e-6), tokens)[-1]
    difference = float((with_config - with_option).abs().max())
    assert 1e-7 < difference < 1e-2


def test_chunked_equals_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries run a few at a time, and one window a chunk, give what one pass gives."""
    checkpoint = open_checkpoint(small.write_checkpoint(tmp_path, small.GLM52, dtype=torch.float32))
    tokens = torch.randint(0, 256, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = forward_layers(checkpoint, tokens)[-1]
    monkeypatch.setattr("calibrate.states.CHUNK_TOKENS", LENGTH)
    monkeypatch.setattr("fused_ops.chunk.CPU_ELEMENTS", 32 * LENGTH * 7)  # seven queries
    chunked = forward_layers(checkpoint, tokens)[-1]
    assert float((whole - chunked).abs().max()) < 1e-5


def test_a_broken_piece_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: half-split rotary, as old transformers had, is far outside."""
    checkpoint = open_checkpoint(small.write_checkpoint(tmp_path, dtype=torch.float32))
    tokens = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    right = forward_layers(checkpoint, tokens)[-1]
    from calibrate import block

    original = block.rotate
    monkeypatch.setattr(block, "rotate", lambda x, angles, _pairs=True: original(x, angles, False))
    wrong = forward_layers(checkpoint, tokens)[-1]
    assert float((right - wrong).abs().max()) > 1e-2


def test_memory_grows_with_the_sequence_not_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and gathered keys are bounded by constants, whatever the length."""
    from fused_ops.lightning_indexer import reference as indexer

    heads, dim, length = 32, 16, 6000
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, heads, dim, generator=generator)
    key = torch.randn(length, dim, generator=generator)
    gates = torch.randn(length, heads, generator=generator)
    largest = 0
    original = indexer.index_scores

    def watched(q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, q.shape[0] * q.shape[1] * k.shape[0])
        return original(q, k, *rest)

    monkeypatch.setattr(indexer, "index_scores", watched)
    indexer.lightning_indexer(query, key, gates, torch.tensor([0, length]), 64)
    assert 0 < largest <= CPU_ELEMENTS
