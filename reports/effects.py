"""What a record holds of a serving engine's settings, each switched alone, and of retrieval."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class CacheEffect(_Frozen):
    """The source with one cache rounded against itself: KL in nats a token, its standard error.

    `part` is the latent's rows or the indexer's queries and keys. `nbytes` a token and layer as
    kept, `plain_nbytes` in bfloat16.
    """

    part: Literal["latent", "indexer"]
    grid: Literal["fp8", "int8"]
    kl: float
    kl_error: float | None
    nbytes: int
    plain_nbytes: int


class TopkEffect(_Frozen):
    """The source attending to `k` tokens a query, against itself with the checkpoint's own k.

    `share` is k over the window. `attention_mass` is the share of dense attention's softmax mass on
    the indexer's best k, mean over heads, layers with an indexer of their own and 32 queries of the
    last quarter of the first windows. `flop` and `nbytes` are of one query at the window's end, all
    layers: indexer and sparse attention by the ops' own cost functions, in bfloat16.
    """

    k: int
    share: float
    attention_mass: float
    kl: float
    kl_error: float | None
    flop: float
    nbytes: float


class Needle(_Frozen):
    """Facts told `distance` tokens before they are asked for, in windows of `length`.

    Each answer is four digits. `found` is the share of `questions` with every digit likeliest, the
    digits before it told; `nll` the mean negative log likelihood of a digit, nats.
    """

    length: int
    distance: int
    questions: int
    found_source: float
    nll_source: float
    found_quantized: float | None = None
    nll_quantized: float | None = None


class Effects(_Frozen):
    """Measured on `windows` of `sequence_length`; see glm5q.pipeline.effects.

    `recommended_k` is the smallest k tried whose KL, two standard errors added, is at most
    `recommended_kl`; the checkpoint's own if none is.
    """

    windows: int
    sequence_length: int
    topk: int
    caches: list[CacheEffect] = []
    sweep: list[TopkEffect] = []
    recommended_k: int | None = None
    recommended_kl: float = 0.0
    needles: list[Needle] = []
    time_s: float
