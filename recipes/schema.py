"""What a recipe says: strict models that decide every role. Unknown keys are errors."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from glm5q.config import ModelConfig
from glm5q.formats.base import Options
from glm5q.types import Fp8Scheme, IntScheme, KeepScheme, Role, Scheme

# The release's own layout, which `glm5q plan` knows and nothing is written in.
SOURCE_FORMAT = "source-fp8"
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
    GPTQ's Grams, for models that have such, and not what `correction` and `inner` fit by. `up_down`
    are the alphas tried, beside none, in scaling columns of an expert's down_proj by their inputs'
    size^alpha, which its up_proj makes up for. `smooth` are those tried, beside none, in evening
    out what a norm or one matrix gives to all that reads it, at the cost of another rounding of
    that each. `correction` turns routed experts from the source's inputs to what earlier layers'
    rounding left of them, at the cost of running the source's stream too. `inner` fits an expert's
    down_proj to what its rounded gate and up leave of its input, at the cost of a run and a
    rounding more. `top_up` makes more of short text; text that was topped up is too little for
    guidance, which then is left out.
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
