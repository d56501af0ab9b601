"""Our evaluator over what a tool wrote: KL against the source, and apart for rare experts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate.block import LayerOutput, Observer
from calibrate.data import Windows
from calibrate.logits import Head, compare_predictions
from calibrate.states import advance, embed
from glm5q import names
from glm5q.checkpoint import open_checkpoint
from glm5q.config import ModelConfig
from glm5q.formats.quantized import open_any
from glm5q.layer import Layer, runnable
from glm5q.stream import LayerSource, layers
from tests.peers import rare, table

PLAIN = "plain"
JUDGED = "judged.json"  # removed with the output, so it is of this output


class Judge:
    """The evaluator's own streams and predictions, the source's stream run once for all rows."""

    def __init__(self, held_out: Windows, source: Path, reuse: bool) -> None:
        self.tokens, self._hash = held_out.tokens, held_out.content_hash
        self.source = open_checkpoint(source)
        self._rare = rare.of(source)
        self._watch = _Watch(self._rare, self.tokens.shape)
        self._reuse = reuse

    @cached_property
    def _stream(self) -> Tensor:
        return final_states(self.source, self.tokens, self._watch if self._rare else None)

    def row(self, output: Path) -> dict[str, Any]:
        """Returns the judged half of a row, which is also kept beside the output."""
        file = output / JUDGED
        if self._reuse and file.exists():
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if found.pop("evaluation") == self._hash:
                return found
        found = self._judged(output)
        text = json.dumps(found | {"evaluation": self._hash})
        file.write_text(text, encoding="utf-8")
        return found

    def _judged(self, output: Path) -> dict[str, Any]:
        """Judges what lies in `output`, or in `output`/plain."""
        plain = output / PLAIN
        quantized = open_any(plain if plain.exists() else output)
        streams = self._stream, final_states(quantized, self.tokens)
        heads = Head(self.source, "cpu"), Head(quantized, "cpu")
        found = compare_predictions(heads, streams, self.tokens)
        windows = found.kl.double().mean(1).tolist()
        average = table.mean(windows)
        judged = {
            "kl_mean": average.mean,
            "kl_se": average.standard_error,
            "top1_agreement": float((found.argmax[0] == found.argmax[1]).double().mean()),
            "nll": float(found.nll[1].double().mean()),
            "window_kl": windows,
        }
        return judged | ({"rare": self._on_rare(quantized, found.kl)} if self._rare else {})

    def _on_rare(self, quantized: LayerSource, kl: Tensor) -> dict[str, Any]:
        """Returns the KL on tokens that meet a rare expert, and experts' errors on their inputs.

        Windows without such a token are left out, the same ones in every row. `kl_of_rare` is the
        KL over all tokens where only rare experts are theirs, `kl_of_common` where only common are.
        """
        reached = self._watch.reached
        windows = [
            float(values[met].double().mean())
            for values, met in zip(kl, reached, strict=True)
            if met.any()
        ]
        average, errors = table.mean(windows), self._watch.errors(self.source, quantized)
        return {
            **{f"kl_{which}": self._kl(quantized, which) for which in ("of_rare", "of_common")},
            "tokens": int(reached.sum()),
            "kl_mean": average.mean,
            "kl_se": average.standard_error,
            "output_error": errors[0],
            "common_output_error": errors[1],
            "window_kl": windows,
        }

    def _kl(self, quantized: LayerSource, which: str) -> dict[str, float]:
        """Returns the mean KL and its standard error with half of theirs left as in the source."""
        mixed = Mixed(self.source, quantized, self._rare, theirs_are_rare=which == "of_rare")
        streams = self._stream, final_states(mixed, self.tokens)
        found = compare_predictions((Head(self.source, "cpu"),) * 2, streams, self.tokens)
        average = table.mean(found.kl.double().mean(1).tolist())
        return {"mean": average.mean, "standard_error": average.standard_error}


@dataclass(frozen=True)
class Mixed:
    """The source with another's experts in place of its rare ones, or of its common ones."""

    source: LayerSource
    other: LayerSource
    rare: rare.Experts
    theirs_are_rare: bool

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    def top_tensor(self, name: str) -> Tensor:
        return self.source.top_tensor(name)

    def layer(self, number: int) -> Layer:
        own = self.source.layer(number)
        if number not in self.rare:
            return own
        experts = range(self.config.n_routed_experts)
        theirs = [e for e in experts if (e in self.rare[number]) == self.theirs_are_rare]
        mixed = {}
        for path in (names.GATE_UP, names.DOWN):
            mixed[path] = runnable(own).matrices[path].clone()
            mixed[path][theirs] = runnable(self.other.layer(number)).matrices[path][theirs]
        return own.with_matrices({**mixed})


def final_states(source: LayerSource, tokens: Tensor, watch: _Watch | None = None) -> Tensor:
    """Returns the states after the last layer [windows, length, hidden], as `evaluate` makes them.

    Weights in float32, activations never rounded.
    """
    config = source.config
    states = embed(source, tokens)
    for layer in layers(source.layer, range(config.num_hidden_layers)):
        weights = runnable(layer, quantize_activations=False)
        if watch is None:
            states = advance(config, layer.number, weights, states)
        else:
            watch.layer = layer.number
            states = advance(config, layer.number, weights, states, watch, watch.keep)
    return states.hidden


@dataclass
class _Watch(Observer):
    """Which tokens meet a rare expert in any layer, and what experts are given in those layers.

    `reached` bool [windows, length]; `inputs` by layer: (rows sorted by expert, their bounds).
    """

    rare: rare.Experts
    shape: Sequence[int]
    layer: int = 0
    inputs: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reached = torch.zeros(tuple(self.shape), dtype=torch.bool)

    def keep(self, windows: slice, output: LayerOutput) -> None:
        if output.experts is not None and self.layer in self.rare:
            met = torch.isin(output.experts, torch.tensor(self.rare[self.layer])).any(1)
            self.reached[windows] |= met.view(-1, self.reached.shape[1])

    def experts(self, path: str, x: Tensor, offsets: Tensor, _y: Tensor, _t: Tensor) -> None:
        if path == names.GATE_UP and self.layer in self.rare:
            self.inputs.setdefault(self.layer, []).append((x, offsets))

    def errors(self, source: LayerSource, quantized: LayerSource) -> tuple[float, float]:
        """Returns the mean over experts, rare and common, of |theirs - own| / |own|, outputs."""
        found: dict[bool, list[float]] = {True: [], False: []}
        for number, parts in self.inputs.items():
            both = [runnable(model.layer(number)).matrices for model in (source, quantized)]
            for expert in range(source.config.n_routed_experts):
                x = torch.cat([rows[at[expert] : at[expert + 1]] for rows, at in parts])
                own, theirs = (
                    swiglu(x, m[names.GATE_UP][expert], m[names.DOWN][expert]) for m in both
                )
                if len(x):
                    error = float((theirs - own).norm() / own.norm())
                    found[expert in self.rare[number]].append(error)
        means = [sum(errors) / len(errors) for errors in (found[True], found[False])]
        return means[0], means[1]


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert's outputs [rows, hidden] for x [rows, hidden]."""
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)
