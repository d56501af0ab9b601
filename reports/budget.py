"""What a record holds of a size budget: what was chosen, from which choices, and the curve."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class BudgetChoice(_Frozen):
    """One way to hold a unit, `nbytes` as written.

    `kl` is the model's KL with only this unit held so, nats a token, on windows that calibration
    holds out; `kl_measured` the same on evaluation windows, None unless asked for.
    """

    scheme: str
    nbytes: int
    kl: float
    kl_measured: float | None = None


class BudgetUnit(_Frozen):
    """One role in one layer, the least that an engine reads a scheme of its own for."""

    layer: int
    role: str
    choices: list[BudgetChoice]
    chosen: int


class BudgetPoint(_Frozen):
    """The best choice under one budget: `nbytes` of all weights, `bits` a budgeted weight.

    `kl` is the sum of its choices' KLs. `kl_measured` is that model's on evaluation windows,
    rounded as the choices were, with its standard error over windows; None unless asked for.
    """

    nbytes: int
    bits: float
    kl: float
    kl_measured: float | None = None
    kl_error: float | None = None


class Budget(_Frozen):
    """A mixture of schemes chosen under a budget of bytes, from measured KLs.

    `asked` is the budget in bytes of all weights. `rank_correlation` is Spearman's between `kl` and
    `kl_measured` over all choices, `rank_correlation_experts` over the routed experts' alone.
    """

    asked: int
    nbytes: int
    bits: float
    kl: float
    statistics_windows: int
    windows: int
    sequence_length: int
    units: list[BudgetUnit]
    curve: list[BudgetPoint]
    rank_correlation: float | None = None
    rank_correlation_experts: float | None = None
    time_s: float
