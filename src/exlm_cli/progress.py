"""Progress-reporting interface: messages, bars and tables; `cli/console.py` implements it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext


class Bar:
    """Progress of one piece of work with a known or unknown number of steps; this base shows nothing."""

    def update(self, done: int, **fields: str) -> None:
        """Set the steps done and the short strings beside the bar (`loss="2.31"`)."""


class Board:
    """A table whose cells change while work continues; this base shows nothing."""

    def show(self, row: str, column: str, text: str, *, is_done: bool = False) -> None:
        """Set the text of one cell of the table."""


class Progress:
    """Output of messages, bars and tables; what a subclass does not override shows nothing."""

    def message(self, text: str) -> None:
        """Print one line that stays."""

    def bar(self, label: str, total: int | None, *, done: int = 0) -> AbstractContextManager[Bar]:
        """Show a bar with the remaining time until the context ends; `total` None: the end is unknown.

        A resumed run has `done` steps already, which do not count as work of this process.
        """
        del label, total, done
        return nullcontext(Bar())

    def board(self, title: str, rows: Sequence[str], columns: Sequence[str]) -> AbstractContextManager[Board]:
        """Show a table until the context ends; where nothing can be redrawn, show none."""
        del title, rows, columns
        return nullcontext(Board())


class SilentProgress(Progress):
    """A `Progress` that shows nothing, for library callers and tests."""
