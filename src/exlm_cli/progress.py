"""How long work tells of itself, without knowing whether a terminal, a log file or nobody listens.

The engine takes a `Progress`; `cli/console.py` implements it for terminals and logs. Only that module prints.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Bar(Protocol):
    """One running piece of work with a known or unknown number of steps."""

    def update(self, done: int, **fields: str) -> None:
        """Set how many steps are done and the short texts shown beside the bar (`loss="2.31"`)."""


class Progress(Protocol):
    """Where messages and bars go."""

    def message(self, text: str) -> None:
        """Say one line that stays."""

    def bar(self, label: str, total: int | None, *, done: int = 0) -> AbstractContextManager[Bar]:
        """Show a bar with an ETA until the context ends; `total=None` where the end is not known.

        `done` is where the work starts (a resumed run), so that the ETA counts only what this process does.
        """


class _SilentBar:
    def update(self, done: int, **fields: str) -> None:
        """Say nothing."""


class SilentProgress:
    """A `Progress` for library callers and tests."""

    def message(self, text: str) -> None:
        """Say nothing."""

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Yield a bar that says nothing."""
        del label, total, done
        yield _SilentBar()
