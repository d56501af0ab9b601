"""From one layer and its statistics to candidates for every matrix, and the choice between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from calibrate.candidates import Candidates, LayerPlan, find_candidates
from calibrate.observe import HeldOutErrors, Statistics
from calibrate.rows import code_errors
from calibrate.smoothing import add_smoothed, allowed, smoothed
from calibrate.up_down import made_up_for, with_folds
from glm5q import names, quant
from glm5q.config import ModelConfig
from glm5q.errors import RecipeError
from glm5q.layer import AT_ONCE, Codes, Fold, Layer, Weights
from glm5q.types import (
    ExpertResult,
    Fallback,
    Fp8Scheme,
    MatrixResult,
)
from recipes.schema import Fp8, Gptq, Keep, Recipe

FLOAT16_MAX = 65504.0


def gram_paths(recipe: Recipe, layer: int, config: ModelConfig) -> set[str]:
    """Returns the matrices of `layer` whose method needs a Gram."""
    modules = names.layer_modules(config, layer)
    return {m.path for m in modules if isinstance(recipe.plan(m.role, layer, config), Gptq)}


def plan_layer(
    layer: Layer, weights: Weights, statistics: Statistics, recipe: Recipe, config: ModelConfig
) -> LayerPlan:
    """Returns candidates for every matrix of a layer, from its source weights and statistics."""
    heads = config.num_attention_heads, config.qk_nope_head_dim
    plan = LayerPlan(recipe.steps.descent, heads=heads)
    for module in names.layer_modules(config, layer.number):
        wanted = recipe.plan(module.role, layer.number, config)
        if isinstance(wanted, Keep):
            _keep(layer, module.path, wanted, statistics, plan)
        elif isinstance(wanted, Fp8):
            weight, known = weights.matrices[module.path], layer.fp8_scales.get(module.path)
            scale = None if known is None else known.to(weight.device)
            codes, scale = quant.quantize_fp8_blocks(weight, scale)
            plan.candidates[module.path] = Candidates(
                wanted.scheme(), {"fp8": codes.unsqueeze(0)}, {"fp8": scale.unsqueeze(0)}
            )
        else:
            weight = weights.matrices[module.path]
            stack = weight if module.stacked else weight.unsqueeze(0)
            with _one_thread():
                plan.candidates[module.path] = find_candidates(
                    layer.number, module.path, stack, statistics.of(module.path), wanted, plan,
                    statistics.ranks,
                )  # fmt: skip
                if module.path == names.DOWN and isinstance(wanted, Gptq) and recipe.steps.up_down:
                    plan.candidates[module.path] = with_folds(
                        plan.candidates[module.path], layer.number, stack,
                        statistics.of(module.path), wanted, plan, recipe.steps.up_down,
                        statistics.ranks,
                    )  # fmt: skip
            if wanted.activation == "fp8_static":
                _fix_input_scale(layer.number, module.path, statistics, plan)
    with _one_thread():
        add_smoothed(plan, layer, weights, statistics, recipe, config)
    return plan


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs column recursions on one CPU thread: a barrier costs more than their small steps.

    Two threads on two busy cores took ten times as long as one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fix_input_scale(layer: int, path: str, statistics: Statistics, plan: LayerPlan) -> None:
    """Sets one static activation scale for a matrix or a whole stack: observed absmax / 448.

    SGLang takes the largest of a layer's experts anyway, and an expert that saw no token has none
    of its own. Rounded to bfloat16, as it is stored.
    """
    largest = statistics.ranges_of(path).input_absmax
    if largest == 0.0:
        plan.fallbacks.append(Fallback(layer, path, "no activation seen", "input scale 1"))
    scale = torch.tensor(largest / quant.FP8_MAX if largest else 1.0).to(torch.bfloat16)
    plan.candidates[path] = replace(plan.candidates[path], input_scale=float(scale))


def _keep(layer: Layer, path: str, wanted: Keep, statistics: Statistics, plan: LayerPlan) -> None:
    """Keeps a matrix, checking that float16 holds its weights and what was observed around it."""
    weight = layer.matrices[path]
    if not isinstance(weight, Tensor):
        raise TypeError(f"{path}: a source layer holds codes")
    own = torch.bfloat16 if path in layer.from_fp8 else weight.dtype
    dtype = {"source": own, "bfloat16": torch.bfloat16, "float16": torch.float16}
    target = dtype[wanted.dtype]
    if target is torch.float16:
        seen = statistics.ranges_of(path)
        largest = max(float(weight.abs().max()), seen.input_absmax, seen.output_absmax)
        unseen = path not in statistics.ranges  # kv_b is absorbed, eh_proj runs before the layer
        if unseen or largest > FLOAT16_MAX:
            reach = f"{largest:.3g} was observed, float16 ends at {FLOAT16_MAX:.0f}"
            problem = "its activations are never observed" if unseen else reach
            if wanted.overflow == "refuse":
                raise RecipeError(
                    f"layer {layer.number} {path}: {problem}",
                    "keep it in bfloat16, or set overflow: bfloat16",
                )
            plan.fallbacks.append(Fallback(layer.number, path, problem, "kept in bfloat16"))
            target = torch.bfloat16
    plan.kept[path] = weight.to(target)


def choose(
    layer: Layer, plan: LayerPlan, errors: HeldOutErrors
) -> tuple[Layer, dict[str, list[str]]]:
    """Returns the layer with each matrix's better candidate, and the method taken an entry.

    An entry that no held-out token reached follows the sum over its stack.
    """
    matrices: dict[str, Tensor | Codes] = dict(plan.kept)
    methods: dict[str, list[str]] = {}
    may_take = allowed(plan.candidates, errors)
    for path, candidates in plan.candidates.items():
        order = may_take.get(path) or list(candidates.codes)
        if (path, order[0]) not in errors.squared:  # kv_b's product is never taken on its own
            methods[path] = order[:1]
            codes, scale = candidates.codes[order[0]][0], candidates.scales[order[0]][0]
            matrices[path] = candidates.taken(codes, scale)
            continue
        table = torch.stack([errors.squared[path, m] / candidates.bar(m) for m in order])
        best = table.argmin(0)
        best = torch.where(errors.reference[path] > 0, best, table.sum(1).argmin())
        methods[path] = [order[index] for index in best.tolist()]
        codes = _picked([candidates.codes[method] for method in order], best)
        scale = _picked([candidates.scales[method] for method in order], best)
        if path not in (names.GATE_UP, names.DOWN):
            codes, scale = codes[0], scale[0]
        matrices[path] = candidates.taken(codes, scale)
    layer = smoothed(layer.with_matrices(matrices), plan, methods)
    return made_up_for(layer, plan.candidates, methods), methods


def _picked(stacks: Sequence[Tensor], best: Tensor) -> Tensor:
    """Returns the stack whose entry i is that of stacks[best[i]]; one of them, if it has all."""
    most = int(best.mode().values)
    picked = stacks[most]
    for number, stack in enumerate(stacks):
        mine = (best == number).nonzero().flatten().to(stack.device)
        if number != most and len(mine):
            picked = picked.clone() if picked is stacks[most] else picked
            picked[mine] = stack[mine]
    return picked


def results(
    layer: Layer,
    plan: LayerPlan,
    methods: Mapping[str, list[str]],
    errors: HeldOutErrors,
    statistics: Statistics,
    config: ModelConfig,
) -> tuple[tuple[MatrixResult, ...], ExpertResult | None]:
    """Returns what is recorded of each matrix, and of the routed experts one by one."""
    matrices = []
    for module in names.layer_modules(config, layer.number):
        path = module.path
        candidates = plan.candidates.get(path)
        count = module.shape[0] * len(names.stacked_parts(path)) if module.stacked else 1
        if candidates is None:
            scheme, method, error = str(plan.kept[path].dtype).removeprefix("torch."), "keep", 0.0
            bits = float(plan.kept[path].dtype.itemsize * 8)
        else:
            scheme = candidates.scheme.label()
            method = "+".join(dict.fromkeys(methods[path]))
            error = _output_error(path, methods[path], errors)
            bits = bits_per_weight(candidates, module.shape[-1])
        seen = statistics.seen(path)
        matrices.append(
            MatrixResult(
                module=path,
                role=module.role,
                scheme=scheme,
                method=method,
                bits=bits,
                error=error,
                input_absmax=seen.input_absmax if seen else None,
                output_absmax=seen.output_absmax if seen else None,
                matrices=count,
                input_p999=seen.input_p999 if seen else None,
                outlier_channels=seen.outlier_channels if seen else None,
                input_channels=module.shape[-1],
            )
        )
    return tuple(matrices), _experts(methods, errors, statistics)


def _output_error(path: str, methods: list[str], errors: HeldOutErrors) -> float:
    """Relative output error on held-out tokens; nan for kv_b, whose product is never taken."""
    if path not in errors.reference:
        return math.nan
    squared = _chosen_squares(path, methods, errors)
    return math.sqrt(float(squared.sum()) / max(float(errors.reference[path].sum()), 1e-30))


def with_weight_errors(
    results: tuple[MatrixResult, ...], source: Layer, quantized: Layer
) -> tuple[MatrixResult, ...]:
    """Returns the results with each matrix's relative weight error, which stands in for a nan."""
    found = []
    for result in results:
        left, right = source.matrices[result.module], quantized.matrices[result.module]
        error = _weight_error(left, right, quantized.folds.get(result.module, Fold()))
        output_error = error if math.isnan(result.error) else result.error
        found.append(replace(result, error=output_error, weight_error=error))
    return tuple(found)


def _weight_error(source: Tensor | Codes, quantized: Tensor | Codes, fold: Fold) -> float:
    """|q - s| / |s|, a matrix of a stack at a time, s folded as q was."""
    if not isinstance(source, Tensor):
        raise TypeError("a source layer holds codes")
    difference = reference = 0.0
    if isinstance(quantized, Codes) and quantized.codes.is_cuda:
        return _weight_error_on_device(source, quantized, fold)
    for index in range(source.shape[0]) if source.dim() == 3 else [slice(None)]:
        if isinstance(quantized, Codes):
            rounded = quant.dequantize(quantized.codes[index], quantized.scale[index])
        else:
            rounded = quantized[index].float()
        exact = fold.of(source[index].to(rounded.device), index).float()
        difference += float((rounded - exact).double().square().sum())
        reference += float(exact.double().square().sum())
    return math.sqrt(difference / max(reference, 1e-30))


def _weight_error_on_device(source: Tensor, quantized: Codes, fold: Fold) -> float:
    """|q - s| / |s| with one wait for the device, AT_ONCE matrices of a stack a launch."""
    codes, scale = quantized.codes, quantized.scale
    starts = range(0, len(source), AT_ONCE)
    parts = [slice(n, n + AT_ONCE) for n in starts] if source.dim() == 3 else [slice(None)]
    squares = []
    for part in parts:
        exact = fold.of(source[part].to(codes.device, non_blocking=True), part)
        squares.append(torch.stack(code_errors(codes[part], scale[part], exact)))
    difference, reference = torch.stack(squares).sum(0).tolist()
    return math.sqrt(difference / max(reference, 1e-30))


def _chosen_squares(path: str, methods: list[str], errors: HeldOutErrors) -> Tensor:
    order = list(dict.fromkeys(methods))
    table = torch.stack([errors.squared[path, method] for method in order])
    index = torch.tensor([[order.index(method) for method in methods]], device=table.device)
    return table.gather(0, index)[0]


def bits_per_weight(candidates: Candidates, columns: int) -> float:
    """Stored bits a weight, scales included."""
    scheme = candidates.scheme
    if isinstance(scheme, Fp8Scheme):
        return 8 + 32 / quant.FP8_BLOCK**2
    scale_bits = 16 if scheme.scale_dtype == "bfloat16" else 32
    return scheme.bits + scale_bits / quant.group_columns(columns, scheme.group_size)


def _experts(
    methods: Mapping[str, list[str]], errors: HeldOutErrors, statistics: Statistics
) -> ExpertResult | None:
    """Each expert's error is the larger of its two products', nan where no held-out token came."""
    paths = [path for path in (names.GATE_UP, names.DOWN) if path in methods]
    if not paths:
        return None
    worst: Tensor | None = None
    for path in paths:
        relative = (_chosen_squares(path, methods[path], errors) / errors.reference[path]).sqrt()
        worst = relative if worst is None else torch.maximum(worst, relative)
    assert worst is not None
    tokens = tuple(statistics.of(paths[0]).tokens.tolist())
    joined = tuple(
        "/".join(dict.fromkeys(pair)) for pair in zip(*(methods[p] for p in paths), strict=True)
    )
    return ExpertResult(tokens, tuple(worst.tolist()), joined)
