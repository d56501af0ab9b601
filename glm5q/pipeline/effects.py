"""`glm5q effects`: what a deployer can switch, each alone: index_topk, caches; and retrieval."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from calibrate import selection
from calibrate.caches import Grid
from calibrate.data import Windows, load_windows
from calibrate.effects import Setting, effects
from calibrate.needle import answers
from calibrate.states import Progress, silent
from glm5q.checkpoint import Checkpoint, open_checkpoint
from glm5q.config import ModelConfig
from glm5q.errors import DataError, OutputError, UserError
from glm5q.formats.quantized import open_any
from glm5q.pipeline import describe
from glm5q.pipeline.common import check_device, check_length, embedded_checkpoint, scan
from glm5q.pipeline.evaluate import check_same_shape
from glm5q.stream import LayerSource
from glm5q.tiny.recall import DIGITS, Planter
from reports import record as records
from reports.effects import CacheEffect, Effects, Needle, TopkEffect
from targets.plan import memory

PARTS = ("caches", "topk", "needle")
TOPK_KL = 1e-3  # nats a token that a smaller index_topk may cost
LENGTHS = (2, 4, 8, 16)  # of retrieval's windows, in index_topk
DISTANCES = (0.25, 0.5, 0.75)  # from fact to question, in windows
QUESTIONS = 8  # a window


@dataclass(frozen=True)
class EffectsOptions:
    """What `glm5q effects` was asked for; `only` are some of PARTS, all if empty."""

    source: Path
    quantized: Path | None = None
    data: Path | None = None
    output: Path | None = None
    windows: int = 8
    sequence_length: int = 2048
    needle_windows: int = 2
    needle_length: int | None = None
    seed: int = 0
    latent_norm_eps: float | None = None
    only: tuple[str, ...] = ()
    device: str = "cpu"


def measure_effects(
    options: EffectsOptions, progress: Progress = silent
) -> tuple[records.RunRecord, Path | None]:
    """Returns the record of what was asked for; writes it and its page if there is an `output`."""
    check_device(options.device)
    if options.output is not None and options.output.is_dir():
        raise OutputError(
            f"{options.output}: not a name for the record", "give a file as effects.json"
        )
    started = time.perf_counter()
    source = open_checkpoint(options.source, options.latent_norm_eps)
    models: list[LayerSource] = [source]
    if options.quantized is not None:
        quantized = open_any(options.quantized, options.latent_norm_eps)
        check_same_shape(source, quantized, options.quantized)
        models.append(quantized)
    file = _file(options)
    check_length(options.sequence_length, source.config)
    text = load_windows(
        file, options.source, source.config.vocab_size, options.sequence_length, options.windows,
        options.seed,
    )  # fmt: skip
    wanted = options.only or PARTS
    asked = _questions(options, file, source.config) if "needle" in wanted else []
    found = Effects(
        windows=len(text.tokens),
        sequence_length=options.sequence_length,
        topk=source.config.index_topk,
        time_s=0.0,
    )
    if "caches" in wanted or "topk" in wanted:
        found = _settings(found, source, wanted, text, progress, options.device)
    needles = [_needle(one, models, progress, options.device) for one in asked]
    found = found.model_copy(update={"needles": needles})
    found = found.model_copy(update={"time_s": time.perf_counter() - started})
    made = records.RunRecord(
        kind="evaluate",
        created=describe.now(),
        command=describe.command(),
        output=str(options.quantized or options.source),
        machine=describe.machine(options.device),
        source=describe.source_info(source, scan(source, progress)),
        times_s={"effects": found.time_s},
        peak_memory_bytes=describe.peak_memory_bytes(),
        effects=found,
    )
    if options.output is None:
        return made, None
    return made, describe.write(made, options.output, options.quantized or options.source).page


def _file(options: EffectsOptions) -> Path:
    embedded = options.source.resolve() == embedded_checkpoint().resolve()
    file = options.data or (embedded_checkpoint() / "heldout.jsonl" if embedded else None)
    if file is None:
        raise DataError("no text", "give --data FILE that calibration did not see")
    return file


def _settings(
    found: Effects,
    source: Checkpoint,
    wanted: tuple[str, ...],
    text: Windows,
    progress: Progress,
    device: str,
) -> Effects:
    """Returns `found` with the effects of caches and of index_topk."""
    config, length = source.config, text.tokens.shape[1]
    settings: dict[str, Setting] = {}
    if "caches" in wanted:
        settings |= {f"latent {grid}": Setting(latent=grid) for grid in get_args(Grid)}
        settings |= {f"indexer {grid}": Setting(index=grid) for grid in get_args(Grid)}
    sizes = selection.recall_sizes(config.index_topk, length) if "topk" in wanted else []
    settings |= {f"k {k}": Setting(topk=k) for k in sizes}
    measured = effects(source, settings, sizes, text.tokens, progress, device)
    caches = [
        _cache(setting, measured.kl[name], config)
        for name, setting in settings.items()
        if setting.topk is None
    ]
    sweep = [
        _topk(k, measured.kl[f"k {k}"], measured.mass[:, at], config, length)
        for at, k in enumerate(sizes)
    ]
    update = {"caches": caches, "sweep": sweep}
    if sweep:
        update |= {"recommended_k": recommend(sweep, config.index_topk), "recommended_kl": TOPK_KL}
    return found.model_copy(update=update)


def _cache(setting: Setting, kl: Tensor, config: ModelConfig) -> CacheEffect:
    grid = setting.latent or setting.index
    assert grid is not None
    if setting.latent is not None:
        nbytes, plain = (memory.kv_row_bytes(config, kv) for kv in (grid, "bf16"))
    else:
        nbytes, plain = (memory.index_row_bytes(config, index) for index in (grid, "bf16"))
    return CacheEffect(
        part="latent" if setting.latent else "indexer", grid=grid, kl=float(kl.mean()),
        kl_error=_error(kl), nbytes=nbytes, plain_nbytes=plain,
    )  # fmt: skip


def _topk(k: int, kl: Tensor, mass: Tensor, config: ModelConfig, length: int) -> TopkEffect:
    cost = selection.query_cost(config, k, length)
    return TopkEffect(
        k=k, share=k / length, attention_mass=float(mass.mean()), kl=float(kl.mean()),
        kl_error=_error(kl), flop=cost.flop, nbytes=cost.bytes,
    )  # fmt: skip


def _error(kl: Tensor) -> float | None:
    return float(kl.std() / len(kl) ** 0.5) if len(kl) > 1 else None


def recommend(sweep: list[TopkEffect], topk: int) -> int:
    """Returns the smallest k whose KL, two standard errors added, is at most TOPK_KL."""
    for point in sorted(sweep, key=lambda point: point.k):
        if point.kl + 2 * (point.kl_error or 0.0) <= TOPK_KL:
            return point.k
    return topk


@dataclass(frozen=True)
class _Asked:
    """Windows [windows, length] with facts, and where the answers start [windows, questions]."""

    distance: int
    tokens: Tensor
    starts: Tensor


def _questions(options: EffectsOptions, file: Path, config: ModelConfig) -> list[_Asked]:
    """Returns what is asked, by length and distance.

    Raises UserError where retrieval cannot be measured, before anything else is.
    """
    longest = options.needle_length or config.max_position_embeddings
    check_length(longest, config)
    lengths = [
        config.index_topk * times for times in LENGTHS if config.index_topk * times <= longest
    ]
    if not lengths:
        raise UserError(
            f"windows of {longest} tokens: retrieval takes {LENGTHS[0]} x index_topk "
            f"{config.index_topk} at least, so that the indexer has to choose",
            "give a longer --needle-length, or --only caches --only topk",
        )
    planter = Planter(_tokenizer(options.source))
    if len(planter.words) < 100:
        raise UserError(
            f"{options.source}: its tokenizer has too few whole words to plant facts of",
            "leave needle out with --only caches --only topk",
        )
    asked = []
    for length in lengths:
        text = load_windows(
            file, options.source, config.vocab_size, 2 * length, options.needle_windows,
            options.seed,
        ).tokens  # fmt: skip
        for share in DISTANCES:
            distance = round(length * share)
            asked.append(_Asked(distance, *_planted(planter, text, distance, options.seed)))
    return asked


def _planted(planter: Planter, text: Tensor, distance: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns windows [windows, T] of text [windows, 2 T], facts planted; where answers start."""
    rng = np.random.default_rng(seed)
    length = text.shape[1] // 2
    count = min(QUESTIONS, (min(distance, length - distance) - 40) // 64)
    if count < 1:
        raise UserError(f"windows of {length} tokens are too short to plant facts in")
    made = [planter.question_window(row.numpy(), rng, distance, count) for row in text]
    tokens, starts = zip(*made, strict=True)
    return (
        torch.from_numpy(np.stack(tokens)).to(torch.int64),
        torch.from_numpy(np.stack(starts)).to(torch.int64),
    )


def _needle(asked: _Asked, models: list[LayerSource], progress: Progress, device: str) -> Needle:
    """Returns how the source answers, and the quantized model if there is one."""
    tokens, starts = asked.tokens, asked.starts
    both = [answers(model, tokens, starts, DIGITS, progress, device) for model in models]
    other = both[1] if len(both) > 1 else None
    return Needle(
        length=tokens.shape[1],
        distance=asked.distance,
        questions=starts.numel(),
        found_source=float(both[0].right.float().mean()),
        nll_source=float(both[0].nll.mean()),
        found_quantized=None if other is None else float(other.right.float().mean()),
        nll_quantized=None if other is None else float(other.nll.mean()),
    )


def _tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{folder / 'tokenizer.json'}: {error}", "fetch it again") from None
