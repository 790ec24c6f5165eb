"""Exceptions of the package; `cli/app.py` prints an `ExlmError` as an `error:` and a `hint:` line, no traceback."""

import copyreg
from typing import Any


class ExlmError(Exception):
    """A mistake that the user can correct.

    Args:
        message: One line: what was given, what was expected, where it came from.
        hint: What to do next; never empty.

    Attributes:
        reporter: The rank that prints the error where several train together; None: the first rank of each node.
    """

    exit_code = 2
    reporter: int | None = None

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave a worker process with all attributes; Python would call the class with the message alone."""
        return copyreg.__newobj__, (type(self), self.message), self.__dict__  # type: ignore[attr-defined]


class ConfigError(ExlmError):
    """A recipe, an override or a combination of values that is not accepted."""


class DataError(ExlmError):
    """An input file, folder, Hub name or row that cannot be used."""


class HubError(DataError):
    """A data set that cannot be read from the Hub, perhaps for now only."""


class TokenizerError(ExlmError):
    """A tokenizer file that cannot be read or does not fit."""


class CheckpointError(ExlmError):
    """A checkpoint or run directory that is missing, damaged, of another kind or version, or cannot be written."""


class DivergedError(ExlmError):
    """A loss or gradient that is not finite."""

    exit_code = 1


class BackendError(ExlmError):
    """An alignment backend that was requested by name and is not available."""


class RankError(ExlmError):
    """Another rank failed, was lost, or did not answer; `reporter` is the rank that prints it."""

    def __init__(self, message: str, hint: str, reporter: int, exit_code: int = 2) -> None:
        super().__init__(message, hint)
        self.reporter, self.exit_code = reporter, exit_code


class InterruptedRunError(ExlmError):
    """A run that a signal stopped, usually after it saved a checkpoint; the exit code is the shell's, 128 + signal."""

    def __init__(self, message: str, hint: str, signal_number: int) -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + signal_number


class ShapeError(ValueError):
    """Tensors whose axes disagree; for callers of the library, never for users of the command."""
