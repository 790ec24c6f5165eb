"""A `Progress` that remembers what it was told."""

from collections.abc import Iterator
from contextlib import contextmanager

from exlm_cli.progress import Bar


class RecordedBar:
    def __init__(self, label: str, total: int | None) -> None:
        self.label, self.total = label, total
        self.done: list[int] = []

    def update(self, done: int, **fields: str) -> None:
        self.done.append(done)


class RecordingProgress:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.bars: list[RecordedBar] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        made = RecordedBar(label, total)
        self.bars.append(made)
        yield made
