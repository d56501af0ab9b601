"""Errors that are the user's to mend: one line, a fix, exit code 1. Anything else is our bug."""

import re


class UserError(Exception):
    """A mistake in what the user gave; `str()` is the one line shown: the problem, then the fix."""

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        text = f"{problem}; {fix}" if fix else problem
        super().__init__(re.sub(r"\s*[\r\n]+\s*", " ", text).strip())  # libraries send paragraphs


class CheckpointError(UserError):
    """A checkpoint's files, index, names, shapes or values are wrong."""


class RecipeError(UserError):
    """A recipe does not parse, leaves something undecided, or asks what its chip cannot do."""


class DataError(UserError):
    """Calibration or evaluation text is missing, malformed or too short."""


class OutputError(UserError):
    """The output folder cannot be used, or writing it failed."""
