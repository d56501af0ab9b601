"""Numbers of the card: held-out loss, expert load, recall over a distance, MTP agreement."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as fn

from glm5q.tiny.export import moe_layers
from glm5q.tiny.model import TinyGlm
from glm5q.tiny.recall import DIGITS, Planter


class exact:  # noqa: N801
    """Context: float32 everywhere, no compilation, no gradients."""

    def __init__(self, model: TinyGlm) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.no_grad = torch.no_grad()
        self.no_grad.__enter__()
        self.precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        torch.compiler.set_stance("force_eager")
        self.compute, self.model.compute = self.model.compute, torch.float32
        self.grouped = [moe.grouped for moe in moe_layers(self.model)]
        for moe in moe_layers(self.model):
            moe.grouped = False

    def __exit__(self, *_: object) -> None:
        self.model.compute = self.compute
        torch.set_float32_matmul_precision(self.precision)
        torch.compiler.set_stance("default")
        for moe, grouped in zip(moe_layers(self.model), self.grouped, strict=True):
            moe.grouped = grouped
        self.no_grad.__exit__(None, None, None)


def windows(tokens: np.ndarray, length: int, most: int) -> Tensor:
    """Consecutive windows that share one token with the next: [n, length + 1]."""
    count = min(most, (len(tokens) - 1) // length)
    ids = torch.from_numpy(tokens.astype("int64"))
    return torch.stack([ids[i * length : i * length + length + 1] for i in range(count)])


def losses(model: TinyGlm, ids: Tensor, mode: str) -> Tensor:
    """ids [B, T + 1] -> cross-entropy of each token [B, T]."""
    hidden = model(ids[:, :-1], ids[:, 1:], mode)[0]
    return fn.cross_entropy(model.lm_head(hidden).transpose(1, 2), ids[:, 1:], reduction="none")


def heldout(model: TinyGlm, ids: Tensor, step: int = 4) -> dict[str, object]:
    """Cross-entropy in three modes, loads and MTP agreement over windows [n, T + 1]."""
    device = model.lm_head.weight.device
    out: dict[str, object] = {"windows": len(ids), "length": ids.shape[1] - 1}
    loads: Tensor | None = None
    hits = np.zeros(4)
    for mode in ("dense", "sparse", "recent"):
        total = 0.0
        for part in ids.split(step):
            part = part.to(device)
            hidden, drafted, _, load, _ = model(part[:, :-1], part[:, 1:], mode)
            logits = model.lm_head(hidden)
            total += fn.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="sum").item()
            if mode == "sparse":
                loads = load if loads is None else loads + load
                best = logits.argmax(-1)
                draft = model.lm_head(drafted).argmax(-1)[:, :-1]
                hits += [
                    (best == part[:, 1:]).float().sum().item(),
                    (draft == best[:, 1:]).float().sum().item(),
                    (draft == part[:, 2:]).float().sum().item(),
                    draft.numel(),
                ]
        out[f"cross_entropy_{mode}"] = total / ids[:, 1:].numel()
    assert loads is not None
    share = loads.float() / loads.float().mean(1, keepdim=True)
    out["load_min"] = [round(v, 4) for v in share.amin(1).tolist()]
    out["load_max"] = [round(v, 4) for v in share.amax(1).tolist()]
    out["top1"] = hits[0] / ids[:, 1:].numel()
    out["mtp_agreement"] = hits[1] / hits[3]
    out["mtp_top1"] = hits[2] / hits[3]
    return out


def recall(
    model: TinyGlm,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    length: int,
    distance: int,
    many: int,
) -> dict[str, object]:
    """Share of four-digit answers (and of digits) right, `distance` tokens after the fact."""
    device = model.lm_head.weight.device
    rng = np.random.default_rng(7)
    planter = Planter(tokenizer)
    count = max(2, min(20, min(distance, length - distance) // 54))
    out: dict[str, object] = {
        "distance": distance,
        "questions": many * count,
        "chance": 10.0**-DIGITS,
        "chance_digit": 0.1,
    }
    made = []
    for _ in range(many):
        at = rng.integers(0, len(tokens) - 2 * length)
        made.append(planter.question_window(tokens[at : at + 2 * length], rng, distance, count))
    for mode in ("sparse", "dense", "recent"):
        right = []
        for text, starts in made:
            ids = torch.from_numpy(text[:length].astype("int64"))[None].to(device)
            hidden = model(ids, ids, mode)[0]
            answer = torch.from_numpy(starts[:, None] + np.arange(DIGITS)).to(device)
            best = model.lm_head(hidden[0, answer - 1]).argmax(-1)
            right.append(best == ids[0, answer])
        hit = torch.stack(right).float()
        out[mode] = hit.amin(-1).mean().item()
        out[f"{mode}_digit"] = hit.mean().item()
    return out
