"""Frozen values that travel between the parts: roles, schemes, and what a layer's run returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

# Dynamic a token; `fp8_block` dynamic a token and 128 columns; `fp8_static` one calibrated scale.
ActivationDtype = Literal["int8", "fp8", "fp8_block", "fp8_static"]


@dataclass(frozen=True)
class StaticFp8:
    """An activation grid of one scale: values / scale in e4m3."""

    scale: float


ActivationGrid = ActivationDtype | StaticFp8


class Role(StrEnum):
    """What a tensor is for. Recipes speak of roles; layers share them."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ATTENTION = "attention"  # q_a, q_b, kv_a_with_mqa, o
    KV_B = "kv_b"
    INDEXER_QUERY = "indexer_query"  # wq_b
    INDEXER_KEY = "indexer_key"  # wk
    INDEXER_WEIGHTS = "indexer_weights"  # weights_proj
    DENSE_MLP = "dense_mlp"
    SHARED_EXPERT = "shared_expert"
    ROUTED_EXPERT = "routed_expert"
    ROUTER = "router"  # gate weight and its correction bias
    MTP_PROJECTION = "mtp_projection"  # eh_proj


@dataclass(frozen=True)
class IntScheme:
    """Symmetric integer weights and the activation they meet.

    `group_size` None is one scale a row (per channel). `activation` None leaves activations alone.
    """

    bits: Literal[4, 8]
    group_size: int | None
    scale_dtype: Literal["bfloat16", "float32"]
    activation: ActivationDtype | None

    @property
    def code_min(self) -> int:
        """-8 for four bits; -127 for eight, which no pairwise int8 kernel can overflow on."""
        return -8 if self.bits == 4 else -127

    @property
    def code_max(self) -> int:
        return 7 if self.bits == 4 else 127

    def label(self) -> str:
        """`int4 g128 + fp8`, for people."""
        grain = f"g{self.group_size}" if self.group_size else "channel"
        return f"int{self.bits} {grain}" + (f" + {self.activation}" if self.activation else "")


@dataclass(frozen=True)
class Fp8Scheme:
    """e4m3 weights with a float32 scale a 128 x 128 block, as GLM-5-FP8; activations alike."""

    activation: ActivationDtype = "fp8_block"

    def label(self) -> str:
        return "fp8 128x128 + fp8"


@dataclass(frozen=True)
class KeepScheme:
    """The weight stays floating point; `dtype` None is the source's own."""

    dtype: Literal["bfloat16", "float16"] | None = None

    def label(self) -> str:
        return self.dtype or "source dtype"


CodedScheme = IntScheme | Fp8Scheme
Scheme = CodedScheme | KeepScheme


@dataclass(frozen=True)
class Fallback:
    """Something that did not go as the recipe asked, said aloud."""

    layer: int
    module: str
    reason: str
    action: str
    expert: int | None = None


@dataclass(frozen=True)
class MatrixResult:
    """One weight matrix (or a layer's stack of experts) after quantization.

    `error` is |q - s| / |s| of the outputs on held-out tokens, 0 if kept; with guidance the tokens
    weigh as it says. It chose between the candidates, so it is the least of a few.
    `input_absmax` and `output_absmax` were observed with source weights on the calibration tokens,
    None if no forward multiplies the matrix by itself (kv_b is absorbed, eh_proj runs before).
    `weight_error` is |dequantized - source| / |source| of the weights, which a reader can check.
    `input_p999` is the 99.9th percentile of |input|; `outlier_channels` of `input_channels` have a
    largest magnitude over ten times the median channel's.
    """

    module: str
    role: Role
    scheme: str
    method: str
    bits: float
    error: float
    input_absmax: float | None
    output_absmax: float | None
    matrices: int
    weight_error: float | None = None
    input_p999: float | None = None
    outlier_channels: int | None = None
    input_channels: int | None = None


@dataclass(frozen=True)
class ExpertResult:
    """One layer's routed experts, one entry an expert in each list."""

    tokens: tuple[int, ...]
    error: tuple[float, ...]
    method: tuple[str, ...]


@dataclass(frozen=True)
class LayerResult:
    """What calibrating one decoder layer gave.

    `error` is the relative error of the layer's update, |q - s| / |s - x|, both from the input x
    that deployment will see. Times in seconds, sizes in bytes as written. `correction` is the share
    of what earlier layers lost that calibrate.correction took back, None where that did nothing.
    """

    layer: int
    kind: Literal["dense", "moe", "mtp"]
    indexer: Literal["full", "shared"]
    error: float
    source_bytes: int
    quantized_bytes: int
    time_s: float
    matrices: tuple[MatrixResult, ...] = ()
    experts: ExpertResult | None = None
    fallbacks: tuple[Fallback, ...] = field(default=())
    correction: float | None = None
