"""What settings of a serving engine do to the model, each switched alone: KL, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calibrate.caches import Caches, Grid
from calibrate.logits import Head, compare_predictions
from calibrate.selection import Recall
from calibrate.states import FLOAT32_CHUNK_TOKENS, Progress, advance, embed, silent
from glm5q.config import ModelConfig
from glm5q.layer import runnable
from glm5q.stream import LayerSource, layers


@dataclass(frozen=True)
class Setting:
    """How an engine would run the model: None leaves that as the checkpoint has it."""

    topk: int | None = None
    latent: Grid | None = None
    index: Grid | None = None

    def config(self, config: ModelConfig) -> ModelConfig:
        return config if self.topk is None else replace(config, index_topk=self.topk)

    def caches(self, config: ModelConfig) -> Caches | None:
        if self.latent is None and self.index is None:
            return None
        return Caches(config.qk_rope_head_dim, self.latent, self.index)


@dataclass(frozen=True)
class Effects:
    """Each setting's KL against the source, nats a token, the mean of each window [windows].

    `mass` float32 [queries, sizes] is the source's attention mass on the indexer's best k.
    """

    kl: dict[str, Tensor]
    mass: Tensor


def effects(
    source: LayerSource,
    settings: Mapping[str, Setting],
    sizes: list[int],
    tokens: Tensor,
    progress: Progress = silent,
    device: str = "cpu",
) -> Effects:
    """Returns what each setting does alone, and the recall of each k of `sizes`.

    `tokens` int64 [windows, length]. Every setting has a stream of its own; two layers are in
    memory at a time.
    """
    config, count = source.config, source.config.num_hidden_layers
    plain = replace(embed(source, tokens, device, FLOAT32_CHUNK_TOKENS), spare=None)
    streams = dict.fromkeys(settings, plain)
    mass: list[Tensor] = []
    for layer in layers(source.layer, range(count)):
        progress(f"effects, layer {layer.number}", layer.number, count + 1)
        weights = runnable(layer, device=device)
        recall = Recall(tokens.shape[1], sizes)
        plain = advance(config, layer.number, weights, plain, recall)
        mass += recall.mass
        for name, setting in settings.items():
            changed, caches = setting.config(config), setting.caches(config)
            streams[name] = advance(changed, layer.number, weights, streams[name], caches)
    progress("effects, logits", count, count + 1)
    head = Head(source, device)
    kls = {
        name: compare_predictions((head, head), (plain.hidden, stream.hidden), tokens).kl
        for name, stream in streams.items()
    }
    progress("effects, logits", count + 1, count + 1)
    found = torch.cat(mass) if mass else torch.empty((0, len(sizes)))
    return Effects({name: kl.double().mean(1) for name, kl in kls.items()}, found)
