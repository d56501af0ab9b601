"""The reverse sweep, a layer at a time, against one autograd graph through the whole model."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from calibrate import guidance
from calibrate.block import Observer, decoder_layer, rms_norm
from calibrate.guidance import Guidance, guide
from calibrate.observe import HeldOutErrors, Statistics
from calibrate.ranks import Ranks
from calibrate.states import States, embed, share_out
from glm5q import names
from glm5q.checkpoint import open_checkpoint
from glm5q.layer import runnable
from glm5q.types import Fallback
from tests import small

LENGTH = 40


class _Keep(Observer):
    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}

    def experts(self, path: str, _x: object, _offsets: object, y: torch.Tensor, _t: object) -> None:
        self.outputs[path] = y


@pytest.mark.parametrize("raw", [small.GLM5, small.GLM52], ids=["glm-5", "glm-5.2"])
def test_equals_one_graph(tmp_path: Path, raw: dict[str, object]) -> None:
    source = open_checkpoint(small.write_checkpoint(tmp_path, raw))
    config = source.config
    tokens = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    found = guide(source, tokens).layers
    hidden, indices = embed(source, tokens).hidden[0], None
    offsets, kept, chosen = torch.tensor([0, LENGTH]), [], []
    hidden.requires_grad_()
    x = hidden
    for number in range(config.num_hidden_layers):
        keep = _Keep()
        output = decoder_layer(config, runnable(source.layer(number)), x, offsets, indices, keep)
        x, indices = output.hidden, output.indices
        kept.append(keep.outputs)
        chosen.append(output.experts)
    normed = rms_norm(x, source.top_tensor(names.FINAL_NORM), config.rms_norm_eps)
    logits = F.linear(normed, source.top_tensor(names.LM_HEAD).float())
    generator = torch.Generator().manual_seed(guidance.SEED)
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    loss = F.cross_entropy(logits, drawn.squeeze(1), reduction="sum")
    for number, outputs in enumerate(kept):
        if not outputs:
            assert found[number] is None
            continue
        mine = found[number]
        assert mine is not None
        assert torch.equal(mine.experts.long(), chosen[number])
        order = chosen[number].flatten().argsort(stable=True)
        for path, y in outputs.items():
            (slope,) = torch.autograd.grad(loss, y, retain_graph=True)
            flat = torch.empty(len(order))
            flat[order] = slope.square().mean(-1)
            expected = (flat / flat.mean()).view(LENGTH, -1)
            assert torch.allclose(mine.weights[path], expected, rtol=1e-3, atol=1e-4)


def test_rows_find_their_token_and_expert() -> None:
    experts = torch.tensor([[2, 0], [1, 2]], dtype=torch.int16)
    guided = Guidance(experts, {"path": torch.tensor([[5.0, 6.0], [7.0, 8.0]])})
    # Expert 0 takes token 0; expert 1 tokens 0 (not the source's choice) and 1; expert 2 token 1.
    tokens, offsets = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 3, 4])
    assert guided.rows("path", tokens, offsets).tolist() == [6.0, 1.0, 7.0, 8.0]


def test_a_row_counts_as_often_as_it_weighs() -> None:
    """In the Grams and in the held-out errors; tokens are numbered through the stream."""
    path, width, first = names.DOWN, 6, 5
    experts = torch.tensor([[9, 9]] * first + [[0, 1], [1, 2], [2, 0]], dtype=torch.int16)
    weights = torch.tensor([[7.0, 7.0]] * first + [[1.0, 4.0], [2.0, 1.0], [3.0, 1.0]])
    guided = Guidance(experts, {path: weights})
    tokens, often = torch.tensor([0, 2, 0, 1, 1, 2]), torch.tensor([1, 1, 4, 2, 1, 3])
    x, y, stack = torch.randn(6, width), torch.randn(6, 4), torch.randn(3, 4, width)
    found = []
    for guidance_of, copies in ((guided, torch.ones_like(often)), (None, often)):
        offsets = torch.tensor([0, *(int(part.sum()) for part in copies.split(2))]).cumsum(0)
        statistics = Statistics({path}, guidance_of)
        errors = HeldOutErrors({path: {"one": stack}}, {path: None}, guidance_of)
        for watcher in (statistics, errors):
            watcher.first_token = first
            watcher.experts(
                path, x.repeat_interleave(copies, 0), offsets, y.repeat_interleave(copies, 0),
                tokens.repeat_interleave(copies),
            )  # fmt: skip
        gram = statistics.of(path).gram
        assert gram is not None
        found.append([gram, errors.reference[path], errors.squared[path, "one"]])
    for mine, counted in zip(*found, strict=True):
        torch.testing.assert_close(mine, counted, rtol=1e-5, atol=1e-5)


def test_a_process_weighs_its_own_windows_as_one_alone_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever windows it has: the same tokens are drawn for each, by its number."""
    monkeypatch.setattr(guidance, "_mean", lambda *_: torch.ones(()))
    source = open_checkpoint(small.write_checkpoint(tmp_path, small.GLM52))
    tokens = torch.randint(0, 256, (5, LENGTH), generator=torch.Generator().manual_seed(0))
    alone = guide(source, tokens, share=share_out(5, 2, LENGTH)).layers
    seen = 0
    for rank in (0, 1):
        share = share_out(5, 2, LENGTH, ranks=Ranks(rank, 2))
        own = share.of(torch.arange(5 * LENGTH).view(5, LENGTH)).flatten()
        seen += len(own)
        for mine, whole in zip(guide(source, tokens, share=share).layers, alone, strict=True):
            assert (mine is None) == (whole is None)
            if mine is None or whole is None:
                continue
            assert torch.equal(mine.experts, whole.experts[own])
            for path, weights in mine.weights.items():
                assert torch.equal(weights, whole.weights[path][own])
    assert seen == tokens.numel()


def test_a_gradient_without_room_goes_on_in_smaller_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first window left: what was written over is not taken for a gradient again."""
    source = open_checkpoint(small.write_checkpoint(tmp_path, small.GLM52))
    tokens = torch.randint(0, 256, (7, LENGTH), generator=torch.Generator().manual_seed(0))
    original, sizes = guidance._slopes, []

    def slopes(config, weights, hidden, *rest):  # type: ignore[no-untyped-def]
        sizes.append(len(hidden) // LENGTH)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("planted")
        return original(config, weights, hidden, *rest)

    monkeypatch.setitem(guidance.GRADIENT_TOKENS, "cpu", 4 * LENGTH)
    whole = guide(source, tokens)
    monkeypatch.setattr(guidance, "_slopes", slopes)
    found = guide(source, tokens)
    last = source.config.num_hidden_layers - 1
    assert sizes[:5] == [4, 3, 2, 1, 4]
    assert whole.fallbacks == ()
    assert found.fallbacks == (
        Fallback(last, "guidance", "device out of memory", f"chunks of {2 * LENGTH} tokens"),
    )
    for mine, other in zip(found.layers, whole.layers, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert torch.equal(mine.experts, other.experts)
            for path, weights in mine.weights.items():
                torch.testing.assert_close(weights, other.weights[path], rtol=1e-4, atol=1e-5)


def test_weights_have_a_mean_of_one_over_all_processes() -> None:
    class Two(Ranks):
        def add(self, value: torch.Tensor) -> torch.Tensor:
            return value + torch.tensor([30.0, 2.0], dtype=torch.float64)  # another's sum and count

    assert guidance._mean(torch.tensor([[1.0, 2.0, 3.0]]), Two(0, 2)) == 36 / 5


def test_where_the_loss_minds_nothing_every_token_weighs_one() -> None:
    assert guidance._normalised(torch.zeros(2, 3), Ranks()).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("windows", [slice(0, 1), slice(1, 4), slice(4, 5), slice(0, 5)])
def test_shared_indices_are_found_in_chunks_of_another_size(windows: slice) -> None:
    indices = torch.arange(20).unsqueeze(1)
    states = States(torch.zeros(5, 4, 1), tuple(indices.split((8, 8, 4))))
    found = guidance._indices_of(states, windows, 4, torch.device("cpu"))
    assert found is not None
    assert torch.equal(found, indices[4 * windows.start : 4 * windows.stop])
