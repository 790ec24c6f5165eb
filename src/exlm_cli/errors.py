"""What can go wrong by a user's doing, and how it is said.

`cli/app.py` prints an `ExlmError` as one `error:` line and a `hint:`, and leaves with its exit code. Nothing else in
the package catches it.
"""


class ExlmError(Exception):
    """A mistake the user can mend: what was given, what was expected, where it came from, what to do.

    Args:
        message: One line, values not adjectives.
        hint: What to do next; empty where the message says all.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(ExlmError):
    """A recipe, a `--set` or a combination of values that is not accepted."""


class DataError(ExlmError):
    """An input file, directory, Hub name or row that cannot be used."""


class TokenizerError(ExlmError):
    """A tokenizer file that cannot be read or does not fit."""


class CheckpointError(ExlmError):
    """A checkpoint or run directory that is missing, truncated, altered, of another kind, or cannot be written."""


class DivergedError(ExlmError):
    """Training met a loss or gradient that is not a number; the offending batch is saved."""


class BackendError(ExlmError):
    """An alignment backend was asked for by name and cannot be had."""


class InterruptedRunError(ExlmError):
    """A run was stopped by a signal after it saved a checkpoint; the exit code is the shell's, 128 + signal."""

    def __init__(self, message: str, hint: str, signal_number: int) -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + signal_number


class ShapeError(ValueError):
    """Tensors whose axes disagree; raised to callers of the library, never at users of the command."""
