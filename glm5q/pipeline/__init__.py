"""One function a command: the only package that joins the others."""

from glm5q.pipeline.ablate import ablate
from glm5q.pipeline.bench import bench_options
from glm5q.pipeline.bench import run as bench
from glm5q.pipeline.bench_calibrate import BenchOptions, bench_calibrate
from glm5q.pipeline.budget import BudgetOptions
from glm5q.pipeline.calibrate import calibrate, validate_recipe
from glm5q.pipeline.calibrate_options import CalibrateOptions
from glm5q.pipeline.common import embedded_checkpoint
from glm5q.pipeline.conformance import check_implementation
from glm5q.pipeline.describe import Finished
from glm5q.pipeline.effects import EffectsOptions, measure_effects
from glm5q.pipeline.evaluate import compare_checkpoints
from glm5q.pipeline.export import export
from glm5q.pipeline.inspect import inspect
from glm5q.pipeline.lower import lower
from glm5q.pipeline.plan import PlanOptions, plan
from glm5q.pipeline.report import compare, model_card, render

__all__ = [
    "BenchOptions",
    "BudgetOptions",
    "CalibrateOptions",
    "EffectsOptions",
    "Finished",
    "PlanOptions",
    "ablate",
    "bench",
    "bench_calibrate",
    "bench_options",
    "calibrate",
    "check_implementation",
    "compare",
    "compare_checkpoints",
    "embedded_checkpoint",
    "export",
    "inspect",
    "lower",
    "measure_effects",
    "model_card",
    "plan",
    "render",
    "validate_recipe",
]
