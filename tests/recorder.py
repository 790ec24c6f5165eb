"""A progress that keeps what is said and how far its bars came."""

from collections.abc import Iterator
from contextlib import contextmanager

from exlm_cli.progress import Bar, SilentProgress


class RecordedBar(Bar):
    def __init__(self, label: str, total: int | None, begun_at: int) -> None:
        self.label, self.total, self.begun_at = label, total, begun_at
        self.done: list[int] = []
        self.fields: dict[str, str] = {}

    def update(self, done: int, **fields: str) -> None:
        self.done.append(done)
        self.fields = fields


class Recorder(SilentProgress):
    """Keeps what is said, in order, and the bars."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.bars: list[RecordedBar] = []

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        self.bars.append(RecordedBar(label, total, done))
        yield self.bars[-1]

    def message(self, text: str) -> None:
        self.said.append(text)
