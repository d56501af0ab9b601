"""A setting's KL, cache rows and answers, each against what says it otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM

from calibrate.caches import Caches
from calibrate.effects import Setting, effects
from calibrate.evaluate import evaluate
from calibrate.logits import kl_divergence
from calibrate.needle import answers
from calibrate.selection import query_cost, recall_sizes
from fused_ops.sparse_attention.reference import pack_rows, unpack_rows
from glm5q import tiny
from glm5q.checkpoint import Checkpoint, open_checkpoint

LENGTH = 48


def predicted(folder: Path, tokens: torch.Tensor, topk: int) -> torch.Tensor:
    """transformers' log probabilities, attending to `topk` tokens a query."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, index_topk=topk)
    with torch.no_grad():
        return F.log_softmax(model(tokens).logits, -1)


@pytest.fixture(scope="module")
def source(glm52: Path) -> Checkpoint:
    return open_checkpoint(glm52, 1e-6)  # transformers' eps of the latents' norms


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kv_format", ["fp8_656", "int8_656"])
def test_a_latent_comes_back_as_from_its_656_bytes(kv_format: str) -> None:
    """Against the op's own rows, massive and zero tiles among them."""
    latent = torch.randn(5, 576, generator=torch.Generator().manual_seed(0))
    latent[1, 3], latent[2, :128], latent[3] = 400.0, 0.0, 0.0
    wanted = unpack_rows(pack_rows(latent, kv_format), kv_format)  # type: ignore[arg-type]
    seen = latent.clone()
    grid = "fp8" if kv_format == "fp8_656" else "int8"
    Caches(64, grid).attention(seen, seen, seen, 1.0)  # type: ignore[arg-type]
    assert torch.equal(seen, wanted)
    assert not torch.equal(seen[:, :512], latent[:, :512])


def test_each_cache_rounds_its_own_part_alone() -> None:
    made = [torch.randn(6, 4, 16), torch.randn(6, 16)]
    before = [tensor.clone() for tensor in made]
    gates = offsets = torch.zeros(1)
    Caches(8, latent="fp8").indexer(*made, gates, offsets)
    assert all(torch.equal(a, b) for a, b in zip(made, before, strict=True))
    Caches(8, index="int8").attention(made[0], made[1], offsets, 1.0)
    assert torch.equal(made[1], before[1])
    Caches(8, index="int8").indexer(*made, gates, offsets)
    for tensor, old in zip(made, before, strict=True):
        step = old.abs().amax(-1, keepdim=True) / 127
        assert 0 < float(((tensor - old) / step).abs().max()) <= 0.5 + 1e-4


def test_a_settings_kl_is_what_transformers_says(
    source: Checkpoint, glm52: Path, tokens: torch.Tensor
) -> None:
    own = source.config.index_topk
    settings = {str(k): Setting(topk=k) for k in (4, own, LENGTH)}
    settings |= {"fp8": Setting(latent="fp8"), "int8": Setting(latent="int8")}
    settings |= {"index": Setting(index="fp8")}
    sizes = recall_sizes(own, LENGTH)
    found = effects(source, settings, sizes, tokens)
    plain = predicted(glm52, tokens, own)
    for k in (4, LENGTH):
        wanted = kl_divergence(plain, predicted(glm52, tokens, k)).double().mean(1)
        assert torch.allclose(found.kl[str(k)], wanted, rtol=1e-3)
    assert float(found.kl[str(own)].max()) < 1e-9
    means = {name: float(kl.mean()) for name, kl in found.kl.items()}
    assert means["4"] > means["fp8"] > means["int8"] > 0
    assert means["index"] > 0
    assert torch.equal(found.mass, evaluate(source, source, tokens).indexer.mass)


def test_cost_is_the_sum_of_every_layers_ops(source: Checkpoint) -> None:
    """GLM-5.2's layers that share an indexer score nothing."""
    config = source.config
    found, wider = query_cost(config, 16, 1000), query_cost(config, 17, 1000)
    per_key = 2 * config.num_attention_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    assert wider.flop - found.flop == config.num_hidden_layers * per_key
    scores = 2 * config.index_n_heads * config.index_head_dim * 1000
    full = sum(config.full_indexer[: config.num_hidden_layers])
    assert full < config.num_hidden_layers
    assert found.flop == full * scores + 16 * config.num_hidden_layers * per_key


def test_answers_are_judged_where_they_stand() -> None:
    """Against transformers' logits of the embedded checkpoint, on windows without facts."""
    source = open_checkpoint(tiny.path())
    tokens = torch.randint(0, 4000, (2, 40), generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([[5, 20], [9, 36]])
    model = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32)
    with torch.no_grad():
        logs = F.log_softmax(model(tokens).logits, -1)
    greedy = logs.argmax(-1)
    tokens_told = tokens.clone()
    tokens_told[1, 36:40] = greedy[1, 35:39]  # only its first digit can stay likeliest
    found = answers(source, tokens, starts, 4)
    for window in range(2):
        for question, start in enumerate(starts[window].tolist()):
            span = torch.arange(start, start + 4)
            nll = -logs[window, span - 1].gather(1, tokens[window, span, None]).mean()
            assert float(found.nll[window, question]) == pytest.approx(float(nll), rel=1e-3)
    assert not bool(found.right.any())
    one = answers(source, tokens_told, starts, 1)
    assert one.right.tolist() == [[False, False], [False, True]]
