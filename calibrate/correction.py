"""Routed experts that expect inputs which earlier layers' rounding has changed.

A layer of the quantized stream reads x where the source's stream reads y. Over all tokens of a
layer y is about x (I + M), M = (x'x + ridge)^-1 x'(y - x): what is lost is partly known from what
is left. An expert's gate and up W then become W (I + share M)', before they are rounded. The share
is the best on held-out windows, from 0, where M does not help them, to 1.

One M for a layer, not for an expert: two sums [hidden, hidden] and no expert's few tokens to fit.
(GPTAQ, arXiv 2504.02692, takes y - x into each matrix's own rounding.) It costs a forward of the
source's own stream, with hidden states of its own, and the quantized stream's attention once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from calibrate.block import LayerOutput, Observer, after_attention
from calibrate.job import Job, Place
from calibrate.observe import ROUTER
from calibrate.ranks import Ranks
from calibrate.rows import all_rows, mirror_grams, sum_grams
from calibrate.states import States, advance, chunks, forward
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Layer, Weights, runnable
from glm5q.types import Fallback, MatrixResult, Role
from recipes.schema import Gptq

RIDGE = 0.3  # of the mean diagonal of x'x
TINY = 1e-30  # on the diagonal of what may be all zero: nothing is learnt from it, and solved
AT_ONCE = 16  # matrices of a stack turned at once: 0.8 GB at full size
STAGE = "correction"
REASON = "held-out inputs come no closer to the source's"


@dataclass(frozen=True)
class Inputs:
    """Sums over tokens of two streams' inputs, x and y [tokens, in].

    `gram` x'x and `cross` x'(y - x) [in, in], `square` |y - x|^2 []; float64 on a CPU, where that
    hides in which order ranks are added, float32 on a GPU.
    """

    gram: Tensor
    cross: Tensor
    square: Tensor

    @classmethod
    def none(cls, width: int, device: str) -> Inputs:
        dtype = torch.float32 if device.startswith("cuda") else torch.float64
        zeros = torch.zeros(width, width, dtype=dtype, device=device)
        return cls(zeros, zeros.clone(), zeros.new_zeros((), dtype=torch.float64))

    def add(self, x: Tensor, y: Tensor) -> None:
        change = y - x
        sum_grams(x, all_rows(x), self.gram.unsqueeze(0))  # on a GPU one half, until of_all
        add_cross(self.cross, x, change)
        self.square.add_(torch.linalg.vector_norm(change, dtype=torch.float32).double().square())

    def of_all(self, ranks: Ranks) -> Inputs:
        """Returns the sums over all ranks' tokens, in float32; every rank has them then."""
        gram, cross = (ranks.add(total).float() for total in (self.gram, self.cross))
        if gram.is_cuda:
            mirror_grams(gram.unsqueeze(0))
        return Inputs(gram, cross, ranks.add(self.square))

    def best_share(self, change: Tensor) -> tuple[float, float]:
        """Returns s within 0 and 1 that makes |y - x - s x change|^2 least, and what that takes.

        The second is the share of |y - x|^2 that is gone then.
        """
        along, size = _inner(change, self.cross), _inner(change, self.gram @ change)
        share = min(1.0, max(0.0, along / max(size, 1e-30)))
        return share, share * (2 * along - share * size) / max(float(self.square), 1e-30)


@dataclass(frozen=True)
class Streams:
    """What a layer's experts read in two streams, on windows for statistics and held out."""

    seen: Inputs
    held_out: Inputs


class _Read(Observer):
    """Keeps what the router read last, which is what the experts read."""

    x: Tensor | None = None

    def linear(self, path: str, x: Tensor, _y: Tensor) -> None:
        if path == ROUTER:
            self.x = x


def compare(config: ModelConfig, layer: Layer, job: Job, place: Place) -> Streams | None:
    """Moves the job's source stream through a layer, and sums what experts read in both streams.

    Returns this rank's sums; None where the recipe corrects nothing here.
    """
    if job.source_states is None:
        return None
    weights = runnable(layer, place.dtype, place.device)
    plan = job.recipe.plan(Role.ROUTED_EXPERT, layer.number, config)
    wanted = names.GATE_UP in layer.matrices and isinstance(plan, Gptq)
    width = job.states.hidden.shape[-1]
    found = Streams(Inputs.none(width, place.device), Inputs.none(width, place.device))
    read = _Read()
    states = job.source_states
    while states.windows_at_once > job.states.windows_at_once:  # a device that was too small
        states = states.halved()

    def add(windows: slice, _output: LayerOutput) -> None:
        share = job.states.share
        if read.x is None or not wanted or share is None:
            return
        total = found.seen if windows.start < share.split.start else found.held_out
        total.add(expert_input(config, weights, job.states, windows), read.x)

    with job.stage(STAGE, place):
        job.source_states = advance(config, layer.number, weights, states, read, add)
    return found if wanted else None


def expert_input(config: ModelConfig, weights: Weights, states: States, windows: slice) -> Tensor:
    """Returns what a layer's MLP or experts read of some windows, whole chunks [tokens, hidden]."""
    length, parts = states.hidden.shape[1], []
    device = next(iter(weights.vectors.values())).device
    for number, part in chunks(states):
        if windows.start <= part.start < windows.stop:
            hidden = states.on(device, part).flatten(0, 1)
            offsets = torch.arange(part.stop - part.start + 1, device=device) * length
            indices = None if states.indices is None else states.indices[number].to(device)
            with torch.no_grad():
                parts.append(after_attention(config, weights, hidden, offsets, indices, length)[1])
    return torch.cat(parts)


def corrected(
    layer: Layer, streams: Streams | None, job: Job, place: Place
) -> tuple[Layer, float | None]:
    """Returns (the layer with its experts corrected, the share of |y - x|^2 that is gone).

    The share is of held-out windows, None where the layer is as it was.
    """
    if streams is None:
        return layer, None
    with job.stage(STAGE, place):
        return _corrected(layer, streams, job, place)


def _corrected(
    layer: Layer, streams: Streams, job: Job, place: Place
) -> tuple[Layer, float | None]:
    seen, held_out = (part.of_all(place.ranks) for part in (streams.seen, streams.held_out))
    if not float(seen.square):
        return layer, None  # nothing was rounded before
    change = least_squares(seen)
    share, taken = held_out.best_share(change)
    if not taken > 0:
        if place.ranks.first:
            action = "experts are rounded for the source's inputs"
            job.fallbacks.append(Fallback(layer.number, names.GATE_UP, REASON, action))
        return layer, None
    stack = layer.matrices[names.GATE_UP]
    assert isinstance(stack, Tensor)
    made = with_change(stack, share * change, place.dtype)
    return layer.with_matrices({names.GATE_UP: made}), taken


def named(matrices: tuple[MatrixResult, ...]) -> tuple[MatrixResult, ...]:
    """Returns the record of a corrected layer's matrices, whose gate and up say so."""
    return tuple(
        replace(one, method=f"{one.method}+{STAGE}") if one.module == names.GATE_UP else one
        for one in matrices
    )


def source_outputs(config: ModelConfig, layer: Layer, job: Job, place: Place) -> Tensor:
    """Returns what an uncorrected layer makes of this rank's held-out windows, float32."""
    states, share = job.states, job.states.share
    held_out = range(0) if share is None else share.split
    shape = (len(held_out), *states.hidden.shape[1:])
    outputs = torch.empty(shape, dtype=torch.float32, device=place.device)

    def store(windows: slice, output: LayerOutput) -> None:
        part = outputs[windows.start - held_out.start : windows.stop - held_out.start]
        part.copy_(output.hidden.view(part.shape))

    with job.stage(STAGE, place):
        weights = runnable(layer, place.dtype, place.device)
        forward(config, weights, states, None, held_out, store)
    return outputs


def least_squares(sums: Inputs) -> Tensor:
    """Returns M [in, in] of y ~ x (I + M)."""
    mean = sums.gram.diagonal().mean()
    gram = sums.gram + (RIDGE * mean + TINY) * torch.eye(len(sums.gram), device=mean.device)
    solved: Tensor = torch.linalg.solve(gram, sums.cross)
    return solved


def with_change(stack: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns W (I + change)' of each matrix W of a stack [stack, out, in]."""
    made = torch.empty(stack.shape, dtype=dtype, device=stack.device)
    change = change.T.to(stack.device, dtype)  # a few per cent of a weight: bfloat16 will do
    for part, weight in zip(made.split(AT_ONCE), stack.split(AT_ONCE), strict=True):
        part.copy_(weight + weight.to(dtype) @ change)
    return made


def add_cross(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left' right, summed over rows; products of bfloat16 are exact in float32."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        total += left.float().T @ right.float()


def _inner(one: Tensor, other: Tensor) -> float:
    """Returns the sum of the products of two matrices' elements."""
    return float((one.double() * other.double()).sum())
