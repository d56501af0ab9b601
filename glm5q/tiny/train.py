"""Train the embedded checkpoint on one GPU, within a given number of seconds.

    python -m glm5q.tiny.train --data DIR --out DIR --seconds 500 [--resume DIR --start 0.5]

Progress is time: up to `LONG` windows of 1,024 tokens, then 4,096 with all keys, and after
`SPARSE` through the indexer's own choice, every fourth step with all keys.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as fn

from glm5q.tiny.data import Batches, load_tokens, loader
from glm5q.tiny.evaluate import exact, heldout, recall, windows
from glm5q.tiny.export import load, moe_layers, round_weights, save
from glm5q.tiny.model import Shape, TinyGlm
from glm5q.tiny.optim import Optimizers
from glm5q.tiny.recall import ANSWER

LONG, SPARSE, DECAY = 0.3, 0.55, 0.45
PLANTED = 0.5


def head_loss(weight: Tensor, hidden: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Cross-entropy weighted, of ordinary tokens and of answers.

    hidden [N, D] in the compute type, target and scale [N].
    """
    loss = fn.cross_entropy(
        fn.linear(hidden, weight.to(hidden.dtype)).float(), target, reduction="none"
    )
    means = [(loss * m).sum().detach() / (m.sum() + 1e-9) for m in (scale == 1, scale == ANSWER)]
    return (loss * scale).sum() / scale.sum(), *means


class Trainer:
    """Model, optimizers and the step."""

    def __init__(self, shape: Shape, device: torch.device, compiled: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = TinyGlm(shape).to(device)
        self.optim = Optimizers(self.model)
        self.head = head_loss
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            for layer in [*self.model.layers, self.model.mtp]:
                layer.compile(dynamic=False)
            self.head = torch.compile(head_loss, dynamic=False)
        if device.type == "cpu":
            self.model.compute = torch.float32
            for moe in moe_layers(self.model):
                moe.grouped = False

    def step(self, batch: tuple[Tensor, ...], mode: str, lr: float, bias_step: float) -> Tensor:
        """One update -> losses: ordinary tokens, MTP, answers, indexer; least load."""
        model = self.model
        ids, weights, rows = (t.to(self.device, non_blocking=True) for t in batch)
        hidden, drafted, index_loss, loads, balance = model(ids[:, :-2], ids[:, 1:-1], mode, rows)
        flat, compute = (0, 1), model.compute
        table = model.lm_head.weight
        main, plain, answer = self.head(
            table,
            hidden.flatten(*flat).to(compute),
            ids[:, 1:-1].flatten(),
            weights[:, 1:-1].flatten(),
        )
        ahead, plain_ahead, _ = self.head(
            table,
            drafted.flatten(*flat).to(compute),
            ids[:, 2:].flatten(),
            weights[:, 2:].flatten(),
        )
        (main + 0.3 * ahead + index_loss + 1e-3 * balance).backward()
        self.optim.step(lr)
        with torch.no_grad():
            for moe, load_ in zip(moe_layers(model), loads, strict=True):
                error = load_.float().mean() - load_
                moe.gate.e_score_correction_bias += bias_step * error.sign()
        ratio = loads.amin() / loads.float().mean()
        return torch.stack([plain, plain_ahead, answer, index_loss.detach(), ratio])


def rate(progress: float, step: int, peak: float) -> float:
    """Learning rate: 100 steps up, level, from DECAY linearly down to 2 %."""
    down = min(1.0, (1 - progress) / (1 - DECAY))
    return peak * min(1.0, (step + 1) / 100) * max(0.02, down)


def run(args: argparse.Namespace, trainer: Trainer, tokens: np.ndarray) -> dict[str, object]:
    """Train until the time is up -> counts and the log."""
    tokenizer = str(args.data / "tokenizer.json")
    stages = ((args.batch, args.short), (args.batch * args.short // args.long, args.long))

    def batches(stage: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        rows = max(4, args.rows // stages[stage][0])
        source = Batches(tokens, tokenizer, *stages[stage], rows, PLANTED, 17 * stage + args.seed)
        return loader(source, args.workers)

    stage = -1
    feed: Iterator[tuple[Tensor, Tensor, Tensor]] = iter(())
    began, step, seen, log = time.time(), 0, {"dense_short": 0, "dense": 0, "sparse": 0}, []
    saved = {0.4, 0.65, 0.85}
    while (used := time.time() - began) < args.seconds:
        progress = args.start + (1 - args.start) * used / args.seconds
        now = 0 if progress < LONG else 1
        if now != stage:
            stage, feed = now, batches(now)
        mode = "sparse" if progress >= SPARSE and step % 4 else "dense"
        seen[mode if now else "dense_short"] += args.batch * args.short
        values = trainer.step(
            next(feed), mode, rate(progress, step, args.lr), 1e-3 if progress < 0.9 else 3e-4
        )
        step += 1
        if step % 20 == 0 or step < 4:
            shown = [round(v, 4) for v in values.tolist()]
            log.append([step, round(progress, 4), round(time.time() - began, 1), mode, *shown])
            if step % 200 == 0 or step < 4:
                print(log[-1], flush=True)
            if not np.isfinite(shown).all():
                raise FloatingPointError(f"step {step}: {shown}")
        if any(progress >= s for s in saved):
            saved = {s for s in saved if progress < s}
            save(trainer.model, args.out)
    return {"steps": step, "tokens": seen, "seconds": round(time.time() - began, 1), "log": log}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--start", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--short", type=int, default=1024)
    parser.add_argument("--long", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=512, help="indexer queries a step")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--topk", type=int, default=256)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    shape = replace(Shape(), index_topk=args.topk, positions=args.long)
    trainer = Trainer(shape, device, compiled=device.type == "cuda", seed=args.seed)
    if args.resume:
        load(trainer.model, args.resume)
    args.out.mkdir(parents=True, exist_ok=True)
    numbers = run(args, trainer, load_tokens(args.data))
    round_weights(trainer.model)
    save(trainer.model, args.out)
    text = np.load(args.data / "heldout.npy")
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    with exact(trainer.model):
        numbers["heldout"] = heldout(trainer.model, windows(text, args.long, args.windows))
        numbers["recall"] = [
            recall(trainer.model, text, tokenizer, args.long, d, max(2, args.windows // 4))
            for d in (args.long * 3000 // 4096, args.long // 4)
        ]
    if device.type == "cuda":
        numbers["device"] = torch.cuda.get_device_name()
    (args.out / "train.json").write_text(json.dumps(numbers) + "\n")
    print(json.dumps({k: v for k, v in numbers.items() if k != "log"}, indent=1))


if __name__ == "__main__":
    main()
