"""The saved files in transformers against this folder's own forward (float32, CPU)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as fn

from glm5q.tiny.evaluate import exact, windows
from glm5q.tiny.export import load
from glm5q.tiny.model import Shape, TinyGlm


def shape_of(folder: Path) -> Shape:
    """The sizes in a folder's config.json that a test may change."""
    config = json.loads((folder / "config.json").read_text())
    return replace(
        Shape(), index_topk=config["index_topk"], positions=config["max_position_embeddings"]
    )


def own_logits(folder: Path, ids: torch.Tensor, latent_eps: float, mode: str) -> torch.Tensor:
    """ids [n, T] -> logits [n, T, vocabulary], one window at a time."""
    model = TinyGlm(replace(shape_of(folder), latent_eps=latent_eps))
    load(model, folder)
    with exact(model):
        return torch.cat([model.lm_head(model.trunk(w[None], mode)[0]) for w in ids])


def other_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """The same through transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(w[None], use_cache=False).logits for w in ids])


def compare(folder: Path, tokens: np.ndarray, length: int, most: int) -> dict[str, object]:
    """Losses and logit differences over the first windows of the held-out text."""
    import transformers

    ids = windows(tokens, length, most)
    theirs = other_logits(folder, ids[:, :-1])
    out: dict[str, object] = {
        "windows": len(ids),
        "length": length,
        "transformers": transformers.__version__,
    }

    def loss(logits: torch.Tensor) -> float:
        return round(fn.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).item(), 6)

    out["cross_entropy_transformers"] = loss(theirs)
    for eps in (1e-6, 1e-5):
        ours = own_logits(folder, ids[:, :-1], eps, "sparse")
        gap = (ours - theirs).abs().amax(-1)
        out[f"latent_eps_{eps:g}"] = {
            "cross_entropy": loss(ours),
            "logit_gap_max": gap.max().item(),
            "logit_gap_median": gap.median().item(),
            "positions_over_1e-3": (gap > 1e-3).float().mean().item(),
            "argmax_agreement": (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
        }
    return out
