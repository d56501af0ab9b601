"""What a recipe's own models cannot refuse: what engines take, and what fits a model."""

from __future__ import annotations

from collections.abc import Iterator

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.errors import RecipeError
from glm5q.types import IntScheme, Role
from recipes.schema import SOURCE_FORMAT, Fp8, Gptq, Keep, Recipe, Rtn
from recipes.tiles import problems as tile_problems

KEEP_ONLY = {
    Role.EMBEDDING: "looked up, not multiplied",
    Role.LM_HEAD: "engines build it unquantized",
    Role.NORM: "a vector",
    Role.ROUTER: "its rounding reroutes tokens",
    Role.KV_B: "absorbed into the attention; engines read it unquantized",
    Role.INDEXER_KEY: "engines fuse wk with weights_proj, unquantized",
    Role.INDEXER_WEIGHTS: "engines fuse it with wk, unquantized",
    Role.MTP_PROJECTION: "engines build it unquantized",
}
# What GLM-5-FP8 stores in blocks, and SGLang's w4afp8 expects so; routed experts have int4 there.
FP8_ROLES = {
    Role.ATTENTION,
    Role.KV_B,
    Role.INDEXER_QUERY,
    Role.INDEXER_KEY,
    Role.DENSE_MLP,
    Role.SHARED_EXPERT,
}
SOURCE_DTYPE = {Role.EMBEDDING, Role.LM_HEAD, Role.NORM}
# Engines fuse both and read one scheme for a layer's routed experts, so overrides go by layer.
UNOVERRIDABLE = {Role.EMBEDDING, Role.LM_HEAD, Role.NORM, Role.ROUTER}


MARLIN = {"h200", "h20", "a100", "rtx-4090"}  # chips where vLLM multiplies int4 x int8 by Marlin


def problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yields (what is wrong, what to do)."""
    yield from tile_problems(recipe.target, recipe.tiles)
    undecided = [role.value for role in Role if role not in recipe.weights]
    if undecided:
        fix = "give it a method, or {method: keep}"
        yield f"weights: role {undecided[0]} is undecided", fix
    if recipe.format == SOURCE_FORMAT:
        yield from _source_problems(recipe)
        return
    for role, plan in recipe.weights.items():
        yield from _role_problems(f"weights.{role.value}", role, plan)
    yield from _sign_problems(recipe)
    yield from _up_down_problems(recipe)
    decided: dict[tuple[Role, int], int] = {}
    for index, override in enumerate(recipe.overrides):
        where = f"overrides.{index}"
        if override.role in UNOVERRIDABLE:
            yield f"{where}: {override.role.value} cannot differ by layer", "decide it in weights"
        yield from _role_problems(f"{where}.plan", override.role, override.plan)
        for layer in override.layers:
            other = decided.setdefault((override.role, layer), index)
            if other != index or override.layers.count(layer) > 1:
                yield f"{where}: layer {layer} is decided by overrides.{other} too", "keep one"


def _sign_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    plans = {f"weights.{role.value}": plan for role, plan in recipe.weights.items()}
    plans |= {f"overrides.{i}.plan": other.plan for i, other in enumerate(recipe.overrides)}
    for where, plan in plans.items():
        known = isinstance(plan, Rtn | Gptq) and plan.clip.signed and plan.activation == "int8"
        if known and recipe.engine == "vllm" and recipe.target in MARLIN:
            problem = "vLLM's Marlin reads scales as unsigned beside int8 activations (#48905)"
            yield f"{where}.clip.signed: {problem}", "give signed: false"


def _up_down_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for name, steps in recipe.efforts:
        for step, alphas in (("up_down", steps.up_down), ("smooth", steps.smooth)):
            if len({f"{alpha:g}" for alpha in alphas}) < len(alphas):
                yield f"efforts.{name}.{step}: an alpha twice", "give each once"
    wanted = [name for name, steps in recipe.efforts if steps.up_down]
    plans = [o.plan for o in recipe.overrides if o.role is Role.ROUTED_EXPERT]
    plans.append(recipe.weights[Role.ROUTED_EXPERT])
    if wanted and any(isinstance(p, Gptq) and p.activation == "fp8_static" for p in plans):
        where = f"efforts.{wanted[0]}.up_down"
        yield f"{where}: a static activation scale is of inputs as they were", "leave up_down out"


def _source_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yields how a recipe differs from the FP8 release, which has one layout only."""
    for role, plan in recipe.weights.items():
        wanted = "fp8" if role in FP8_ROLES | {Role.ROUTED_EXPERT} else "keep"
        if plan.method != wanted:
            yield f"weights.{role.value}: the release has {wanted} there", f"give {wanted}"
    if recipe.mtp != "quantize" or recipe.overrides:
        yield "the release quantizes its MTP layer and has no overrides", "give mtp: quantize"


def _role_problems(
    where: str, role: Role, plan: Keep | Rtn | Gptq | Fp8
) -> Iterator[tuple[str, str]]:
    if isinstance(plan, Keep):
        if plan.dtype != "source" and role in SOURCE_DTYPE:
            yield f"{where}.dtype: {role.value} stays in the source's dtype", "give source"
        return
    if isinstance(plan, Fp8):
        if role not in FP8_ROLES:
            fix = f"FP8 goes for {', '.join(sorted(FP8_ROLES))}"
            yield f"{where}: {role.value} has no FP8 kernel in any engine", fix
        return
    if role in KEEP_ONLY:
        yield f"{where}: {role.value} must be kept ({KEEP_ONLY[role]})", "give {method: keep}"
    if plan.bits == 4 and role is not Role.ROUTED_EXPERT:
        yield f"{where}.bits: engines have four bits for routed_expert only", "give 8"
    if plan.bits == 8 and plan.clip.signed:
        yield f"{where}.clip.signed: eight bits reach as far on both sides", "leave it out"
    if plan.bits == 8 and plan.group_size is not None:
        yield f"{where}.group_size: eight bits go per channel", "give null"


def check_writable(recipe: Recipe) -> None:
    """Raises RecipeError for the FP8 release's own layout, in which nothing is written."""
    if recipe.format == SOURCE_FORMAT:
        raise RecipeError(
            f"{recipe.name}: describes the FP8 release as it is, nothing can be calibrated with it",
            "give another of `glm5q recipes list`; this one is for `glm5q plan`",
        )


def check_fits(recipe: Recipe, config: ModelConfig) -> None:
    """Raises RecipeError when the recipe cannot be applied to this model: groups, layer numbers."""
    for index, override in enumerate(recipe.overrides):
        for layer in override.layers:
            _check_override(
                f"{recipe.name}: overrides.{index}", override.role, layer, recipe, config
            )
    for layer in range(config.num_layers):
        for module in names.layer_modules(config, layer):
            scheme = recipe.plan(module.role, layer, config).scheme()
            columns = module.shape[-1]
            group = scheme.group_size if isinstance(scheme, IntScheme) else None
            if group is not None and columns % group:
                raise RecipeError(
                    f"{recipe.name}: weights.{module.role.value}.group_size {group} does not "
                    f"divide the {columns} columns of layer {layer} {module.path}",
                    f"give a divisor of {columns}, or null for one scale a row",
                )


def _check_override(
    where: str, role: Role, layer: int, recipe: Recipe, config: ModelConfig
) -> None:
    """Raises RecipeError for an override that would change nothing."""
    if layer >= config.num_layers:
        last = config.num_layers - 1
        raise RecipeError(f"{where}: layer {layer}", f"this checkpoint has layers 0 to {last}")
    if config.is_mtp(layer) and recipe.mtp == "keep":
        raise RecipeError(f"{where}: layer {layer} is MTP, which is kept", "give mtp: quantize")
    if all(module.role is not role for module in names.layer_modules(config, layer)):
        raise RecipeError(f"{where}: layer {layer} has no {role.value}", "leave that layer out")
