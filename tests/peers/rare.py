"""A checkpoint with some experts of every MoE layer made rare, and how a row does on those."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from calibrate.block import LayerOutput, Observer
from calibrate.states import advance, embed, forward
from glm5q import names
from glm5q.checkpoint import open_checkpoint
from glm5q.config import ModelConfig
from glm5q.layer import runnable
from glm5q.stream import layers

BIAS = "mlp.gate.e_score_correction_bias"
FRACTION = 1 / 50  # of the mean tokens an expert gets
DESCRIBED = "rare.json"
Experts = dict[int, tuple[int, ...]]  # a layer's number -> its rare ones


def make(folder: Path, tokens: Tensor, share: float, seed: int = 0) -> None:
    """Changes a checkpoint so that a `share` of a layer's experts get FRACTION of the mean tokens.

    Which ones is drawn from `seed`. Only the router's correction bias changes, layer after layer,
    measured on `tokens` [windows, length] as the layers changed before leave them. The MTP layer
    stays as it is.
    """
    checkpoint = open_checkpoint(folder)
    config, draw = checkpoint.config, random.Random(seed)
    count = round(share * config.n_routed_experts)
    states = embed(checkpoint, tokens)
    biases: dict[str, Tensor] = {}
    found: dict[str, Any] = {}
    for layer in layers(checkpoint.layer, range(config.num_hidden_layers)):
        weights, loads, chosen = runnable(layer), _Loads(config), []
        if BIAS in weights.vectors:
            chosen = sorted(draw.sample(range(config.n_routed_experts), count))
            watch = _Logits()
            forward(config, weights, states, watch)
            bias = lowered(config, torch.cat(watch.parts), weights.vectors[BIAS], chosen)
            weights.vectors[BIAS] = biases[f"{names.layer_prefix(layer.number)}{BIAS}"] = bias
        states = advance(config, layer.number, weights, states, each=loads.keep)
        if chosen:
            found[str(layer.number)] = {"rare": chosen, "tokens": loads.count.tolist()}
    for file in folder.glob("*.safetensors"):
        stored = load_file(file)
        own = {name: bias for name, bias in biases.items() if name in stored}
        save_file(stored | own, file, {"format": "pt"})
    text = {"share": share, "seed": seed, "fraction": FRACTION, "layers": found}
    (folder / DESCRIBED).write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


def lowered(config: ModelConfig, logits: Tensor, bias: Tensor, rare: list[int]) -> Tensor:
    """Returns the bias under which each of `rare` gets FRACTION of tokens x top-k / experts.

    `logits` [tokens, experts]. A rare expert is in where its biased score passes the k-th of the
    others'; that two of them meet in a token is left out.
    """
    scores = logits.sigmoid()
    common = [e for e in range(config.n_routed_experts) if e not in rare]
    bar = (scores + bias)[:, common].topk(config.num_experts_per_tok, -1).values[:, -1]
    mean = len(logits) * config.num_experts_per_tok / config.n_routed_experts
    found = bias.clone()
    for expert in rare:
        missing = (bar - scores[:, expert]).sort().values  # what the bias has to be for each token
        wanted = max(1, round(FRACTION * mean))
        found[expert] = missing[wanted - 1 : wanted + 1].mean()
    return found


def described(folder: Path) -> dict[str, Any]:
    """Returns what `make` wrote of the checkpoint; empty of one that it did not write."""
    file = folder / DESCRIBED
    if not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def of(folder: Path) -> Experts:
    """Returns the rare experts of a checkpoint that `make` wrote; none of any other."""
    found = described(folder).get("layers", {})
    return {int(number): tuple(layer["rare"]) for number, layer in found.items()}


@dataclass
class _Logits(Observer):
    """Keeps the router's logits."""

    parts: list[Tensor] = field(default_factory=list)
    want_output = False  # forwards that only look

    def linear(self, path: str, _x: Tensor, y: Tensor) -> None:
        if path == "mlp.gate":
            self.parts.append(y)


class _Loads:
    """Counts the tokens of each expert."""

    def __init__(self, config: ModelConfig) -> None:
        self.count = torch.zeros(config.n_routed_experts, dtype=torch.int64)

    def keep(self, _windows: slice, output: LayerOutput) -> None:
        if output.experts is not None:
            self.count += torch.bincount(output.experts.flatten(), minlength=len(self.count))
