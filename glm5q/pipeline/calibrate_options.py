"""What `glm5q calibrate` and `glm5q ablate` are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glm5q.pipeline.budget import BudgetOptions
from glm5q.pipeline.common import EVALUATION_WINDOWS
from recipes import schema


@dataclass(frozen=True)
class CalibrateOptions:
    """What `glm5q calibrate` was asked for. None takes the recipe's or the built-in choice."""

    source: Path
    recipes: tuple[str, ...]
    output: Path
    data: Path | None = None
    evaluation_data: Path | None = None
    windows: int | None = None
    sequence_length: int | None = None
    evaluation_windows: int = EVALUATION_WINDOWS
    latent_norm_eps: float | None = None
    effort: schema.Effort = "fast"
    device: str = "cpu"
    format: str | None = None
    budget: BudgetOptions | None = None
    hidden_gb: float | None = None
