"""Progress-reporting interface: messages, bars and tables; `cli/console.py` implements it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Bar(Protocol):
    """One running piece of work with a known or unknown number of steps."""

    def update(self, done: int, **fields: str) -> None:
        """Set how many steps are done and the short texts shown beside the bar (`loss="2.31"`)."""


class Board(Protocol):
    """A table whose cells change while work goes on."""

    def show(self, row: str, column: str, text: str, *, is_done: bool = False) -> None:
        """Set the text of one cell of the table."""


class Progress(Protocol):
    """Where messages, bars and tables go."""

    def message(self, text: str) -> None:
        """Say one line that stays."""

    def bar(self, label: str, total: int | None, *, done: int = 0) -> AbstractContextManager[Bar]:
        """Show a bar with an ETA until the context ends; `total=None` where the end is not known.

        `done` is where the work starts (a resumed run), so that the ETA counts only what this process does.
        """

    def board(self, title: str, rows: Sequence[str], columns: Sequence[str]) -> AbstractContextManager[Board]:
        """Show a table until the context ends, where it can be redrawn; elsewhere messages have to say it all."""


class _SilentBar:
    def update(self, done: int, **fields: str) -> None:
        """Say nothing."""


class SilentBoard:
    """A `Board` where no table can be redrawn."""

    def show(self, row: str, column: str, text: str, *, is_done: bool = False) -> None:
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

    @contextmanager
    def board(self, title: str, rows: Sequence[str], columns: Sequence[str]) -> Iterator[Board]:
        """Yield a table that nobody sees."""
        del title, rows, columns
        yield SilentBoard()
