"""The gradient of a mixture of experts by hand, for the row kernels of a GPU.

Autograd would also multiply what nobody reads: the experts' outputs, on which the gradient depends
through their gates only, and a gate's gradient is the expert's hidden row times the gradient there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its usual name

from calibrate import rows
from calibrate.block import by_expert, choose
from calibrate.row_gradients import exact_linear, gate_gradients
from fused_ops.expert_gemm.reference import expert_gemm
from glm5q import names
from glm5q.config import ModelConfig
from glm5q.layer import Weights

SHARED = "mlp.shared_experts."


@dataclass(frozen=True)
class MixtureGradient:
    """The gradient at what the experts read, `x` [tokens, hidden], and each token's choices.

    `squares[path]` float32 [tokens, experts a token] is the mean squared gradient at the output of
    a stack's product; `experts` are the router's choices, shaped alike.
    """

    x: Tensor
    experts: Tensor
    squares: dict[str, Tensor]


def mixture_gradient(
    config: ModelConfig, weights: Weights, x: Tensor, after: Tensor
) -> MixtureGradient:
    """Returns the gradient at x [tokens, hidden], not rounded to an activation grid.

    `after` float32 [tokens, hidden] is the gradient at the mixture's output.
    """
    matrices = weights.matrices
    with torch.no_grad():
        logits = exact_linear(x, matrices["mlp.gate"])
    with torch.enable_grad():
        logits.requires_grad_()
        bias = weights.vectors["mlp.gate.e_score_correction_bias"]
        gates, experts = choose(config, logits, bias)
    order, offsets = by_expert(experts, config.n_routed_experts)
    tokens = order // experts.shape[1]
    slope = after.to(x.dtype)
    both = expert_gemm(x.index_select(0, tokens), matrices[names.GATE_UP], offsets)
    down = matrices[names.DOWN].transpose(1, 2)
    inner = expert_gemm(slope.index_select(0, tokens), down, offsets)
    weighed = gates.detach().contiguous()
    of_both, of_gates, squares = gate_gradients(both, inner, weighed, order)
    del both, inner  # 1.6 GB of 16384 tokens at full size
    routed = expert_gemm(of_both, matrices[names.GATE_UP].transpose(1, 2), offsets)
    (of_logits,) = torch.autograd.grad(gates, logits, of_gates)
    shared = _shared(weights, x, slope) if config.n_shared_experts else None
    total = rows.add_choices(
        routed,
        torch.ones_like(weighed),
        order,
        shared,
        of_logits.to(x.dtype) @ matrices["mlp.gate"],
    )
    size = torch.linalg.vector_norm(after, dim=-1, keepdim=True).square() / after.shape[1]
    found = {names.GATE_UP: squares, names.DOWN: weighed.square() * size}
    return MixtureGradient(total, experts, found)


def _shared(weights: Weights, x: Tensor, slope: Tensor) -> Tensor:
    """Returns the shared expert's part: one expert of every token, its gate one."""
    gate_proj, up_proj, down_proj = (
        weights.matrices[f"{SHARED}{name}_proj"] for name in ("gate", "up", "down")
    )
    gate_up = torch.cat((gate_proj, up_proj))
    ones, order = x.new_ones(len(x), dtype=torch.float32), torch.arange(len(x), device=x.device)
    of_both = gate_gradients(F.linear(x, gate_up), slope @ down_proj, ones, order)[0]
    return of_both @ gate_up
