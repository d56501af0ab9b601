"""One function a command: the only package that joins the others."""

from glm5q.pipeline.ablate import ablate
from glm5q.pipeline.calibrate import CalibrateOptions, calibrate, validate_recipe
from glm5q.pipeline.common import embedded_checkpoint
from glm5q.pipeline.describe import Finished
from glm5q.pipeline.evaluate import compare_checkpoints
from glm5q.pipeline.export import export
from glm5q.pipeline.inspect import inspect
from glm5q.pipeline.report import compare, model_card, render

__all__ = [
    "CalibrateOptions",
    "Finished",
    "ablate",
    "calibrate",
    "compare",
    "compare_checkpoints",
    "embedded_checkpoint",
    "export",
    "inspect",
    "model_card",
    "render",
    "validate_recipe",
]
