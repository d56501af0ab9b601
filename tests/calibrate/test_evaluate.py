"""Every number evaluate gives, against the same number worked out plainly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate import selection
from calibrate.block import Observer, decoder_layer, mtp_input, rms_norm
from calibrate.evaluate import bootstrap_interval, evaluate
from calibrate.observe import HeldOutErrors
from calibrate.states import embed, forward
from fused_ops.lightning_indexer.reference import index_scores
from glm5q import names, quant
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.config import ModelConfig
from glm5q.layer import Codes, Layer, runnable
from glm5q.types import IntScheme, Role

LENGTH = 48


@dataclass(frozen=True)
class Scaled:
    """A checkpoint with one role's matrices a little larger, or with int8 activations before it."""

    source: Checkpoint
    role: Role
    factor: float = 1.0
    coded: bool = False

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    def top_tensor(self, name: str) -> torch.Tensor:
        return self.source.top_tensor(name)

    def layer(self, number: int) -> Layer:
        layer = self.source.layer(number)
        changed: dict[str, torch.Tensor | Codes] = {}
        for module in names.layer_modules(self.config, number):
            if module.role is self.role:
                weight = layer.matrices[module.path]
                assert isinstance(weight, torch.Tensor)
                changed[module.path] = coded(weight) if self.coded else weight.float() * self.factor
        return layer.with_matrices(changed)


def coded(weight: torch.Tensor) -> Codes:
    scheme = IntScheme(8, None, "float32", "int8")
    scale = quant.round_scale(quant.absmax_scale(weight, scheme), scheme)
    return Codes(quant.quantize(weight, scale, scheme), scale, scheme)


@pytest.fixture(scope="module")
def source(glm5: Path) -> Checkpoint:
    return open_checkpoint(glm5)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (3, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("role", [Role.ROUTED_EXPERT, Role.ATTENTION, Role.SHARED_EXPERT])
def test_role_error_is_that_roles_alone(
    source: Checkpoint, tokens: torch.Tensor, role: Role
) -> None:
    found = evaluate(source, Scaled(source, role, 1.01), tokens)
    for layer in found.layers:
        for name, error in layer.role_error.items():
            assert error == pytest.approx(0.01 if name == role else 0.0, rel=1e-3, abs=1e-9)
    assert float(found.token_kl.mean()) > 0


def test_activations_run_on_their_grid(source: Checkpoint, tokens: torch.Tensor) -> None:
    other = Scaled(source, Role.ATTENTION, coded=True)
    with_grid = evaluate(source, other, tokens)
    weights_only = evaluate(source, other, tokens, quantize_activations=False)
    assert not torch.equal(with_grid.token_kl, weights_only.token_kl)
    for mine, theirs in zip(with_grid.layers, weights_only.layers, strict=True):
        assert mine.role_error["attention"] > 1.2 * theirs.role_error["attention"]


def test_draft_acceptance(source: Checkpoint, tokens: torch.Tensor) -> None:
    """Position i drafts token i + 2 from hidden i and token i + 1; the model says it at i + 1."""
    found = evaluate(source, Scaled(source, Role.ROUTED_EXPERT, 1.3), tokens)
    config, head = source.config, source.top_tensor(names.LM_HEAD).float()
    norm = source.top_tensor(names.FINAL_NORM)
    layer = source.layer(config.num_hidden_layers)
    weights = runnable(layer)
    accepted = []
    for window in tokens:
        hidden, offsets = embedded(source, window), torch.tensor([0, LENGTH])
        for number in range(config.num_hidden_layers):
            own = runnable(source.layer(number))
            hidden = decoder_layer(config, own, hidden, offsets, None).hidden
        normed = rms_norm(hidden, norm, config.rms_norm_eps)
        says = F.linear(normed, head).argmax(-1)
        u = mtp_input(config, weights, embedded(source, window[1:]), normed[:-1])
        z = decoder_layer(config, weights, u, torch.tensor([0, LENGTH - 1]), None).hidden
        last = rms_norm(z, layer.vectors["shared_head.norm.weight"], config.rms_norm_eps)
        draft = F.linear(last, head).argmax(-1)
        accepted.append((draft == says[1:]).float().mean())
    assert found.draft is not None
    assert found.draft[1] == pytest.approx(float(torch.stack(accepted).mean()), abs=1e-6)
    assert found.draft[0] < 1


def embedded(source: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, source.top_tensor(names.EMBEDDING)).float()


def test_recall_of_attention_mass(source: Checkpoint, tokens: torch.Tensor) -> None:
    """The mass of one query's k best past tokens, from all logits and a plain sort."""
    seen: dict[str, torch.Tensor] = {}

    class Keep(Observer):
        def indexer(self, query: Tensor, key: Tensor, gates: Tensor, _offsets: Tensor) -> None:
            seen["scores"] = index_scores(query, key, gates)

        def attention(self, query: Tensor, latent: Tensor, _o: Tensor, scale: float) -> None:
            seen["logits"] = torch.einsum("qhd,td->qht", query, latent) * scale

    config, sizes = source.config, [1, 5, 16, LENGTH]
    recall = selection.Recall(LENGTH, sizes)
    hidden, offsets = embedded(source, tokens[0]), torch.tensor([0, LENGTH])
    weights = runnable(source.layer(0))
    with torch.no_grad():
        for observer in (recall, Keep()):
            decoder_layer(config, weights, hidden, offsets, None, observer)
    last = LENGTH - 1
    query = 40  # not the last: later tokens must not count
    rows = torch.linspace(LENGTH - LENGTH // 4, last, selection.RECALL_QUERIES).long()
    place = int((rows == query).nonzero()[0])
    order = seen["scores"][query, : query + 1].argsort(descending=True, stable=True)
    mass = seen["logits"][query, :, : query + 1].softmax(-1).mean(0)
    expected = [float(mass[order[:k]].sum()) for k in sizes]
    assert recall.mass[0][place].tolist() == pytest.approx(expected, abs=1e-5)


def test_observers_know_where_they_are(
    source: Checkpoint, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calibrate.states.CHUNK_TOKENS", LENGTH)
    starts: list[int] = []

    class Starts(Observer):
        def linear(self, path: str, _x: object, _y: object) -> None:
            if path == "self_attn.q_a_proj":
                starts.append(self.first_token)

    states = embed(source, tokens)
    forward(source.config, runnable(source.layer(0)), states, Starts(), range(1, 3))
    assert starts == [LENGTH, 2 * LENGTH]


def test_held_out_error_is_of_the_deployed_product() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 64, generator=generator), torch.randn(30, 64, generator=generator)
    candidate = weight + 0.01 * torch.randn(8, 64, generator=generator)
    errors = HeldOutErrors({"p": {"rtn": candidate}}, {"p": "int8"})
    errors.linear("p", x, x @ weight.T)
    rounded = quant.quantize_activation(x, "int8")
    expected = (rounded @ candidate.T - x @ weight.T).double().square().sum()
    assert float(errors.squared["p", "rtn"][0]) == pytest.approx(float(expected), rel=1e-4)
    assert not torch.equal(rounded, x)


def test_interval_holds_the_mean_and_narrows() -> None:
    generator = torch.Generator().manual_seed(0)
    few, many = torch.rand(8, generator=generator), torch.rand(400, generator=generator)
    low, high = bootstrap_interval(few)
    assert low < float(few.mean()) < high
    narrow = bootstrap_interval(many)
    assert narrow[1] - narrow[0] < 0.3 * (high - low)


def test_recall_does_not_depend_on_chunks(
    source: Checkpoint, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for chunk in (LENGTH, 8192):
        monkeypatch.setattr("calibrate.states.CHUNK_TOKENS", chunk)
        recall = selection.Recall(LENGTH, [4, 16])
        forward(source.config, runnable(source.layer(0)), embed(source, tokens), recall)
        found.append(torch.cat(recall.mass))
    assert found[0].shape == (3 * selection.RECALL_QUERIES, 2)
    assert torch.allclose(found[0], found[1], atol=1e-6)
