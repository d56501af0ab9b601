"""Recipes: strict YAML that decides every role. Unknown keys and undecided roles are errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5q import names
from glm5q.config import ModelConfig
from glm5q.errors import RecipeError
from glm5q.formats.base import Options
from glm5q.types import Fp8Scheme, IntScheme, KeepScheme, Role, Scheme
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
# The release's own layout, which `glm5q plan` knows and nothing is written in.
SOURCE_FORMAT = "source-fp8"
SOURCE_DTYPE = {Role.EMBEDDING, Role.LM_HEAD, Role.NORM}
EXAMPLE = "`glm5q recipes show h200` prints one to compare with"
# Engines fuse both and read one scheme for a layer's routed experts, so overrides go by layer.
UNOVERRIDABLE = {Role.EMBEDDING, Role.LM_HEAD, Role.NORM, Role.ROUTER}


MARLIN = {"h200", "h20", "a100", "rtx-4090"}  # chips where vLLM multiplies int4 x int8 by Marlin


Effort = Literal["fast", "best"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Keep(_Strict):
    """Leave the weight floating point. float16 is checked against observed ranges first.

    `overflow` says what happens to a float16 matrix whose weights or activations exceed its range.
    """

    method: Literal["keep"]
    dtype: Literal["source", "bfloat16", "float16"] = "source"
    overflow: Literal["bfloat16", "refuse"] = "bfloat16"

    def scheme(self) -> KeepScheme:
        return KeepScheme(None if self.dtype == "source" else self.dtype)


class Clip(_Strict):
    """Scale search: `steps` shares of the largest magnitude from 1 down to `lowest`.

    The error of each share is weighted by the mean square of the column's activation. `signed`
    lets a group's scale be below zero, where the codes' longer side, to -8, then is the positive.
    """

    steps: int = Field(ge=1, le=200)
    lowest: float = Field(gt=0, le=1)
    signed: bool = False


class _Integer(_Strict):
    bits: Literal[4, 8]
    group_size: int | None = Field(gt=0)
    scale_dtype: Literal["bfloat16", "float32"]
    activation: Literal["int8", "fp8", "fp8_static"] | None
    clip: Clip

    def scheme(self) -> IntScheme:
        return IntScheme(self.bits, self.group_size, self.scale_dtype, self.activation)


class Rtn(_Integer):
    """Round to nearest on the searched scale."""

    method: Literal["rtn"]


class Gptq(_Integer):
    """Second-order rounding (LDLQ form of GPTQ), plain rounding where that is better.

    `damping` is added to the Gram diagonal as a share of its mean. `pooling` n0 blends an expert's
    Gram of m tokens with the layer's in the share n0 / (n0 + m), n0 in input dimensions. `ridge`
    is added to its diagonal likewise, and counts in every step: inputs that the text does not have.
    """

    method: Literal["gptq"]
    damping: float = Field(gt=0, le=1)
    ridge: float = Field(default=0.0, ge=0, le=10)
    act_order: bool
    pooling: float = Field(ge=0)


class Fp8(_Strict):
    """e4m3 with a scale a 128 x 128 block, as GLM-5-FP8; a block's largest magnitude is 448."""

    method: Literal["fp8"]

    def scheme(self) -> Fp8Scheme:
        return Fp8Scheme()


class TopUp(_Strict):
    """What stands in for text that is short: copies of it with some tokens exchanged.

    Copies are added until there are about `tokens` tokens; in each, a share `exchanged` of the
    tokens is drawn evenly from the vocabulary. None where there is as much text already.
    """

    tokens: int = Field(gt=0)
    exchanged: float = Field(gt=0, lt=1)


Alpha = Annotated[float, Field(gt=0, le=1)]


class Steps(_Strict):
    """What follows GPTQ's rounding at one level of effort; each earns its place in an ablation.

    `descent` rounds of coordinate descent on codes and scales. `guidance` weighs each token in an
    expert's Gram by how much the model's own loss minds an error there, which costs one sweep
    forward and one backward over the source. `token_cap` bounds what a single massive token adds to
    a Gram, for models that have such; off unless asked for. `up_down` are the alphas tried, beside
    none, in scaling columns of an expert's down_proj by their inputs' size^alpha, which its up_proj
    makes up for. `smooth` are those tried, beside none, in evening out what a norm or one matrix
    gives to all that reads it, at the cost of another rounding of that each. `correction`
    turns routed experts from the source's inputs to what earlier layers' rounding left of them, at
    the cost of running the source's stream too. `inner` fits an expert's down_proj to what its
    rounded gate and up leave of its input, at the cost of a run and a rounding more. `top_up` makes
    more of short text; text that was topped up is too little for guidance, which then is left out.
    `float8_grams` takes routed experts' Grams of inputs rounded to e4m3 where a GPU multiplies
    those (sm_90), and changes nothing elsewhere. What is of routed experts does nothing where
    their method is not gptq.
    """

    descent: int = Field(ge=0, le=20)
    guidance: bool
    token_cap: bool = False
    up_down: tuple[Alpha, ...] = ()
    smooth: tuple[Alpha, ...] = ()
    correction: bool = False
    inner: bool = False
    float8_grams: bool = False
    top_up: TopUp | None = None


class Efforts(_Strict):
    """The two levels a run can be asked for."""

    fast: Steps
    best: Steps


Plan = Annotated[Keep | Rtn | Gptq | Fp8, Field(discriminator="method")]


class Override(_Strict):
    """Another plan for one role in some layers."""

    role: Role
    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    plan: Plan


class CalibrationPlan(_Strict):
    """How much text: at most `windows` of `sequence_length` tokens, a share of them held out.

    Held-out windows choose between an expert's candidates and give each layer's error.
    """

    windows: int = Field(ge=2)
    sequence_length: int = Field(ge=16)
    held_out: float = Field(gt=0, lt=0.5)
    seed: int


class Recipe(_Strict):
    """What to do to each role for one chip and engine.

    `tiles` (implementation -> name -> size, all that recipes.tiles has for the target, or none) are
    what its kernels are launched with.
    """

    version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")  # it names a folder
    description: str
    target: str
    engine: str
    format: Literal["compressed-tensors", "sglang-w4afp8", "modelslim", "source-fp8"]
    packing: Literal["int32", "int8"]
    verification: str
    calibration: CalibrationPlan
    weights: dict[Role, Plan]
    mtp: Literal["keep", "quantize"]
    efforts: Efforts
    effort: Effort = "fast"
    mtp_embeddings: Literal["shared", "copied"] = "shared"
    overrides: tuple[Override, ...] = ()
    tiles: dict[str, dict[str, Annotated[int, Field(gt=0)]]] = {}

    def plan(self, role: Role, layer: int, config: ModelConfig) -> Keep | Rtn | Gptq | Fp8:
        """Returns what to do to `role` in `layer`."""
        if config.is_mtp(layer) and self.mtp == "keep":
            return Keep(method="keep")
        for override in self.overrides:
            if override.role is role and layer in override.layers:
                return override.plan
        return self.weights[role]

    @property
    def steps(self) -> Steps:
        """The steps of the effort asked for."""
        return self.efforts.best if self.effort == "best" else self.efforts.fast

    def assignment(self, layer: int, config: ModelConfig) -> dict[Role, Scheme]:
        """Returns the scheme of every role in `layer`."""
        return {role: self.plan(role, layer, config).scheme() for role in Role}

    def activations(self) -> set[str]:
        """Returns the number formats the target must multiply: of weights and of activations."""
        wanted: set[str] = set()
        for plan in (*self.weights.values(), *(o.plan for o in self.overrides)):
            if isinstance(plan, Rtn | Gptq):
                wanted.add(f"int{plan.bits}")
                wanted |= {plan.activation.removesuffix("_static")} if plan.activation else set()
            elif isinstance(plan, Fp8):
                wanted.add("fp8")
        return wanted

    def options(self) -> Options:
        """Returns what the recipe says of its format's open points."""
        return Options(packed=self.packing == "int32", copy_mtp=self.mtp_embeddings == "copied")

    def content_hash(self) -> str:
        """Hash of everything the recipe decides."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def shipped() -> list[str]:
    """Returns the names of the recipes in the package."""
    folder = resources.files(__package__)
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def load(name_or_path: str) -> Recipe:
    """Returns a shipped recipe by name, or one from a file. Raises RecipeError on one line."""
    if name_or_path in shipped():
        return parse(text(name_or_path), f"recipes/{name_or_path}.yaml")
    return unverified(parse(text(name_or_path), name_or_path))


def unverified(recipe: Recipe) -> Recipe:
    """Returns `recipe`; if it is a shipped one with changes, what was checked of that is unsaid.

    A shipped recipe's copy is known by its name, or by the words of its `verification`. What a
    recipe of somebody's own says there is said to be theirs; a chip nobody saw stays declared.
    """
    own = {name: parse(text(name), f"recipes/{name}.yaml") for name in shipped()}
    same_words = [n for n, other in own.items() if other.verification == recipe.verification]
    origin = recipe.name if recipe.name in own else next(iter(same_words), None)
    renamed = recipe if origin is None else recipe.model_copy(update={"name": origin})
    if origin is None:
        return recipe.model_copy(update={"verification": _own_words(recipe, own)})
    if renamed.content_hash() == own[origin].content_hash():
        return recipe
    declared = "declared; " if own[origin].verification.startswith("declared") else ""
    words = f"{declared}edited from {origin}; not verified"
    return recipe.model_copy(update={"verification": words})


def _own_words(recipe: Recipe, own: Mapping[str, Recipe]) -> str:
    if recipe.verification.startswith("declared"):
        return recipe.verification
    same_chip = [other for other in own.values() if other.target == recipe.target]
    unseen = all(other.verification.startswith("declared") for other in same_chip)
    return f"{'declared; ' if unseen else ''}its author says: {recipe.verification}"


def text(name_or_path: str) -> str:
    """Returns the YAML of a shipped recipe or of a file. Raises RecipeError."""
    if name_or_path in shipped():
        return resources.files(__package__).joinpath(f"{name_or_path}.yaml").read_text("utf-8")
    path = Path(name_or_path)
    known = f"give a YAML file or one of {', '.join(shipped())}"
    try:
        if not path.is_file():
            raise RecipeError(f"{name_or_path}: no such recipe", known)
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})", known) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML would let win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} twice", problem_mark=node.start_mark
                )
        return dict(super().construct_mapping(node, deep=deep))


def parse(text: str, where: str) -> Recipe:
    """Returns the recipe in YAML `text`; `where` names it in errors."""
    try:
        raw = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise RecipeError(f"{where}: nested too deeply", EXAMPLE) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{where}:{line} not YAML ({problem})", "mend that line") from None
    return validated(raw, where)


def validated(raw: object, where: str) -> Recipe:
    """Returns the recipe in what YAML gave; `where` names it in errors. Raises RecipeError."""
    if not isinstance(raw, dict):
        raise RecipeError(f"{where}: not a recipe", EXAMPLE)
    try:
        recipe = Recipe.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        raise RecipeError(f"{where}: {_first(error)}", EXAMPLE) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"{where}: {error}", "use texts, numbers, lists and tables") from None
    for problem, fix in _problems(recipe):
        raise RecipeError(f"{where}: {problem}", fix)
    return recipe


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        message = "unknown key"
    if first["type"] == "enum" and ("weights" in place or "role" in place):
        message = f"unknown role; roles are {', '.join(Role)}"
    if isinstance(first["input"], str) and _is_number(first["input"]):
        message += " (YAML takes 1e-2 for text and 0.01 for a number)"
    return f"{place}: {message}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
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
