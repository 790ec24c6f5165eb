"""Progress-reporting interface: messages and bars; `cli/console.py` implements it."""

from contextlib import AbstractContextManager, nullcontext


class Bar:
    """Progress of one piece of work with a known or unknown number of steps; this base shows nothing."""

    def update(self, done: int, **fields: str) -> None:
        """Set the steps done and the short strings beside the bar (`loss="2.31"`)."""


class Progress:
    """Output of messages and bars; what a subclass does not override shows nothing."""

    def message(self, text: str) -> None:
        """Print one line that stays."""

    def bar(self, label: str, total: int | None, *, done: int = 0) -> AbstractContextManager[Bar]:
        """Show a bar with the remaining time until the context ends; `total` None: the end is unknown.

        A resumed run has `done` steps already, which do not count as work of this process.
        """
        del label, total, done
        return nullcontext(Bar())


class SilentProgress(Progress):
    """A `Progress` that shows nothing, for library callers and tests."""
