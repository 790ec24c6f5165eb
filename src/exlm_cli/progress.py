"""How long work tells of itself, without knowing whether a terminal, a log file or nobody listens.

The engine takes a `Progress`; `cli/console.py` implements it for terminals and logs. Only that module prints.
"""

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


def format_figure(value: float, *, beside: float | None = None) -> str:
    """Return a score with four decimals, or where these would show none of it or too much, with four digits.

    Args:
        value: Of any magnitude: values to predict come in units of their own.
        beside: The figure whose spread it is, which it is written like.
    """
    magnitude = abs(value if beside is None else beside)
    return f"{value:.4f}" if magnitude == 0 or 1e-3 <= magnitude < 1e6 else f"{value:.4g}"


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
