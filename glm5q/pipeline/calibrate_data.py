"""The text that `glm5q calibrate` reads: for statistics, for choices, and other for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from calibrate.data import Windows, load_windows
from calibrate.job import Place
from calibrate.shares import Share
from calibrate.states import share_out
from calibrate.top_up import topped_up
from glm5q.checkpoint import Checkpoint
from glm5q.errors import DataError
from glm5q.pipeline.calibrate_options import CalibrateOptions
from glm5q.pipeline.common import check_length, embedded_checkpoint
from glm5q.writer import file_sha256
from recipes.schema import Recipe


@dataclass(frozen=True)
class Data:
    """Windows for statistics and choices, and others for evaluation, with their files' hashes."""

    calibration: Windows
    held_out: int
    evaluation: Windows
    hashes: tuple[str, str]

    def text(self, recipe: Recipe, source: Checkpoint) -> Tensor:
        """Returns what one recipe's streams run on: the calibration windows, topped up."""
        tokens, vocabulary = self.calibration.tokens, source.config.vocab_size
        return topped_up(tokens, self.held_out, recipe.steps.top_up, vocabulary)

    def guided(self, recipe: Recipe, text: Tensor) -> bool:
        """Whether a recipe asks for guidance, and its text was long enough not to be topped up."""
        return recipe.steps.guidance and len(text) == len(self.calibration.tokens)

    def share(self, text: Tensor, place: Place) -> Share:
        """Returns which windows of a recipe's text are this process's."""
        return share_out(len(text), self.held_out, text.shape[1], place.device, place.ranks)

    @staticmethod
    def load(options: CalibrateOptions, recipe: Recipe, source: Checkpoint) -> Data:
        plan = recipe.calibration
        embedded = options.source.resolve() == embedded_checkpoint().resolve()
        data = options.data or (embedded_checkpoint() / "calibration.jsonl" if embedded else None)
        if data is None:
            raise DataError("no calibration text", "give --data FILE (JSONL or plain text)")
        apart = options.evaluation_data
        if apart is None and options.data is None:
            apart = embedded_checkpoint() / "heldout.jsonl"
        reserved = 0 if apart else options.evaluation_windows
        check_length(plan.sequence_length, source.config)
        common = (options.source, source.config.vocab_size, plan.sequence_length)
        windows = load_windows(data, *common, plan.windows + reserved, plan.seed)
        if apart is None:
            split = len(windows.tokens) - reserved
            if split < 2 * reserved:
                raise DataError(
                    f"{data}: {len(windows.tokens)} windows, too few to evaluate on {reserved}",
                    "give more text, --eval-data, or fewer --eval-windows",
                )
            windows, evaluation = windows.take(0, split), windows.take(split, split + reserved)
        else:
            evaluation = load_windows(apart, *common, options.evaluation_windows, plan.seed)
        held_out = max(1, round(plan.held_out * len(windows.tokens)))
        hashes = (file_sha256(data), file_sha256(apart or data))
        if apart is not None and hashes[0] == hashes[1]:
            raise DataError(f"{apart}: is the calibration text too", "evaluate on other text")
        _check_apart(windows, evaluation, apart or data)
        return Data(windows, held_out, evaluation, hashes)


def _check_apart(calibration: Windows, evaluation: Windows, file: Path) -> None:
    """Raises DataError when a window of evaluation is one that calibration reads."""
    seen = {tuple(window) for window in calibration.tokens.tolist()}
    if any(tuple(window) in seen for window in evaluation.tokens.tolist()):
        raise DataError(f"{file}: holds windows that calibration reads", "evaluate on other text")
