"""Progress-reporting interface: messages, bars and tables; `cli/console.py` implements it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Bar(Protocol):
    """Progress of one piece of work with a known or unknown number of steps."""

    def update(self, done: int, **fields: str) -> None:
        """Set the steps done and the short texts beside the bar (`loss="2.31"`)."""


class Board(Protocol):
    """A table whose cells change while work continues."""

    def show(self, row: str, column: str, text: str, *, is_done: bool = False) -> None:
        """Set the text of one cell of the table."""


class Progress(Protocol):
    """Output of messages, bars and tables."""

    def message(self, text: str) -> None:
        """Print one line that stays."""

    def bar(self, label: str, total: int | None, *, done: int = 0) -> AbstractContextManager[Bar]:
        """Show a bar with the remaining time until the context ends; `total` None: the end is unknown.

        A resumed run has `done` steps already, which do not count as work of this process.
        """

    def board(self, title: str, rows: Sequence[str], columns: Sequence[str]) -> AbstractContextManager[Board]:
        """Show a table until the context ends; where nothing can be redrawn, show none."""


class Silence:
    """A `Bar` and a `Board` that show nothing."""

    def update(self, done: int, **fields: str) -> None:
        """Print nothing."""

    def show(self, row: str, column: str, text: str, *, is_done: bool = False) -> None:
        """Print nothing."""


class SilentProgress:
    """A `Progress` that shows nothing, for library callers and tests."""

    def message(self, text: str) -> None:
        """Print nothing."""

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Yield a bar that shows nothing."""
        del label, total, done
        yield Silence()

    @contextmanager
    def board(self, title: str, rows: Sequence[str], columns: Sequence[str]) -> Iterator[Board]:
        """Yield a table that shows nothing."""
        del title, rows, columns
        yield Silence()
