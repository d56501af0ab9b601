"""Activations made even before they are rounded: channels over 2^k, exactly, columns times it.

SmoothQuant's scale (arXiv 2211.10438) for inputs that a norm's gains or the rows of one matrix can
divide. Every reader of a divided input makes up for it, the indexer's as well, or none is touched.
Powers of two, so that what stays floating point stays the same function in every dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from calibrate.candidates import Candidates, LayerPlan
from calibrate.folds import Problem
from calibrate.observe import HeldOutErrors, Statistics
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Codes, Fold, Layer, Weights, powers_of_two
from glm5q.types import CodedScheme, IntScheme
from recipes.schema import Gptq, Recipe, Rtn

ATTENTION, INDEXER = "self_attn.", "self_attn.indexer."
GRIDS = ("int8", "fp8")  # of a token, by its largest channel
KV_B = "self_attn.kv_b_proj"
LIMIT = 16  # of the powers: a channel that hardly ever was excited is not blown up without end


@dataclass(frozen=True)
class Site:
    """What is divided, a norm's gains or a matrix's rows, and every matrix that reads it."""

    divided: str
    readers: tuple[str, ...]

    def present(self, matrices: Mapping[str, object]) -> list[str]:
        """Returns the readers that a layer has."""
        return [path for path in self.readers if path in matrices]


SITES = (
    Site(
        "input_layernorm.weight",
        (
            ATTENTION + "q_a_proj",
            ATTENTION + "kv_a_proj_with_mqa",
            INDEXER + "wk",
            INDEXER + "weights_proj",
        ),
    ),
    Site(ATTENTION + "q_a_layernorm.weight", (ATTENTION + "q_b_proj", INDEXER + "wq_b")),
    Site(
        "post_attention_layernorm.weight",
        (
            names.GATE_UP,
            "mlp.gate",
            "mlp.shared_experts.gate_proj",
            "mlp.shared_experts.up_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ),
    ),
    Site(KV_B, (ATTENTION + "o_proj",)),  # values' rows
    Site("mlp.up_proj", ("mlp.down_proj",)),
    Site("mlp.shared_experts.up_proj", ("mlp.shared_experts.down_proj",)),
)


def method(alpha: float) -> str:
    """What a record calls the candidate."""
    return f"smooth {alpha:g}"


def exponents(activation: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """Returns int8 k [in]: 2^k is about activation^alpha / weight^(1 - alpha), its mean log 0.

    Both are the channels' largest magnitudes [in]; where either is 0, nothing is scaled.
    """
    seen = (activation > 0) & (weight > 0)
    if not bool(seen.any()):
        return torch.zeros(len(activation), dtype=torch.int8, device=activation.device)
    one = torch.ones_like(activation)
    large, own = (torch.where(seen, t.float(), one).log2() for t in (activation, weight))
    power = alpha * large - (1 - alpha) * own
    centred = power - power[seen].mean()
    return torch.where(seen, centred.round().clamp(-LIMIT, LIMIT), 0.0).to(torch.int8)


def add_smoothed(
    plan: LayerPlan,
    layer: Layer,
    weights: Weights,
    statistics: Statistics,
    recipe: Recipe,
    config: ModelConfig,
) -> None:
    """Adds a candidate for each alpha to every coded reader of the sites that can be smoothed."""
    roles = {module.path: module.role for module in names.layer_modules(config, layer.number)}
    for site in SITES:
        coded = _coded(site, layer, plan)
        seen = statistics.seen(coded[0]) if coded else None
        if seen is None:
            continue
        for alpha in recipe.steps.smooth:
            own = torch.stack([_largest(weights.matrices[path]) for path in coded]).amax(0)
            fold = exponents(seen.channel_absmax, own, alpha)
            for path in coded:
                wanted = recipe.plan(roles[path], layer.number, config)
                assert isinstance(wanted, Rtn | Gptq)
                matrix = weights.matrices[path]
                stack = matrix if matrix.dim() == 3 else matrix.unsqueeze(0)
                problem = Problem(layer.number, path, stack, statistics.of(path), wanted)
                plan.candidates[path] = problem.with_fold(
                    plan.candidates[path], plan, method(alpha),
                    fold.expand(len(stack), -1).contiguous(), statistics.ranks,
                )  # fmt: skip


def _largest(matrix: Tensor) -> Tensor:
    """Returns the columns' largest magnitudes [in] of a matrix or a stack, an entry at a time."""
    entries = matrix if matrix.dim() == 3 else matrix.unsqueeze(0)
    return torch.stack([entry.abs().amax(0) for entry in entries]).amax(0)


def _coded(site: Site, layer: Layer, plan: LayerPlan) -> list[str]:
    """Returns the readers that get codes; none where any part of the site cannot be folded."""
    readers = site.present(layer.matrices)
    coded = [path for path in readers if path in plan.candidates]
    parts = [path for path in (site.divided, *readers) if path in layer.matrices]
    foldable = all(_foldable(plan, path) for path in parts)
    there = site.divided in layer.vectors or site.divided in layer.matrices
    rounded = all(_gains(plan.candidates[path].scheme) for path in coded)
    return coded if there and foldable and rounded else []


def _gains(scheme: CodedScheme) -> bool:
    """Whether its input is rounded by the token, or its columns so coarsely that it matters."""
    coarse = isinstance(scheme, IntScheme) and scheme.bits == 4
    return scheme.activation in GRIDS or (coarse and scheme.activation is None)


def _foldable(plan: LayerPlan, path: str) -> bool:
    """FP8's blocks have one scale for many rows; float16 has no room."""
    if path in plan.candidates:
        return isinstance(plan.candidates[path].scheme, IntScheme)
    return plan.kept[path].dtype is not torch.float16


def allowed(candidates: Mapping[str, Candidates], errors: HeldOutErrors) -> dict[str, list[str]]:
    """Returns the methods that the sites' readers may take: all one fold's, or none's.

    Whichever loses least on held-out tokens, summed over readers relative to their outputs; a fold
    has to stay under its bar.
    """
    found: dict[str, list[str]] = {}
    for site in SITES:
        coded = [path for path in site.present(candidates) if candidates[path].folds]
        for path in coded:
            found[path] = candidates[path].unfolded
        if not coded or any(path not in errors.reference for path in coded):
            continue
        least = sum(_least(errors, path, found[path]) for path in coded)
        for fold in candidates[coded[0]].folds:
            loss = sum(_least(errors, path, [fold]) for path in coded)
            loss /= candidates[coded[0]].bar(fold)
            if loss < least:
                least = loss
                found |= {path: [fold] for path in coded}
    return found


def _least(errors: HeldOutErrors, path: str, methods: Sequence[str]) -> float:
    """The least relative squared error of a matrix by one of the methods."""
    squares = [float(errors.squared[path, method].sum()) for method in methods]
    return min(squares) / max(float(errors.reference[path].sum()), 1e-30)


def smoothed(
    layer: Layer,
    plan: LayerPlan,
    methods: Mapping[str, list[str]],
) -> Layer:
    """Returns the quantized layer with the divided side of each fold taken, and kept readers."""
    candidates = plan.candidates
    for site in SITES:
        coded = [path for path in site.present(candidates) if candidates[path].folds]
        taken = [path for path in coded if methods[path][0] in candidates[path].folds]
        if taken:
            fold = candidates[taken[0]].folds[methods[taken[0]][0]][0]
            layer = _folded(layer, site, fold, coded, plan.heads)
    return layer


def _folded(
    layer: Layer, site: Site, fold: Tensor, coded: Sequence[str], heads: tuple[int, int]
) -> Layer:
    matrices, folds, vectors = dict(layer.matrices), dict(layer.folds), dict(layer.vectors)
    for path in site.present(matrices):
        matrix = matrices[path]
        stack = len(matrix.codes) if isinstance(matrix, Codes) else 0
        columns = fold.expand(stack, -1) if path == names.GATE_UP else fold
        folds[path] = replace(folds.get(path, Fold()), columns=columns)
        if path not in coded:
            assert isinstance(matrix, Tensor)
            matrices[path] = Fold(columns=fold).of(matrix)
    if site.divided in vectors:
        vector = vectors[site.divided]
        vectors[site.divided] = vector * powers_of_two(-fold).to(vector.device, vector.dtype)
    else:
        rows = _values(fold, *heads) if site.divided == KV_B else fold
        folds[site.divided] = replace(folds.get(site.divided, Fold()), rows=-rows)
        matrices[site.divided] = _rows_folded(matrices[site.divided], -rows)
    return replace(layer, matrices=matrices, vectors=vectors, folds=folds)


def _values(fold: Tensor, heads: int, keys: int) -> Tensor:
    """Returns the exponents of kv_b_proj's rows [heads x (keys + values)], none for keys."""
    return F.pad(fold.view(heads, -1), (keys, 0)).flatten()


def _rows_folded(matrix: Tensor | Codes, rows: Tensor) -> Tensor | Codes:
    if isinstance(matrix, Codes):
        return replace(matrix, scale=matrix.scale * powers_of_two(rows).unsqueeze(-1))
    return Fold(rows=rows).of(matrix)
