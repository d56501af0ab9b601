"""RunRecord: all that one run found out, as versioned JSON. Pages and comparisons read this."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5q.errors import UserError
from reports.budget import Budget
from reports.effects import Effects
from reports.measures import Assembled, Indexer, MemoryPlan, Sweep

SCHEMA_VERSION = 1
ENOUGH_WINDOWS = 8  # a bootstrap over fewer is too narrow too often
# What can be: a page counts on it, and a gate must not pass on a size below nothing.
Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0)]
Key = Annotated[str, Field(pattern=r"^[^/]+$")]  # pages name a value by its path
_RANGES = ("input_absmax", "output_absmax", "input_p999", "outlier_channels")


class _Frozen(BaseModel):
    # NaN and infinity stay what they are: a figure that failed must not read as "not measured".
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class SourceInfo(_Frozen):
    """The checkpoint a run read. `content_hash` covers every tensor: name, dtype, shape, bytes.

    `base_model` is its name on a model hub, the licence what its README's front matter says; None
    where they are not known.
    """

    path: str
    variant: str
    content_hash: str
    bytes: int
    layers: int
    mtp_layers: int
    parameters: int
    latent_norm_eps: float
    base_model: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


class RecipeInfo(_Frozen):
    """The recipe as applied. `verification` is how far this very recipe was checked."""

    name: str
    content_hash: str
    target: str
    engine: str
    format: str
    verification: str
    content: dict[str, Any]

    @property
    def declared(self) -> bool:
        """Whether nothing of the target was ever run: its verification begins with `declared`."""
        return self.verification.startswith("declared")

    @property
    def edited(self) -> bool:
        """Whether it is a shipped recipe with changes that nobody checked; see recipes.files."""
        return "edited from " in self.verification


class DataInfo(_Frozen):
    """Packed text: `windows` x `sequence_length` tokens.

    `content_hash` covers the token ids, `file_hash` the text's file.
    """

    name: str
    content_hash: str
    documents: int
    windows: int
    sequence_length: int
    seed: int
    held_out_windows: int = 0
    file_hash: str = ""


class Fallback(_Frozen):
    layer: int
    module: str
    reason: str
    action: str
    expert: int | None = None


class Matrix(_Frozen):
    """See glm5q.types.MatrixResult.

    Where no forward multiplied the matrix there is no range: None, never 0 (records once said 0 of
    both input and output, which no real activation is). `error` is 0 where it is kept.
    On the same tokens as `input_absmax`: `input_p999` is the 99.9th percentile of |input| over all
    elements; `outlier_channels` counts the input channels, of `input_channels`, whose absmax is
    more than 10 times the median channel's absmax. For stacked experts: over all of their inputs.
    """

    module: str
    role: str
    scheme: str
    method: str
    bits: float
    error: float
    input_absmax: float | None
    output_absmax: float | None
    matrices: int
    input_p999: float | None = None
    outlier_channels: int | None = None
    input_channels: int | None = None
    weight_error: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _zero_was_unseen(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("input_absmax") == raw.get("output_absmax") == 0:
            return raw | dict.fromkeys(_RANGES)
        return raw

    @property
    def reach(self) -> float | None:
        """The largest magnitude seen on either side; None if never observed."""
        seen = [v for v in (self.input_absmax, self.output_absmax) if v is not None]
        return next((v for v in seen if math.isnan(v)), max(seen, default=None))


class Experts(_Frozen):
    """One layer's routed experts, one entry an expert in each list."""

    tokens: list[int]
    error: list[float]
    method: list[str]


class Layer(_Frozen):
    """See glm5q.types.LayerResult."""

    layer: int
    kind: Literal["dense", "moe", "mtp"]
    indexer: Literal["full", "shared"]
    error: float
    source_bytes: int
    quantized_bytes: int
    time_s: float
    matrices: list[Matrix] = []
    experts: Experts | None = None
    fallbacks: list[Fallback] = []
    correction: float | None = None


class LayerAccuracy(_Frozen):
    """One layer, source stream beside quantized stream, on evaluation tokens.

    `hidden_error` is |q - s| / |s| of the residual stream after the layer. `role_error` is each
    role's relative output error on the source's own inputs, activation grid included.
    `topk_overlap` and `router_agreement` are mean shares of equal choices (None: not applicable);
    `_p1` is the 1st percentile over queries. `kl` is this layer's share of the loss as
    Accuracy.layer_kl says, nats a token.
    """

    layer: int
    hidden_error: float
    role_error: dict[str, float]
    topk_overlap: float | None = None
    topk_overlap_p1: float | None = None
    router_agreement: float | None = None
    kl: float | None = None


class MtpAccuracy(_Frozen):
    """Draft tokens of the MTP layer. `acceptance` is draft argmax = the model's own next argmax."""

    agreement: float
    acceptance_source: float
    acceptance_quantized: float


class Accuracy(_Frozen):
    """Source against quantized on tokens calibration did not see. KL in nats a token.

    `kl_low` and `kl_high` bound the mean's 95 % bootstrap interval over windows; `window_kl` holds
    each window's mean, so that two runs on the same data can be compared in pairs.
    `window_top1` (share of equal argmax) and `window_nll` (the quantized model's mean negative log
    likelihood, nats a token) are by window likewise, in the same order, and may be empty.
    `layer_kl` says what LayerAccuracy.kl is: "alone", the final KL with only that layer quantized;
    "lens", the KL of next-token distributions read from the residual stream after that layer
    through the final norm and lm_head (cumulative; the last decoder layer's is kl_mean).
    """

    data: DataInfo
    kl_mean: float
    kl_low: float
    kl_high: float
    kl_p50: float
    kl_p95: float
    kl_p99: float
    perplexity_source: float
    perplexity_quantized: float
    top1_agreement: float
    window_kl: list[float]
    layers: list[LayerAccuracy]
    mtp: MtpAccuracy | None = None
    time_s: float
    window_top1: list[float] = []
    window_nll: list[float] = []
    layer_kl: Literal["alone", "lens"] | None = None
    indexer: Indexer | None = None

    @property
    def few(self) -> bool:
        """Whether the interval rests on too few windows to be believed."""
        return len(self.window_kl) < ENOUGH_WINDOWS

    @property
    def enough(self) -> int:
        return ENOUGH_WINDOWS


class Latency(_Frozen):
    """One op at one shape. `how` tells a measurement from a model of the chip or a quoted figure.

    `low_s` and `high_s` bound the windows' medians; `p99_s` is over single calls. `floor_s` is the
    least time the chip's measured ceilings allow; `bound` says which of them it comes from.
    `calls` is how many calls were timed; `cpu_s` their median CPU time, all threads; `memory_bytes`
    what one allocates at most on a GPU. `problem` is what was wrong with the result, None if
    nothing or if it was not judged.
    """

    op: str
    implementation: str
    target: str
    shape: dict[str, int]
    dtype: str
    median_s: Seconds
    low_s: Seconds
    high_s: Seconds
    floor_s: Seconds | None = None
    how: Literal["measured", "computed", "quoted"]
    device: str
    p99_s: Seconds | None = None
    bound: Literal["memory", "compute"] | None = None
    calls: int | None = None
    cpu_s: float | None = None
    memory_bytes: int | None = None
    problem: str | None = None

    @property
    def over_floor(self) -> float | None:
        """How many times its floor the op takes; None without a floor."""
        return self.median_s / self.floor_s if self.floor_s else None


class Machine(_Frozen):
    """Where a run happened."""

    platform: str
    processor: str
    cores: int
    device: str
    versions: dict[Key, str]


class Size(_Frozen):
    """Checkpoint bytes, in all and by role."""

    source_bytes: Bytes
    quantized_bytes: Bytes
    by_role: dict[Key, tuple[Bytes, Bytes]]  # role -> (source bytes, quantized bytes)

    @property
    def ratio(self) -> float:
        """Source bytes a quantized byte."""
        return self.source_bytes / self.quantized_bytes if self.quantized_bytes else float("inf")


class RunRecord(_Frozen):
    """One run. Times in seconds, sizes in bytes; `peak_memory_bytes` is the resident peak."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["calibrate", "evaluate", "bench"]
    created: str
    command: str
    output: str
    machine: Machine
    source: SourceInfo | None = None
    recipe: RecipeInfo | None = None
    calibration: DataInfo | None = None
    size: Size | None = None
    layers: list[Layer] = []
    accuracy: Accuracy | None = None
    latency: list[Latency] = []
    times_s: dict[Key, Seconds] = Field(default_factory=dict)
    peak_memory_bytes: Bytes = 0
    resumed_layers: int = 0
    notes: list[str] = []
    memory: MemoryPlan | None = None
    sweeps: list[Sweep] = []
    assembled: list[Assembled] = []
    budget: Budget | None = None
    effects: Effects | None = None

    @property
    def fallbacks(self) -> list[Fallback]:
        return [fallback for layer in self.layers for fallback in layer.fallbacks]

    @property
    def slowest(self) -> int | None:
        """Which of `latency` has the largest median; None if empty.

        Measured ones come before others, and ours before what was timed beside them.
        """
        rows, beside = self.latency, ("torch-", "onnxruntime")

        def rank(at: int) -> tuple[bool, bool, float]:
            row = rows[at]
            return row.how == "measured", not row.implementation.startswith(beside), row.median_s

        return max(range(len(rows)), key=rank, default=None)


def write_record(record: RunRecord, path: Path) -> None:
    """Writes the record as JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read_record(path: Path) -> RunRecord:
    """Returns the record in `path`, or in `report.json` if it is a folder. Raises UserError."""
    file = path / "report.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        version = raw.get("schema_version") if isinstance(raw, dict) else None
    except FileNotFoundError:
        raise UserError(f"{file}: no such record", "give a report.json or its folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable JSON ({error})") from None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{file}: record schema {version!r}, this glm5q reads {SCHEMA_VERSION}",
            "render it with the glm5q that wrote it",
        )
    try:
        return RunRecord.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{file}: {where}: {first['msg']}") from None
