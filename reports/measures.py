"""What a record may hold beyond accuracy: indexer, memory plan, batch sweeps, whole-model times.

All optional in a RunRecord. A list that is empty, or a None, means "not measured" and is shown so.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

How = Literal["measured", "computed", "quoted"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class IndexerLayer(_Frozen):
    """One full-indexer layer's top-k overlap by query position.

    `overlap[b]` is the mean, over queries in bucket b of all windows, of |S & Q| / |S|: S is the
    set of past tokens the source selects, Q the quantized stream's. None where a bucket holds no
    query that has more than `topk` tokens to choose from (there the overlap is 1 by construction).
    """

    layer: int
    overlap: list[float | None]


class SelectionMap(_Frozen):
    """Which past tokens one layer selects, by blocks of `block` tokens, mean over windows.

    `source[i][j]`: of all tokens selected by the queries of block i, the share lying in key block
    j. Row i has i + 1 entries and sums to 1. `quantized` is the same of the quantized stream. Four
    digits and at most 32 blocks keep the JSON small.
    """

    layer: int
    block: int
    source: list[list[float]]
    quantized: list[list[float]] = []


class RecallPoint(_Frozen):
    """What keeping the indexer's best `k` tokens a query catches and costs.

    `attention_mass` is the share of dense attention's softmax mass that lies on the tokens the
    source's indexer ranks best, mean over heads, full-indexer layers and 32 queries of the last
    quarter of each of the first four windows; `attention_mass_p5` is its 5th percentile over
    (layer, query). `kl` is the KL
    of the source with this k against the source with `topk`, nats a token. `flop` counts indexer
    scores and sparse attention of one query token at `context`, all layers.
    """

    k: int
    attention_mass: float
    attention_mass_p5: float | None = None
    kl: float | None = None
    flop: float


class Indexer(_Frozen):
    """The lightning indexer under quantization, on evaluation tokens.

    Bucket b covers query positions `bucket_edges[b] <= position < bucket_edges[b + 1]`. `topk` is
    the checkpoint's; `context` is the window length the curve was taken at.
    """

    topk: int
    context: int
    bucket_edges: list[int]
    layers: list[IndexerLayer]
    selection: list[SelectionMap] = []
    recall: list[RecallPoint] = []
    recommended_k: int | None = None
    recommended_because: str = ""


class DevicePlan(_Frozen):
    """Memory on the fullest of `count` devices in one parallel layout, at the plan's load.

    `parts` is bytes on that device by what takes them, in the order drawn: weights by role or
    `weights`, `mtp`, `kv_cache`, `index_cache`, `activations`, `reserve`. `fits` is that their sum
    is at most `capacity_bytes`. `max_context` holds at the plan's concurrency, `max_concurrency` at
    its context; 0 where not even the weights fit.
    """

    chip: str
    count: int
    layout: str
    capacity_bytes: int
    parts: dict[Annotated[str, Field(pattern=r"^[^/]+$")], int]  # pages name a value by its path
    fits: bool
    max_context: int | None = None
    max_concurrency: int | None = None
    how: How = "computed"


class MemoryPlan(_Frozen):
    """Where the quantized model fits. `*_bytes_per_token` is one sequence's, all layers and MTP."""

    context: int
    concurrency: int
    kv_layout: str
    kv_bytes_per_token: int
    index_bytes_per_token: int
    devices: list[DevicePlan]


class SweepPoint(_Frozen):
    """One batch size. `tokens_per_s` is batch x tokens a call / median_s."""

    batch: int
    median_s: float
    low_s: float
    high_s: float
    tokens_per_s: float


class Sweep(_Frozen):
    """One op, or one assembled decode step, against batch size. `peak_batch`: most tokens_per_s."""

    op: str
    implementation: str
    target: str
    device: str
    context: int
    how: How
    points: list[SweepPoint]
    peak_batch: int


class AssembledPart(_Frozen):
    """All `calls` of one op in one pass; `time_s` is their sum."""

    op: str
    calls: int
    time_s: float
    how: How


class Assembled(_Frozen):
    """A whole-model pass put together from op times; never itself run.

    `total_s` is the sum of the parts (no overlap, no launch gaps, no communication unless a part).
    `tokens` is the tokens the pass consumes; `tokens_per_s` = tokens / total_s. `how` is the
    weakest of the parts': quoted < computed < measured.
    """

    stage: Literal["prefill", "decode"]
    target: str
    device: str
    context: int
    batch: int
    tokens: int
    total_s: float
    tokens_per_s: float
    how: How
    parts: list[AssembledPart]
