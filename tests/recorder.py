"""A progress that keeps what is said, how far its bars came and what its tables show."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from exlm_cli.progress import Bar, Board, SilentProgress


class RecordedBar(Bar):
    def __init__(self, label: str, total: int | None, begun_at: int) -> None:
        self.label, self.total, self.begun_at = label, total, begun_at
        self.done: list[int] = []
        self.fields: dict[str, str] = {}

    def update(self, done: int, **fields: str) -> None:
        self.done.append(done)
        self.fields = fields


class RecordedBoard(Board):
    """Text of each cell by row and column, and whether it is done."""

    def __init__(self, rows: Sequence[str], columns: Sequence[str]) -> None:
        self.rows, self.columns = [*rows], [*columns]
        self.cells: dict[tuple[str, str], tuple[str, bool]] = {}

    def show(self, row: str, column: str, text: str, *, is_done: bool = False) -> None:
        self.cells[row, column] = text, is_done


class Recorder(SilentProgress):
    """Keeps what is said, in order, the bars and the tables."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.bars: list[RecordedBar] = []
        self.boards: list[RecordedBoard] = []

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        self.bars.append(RecordedBar(label, total, done))
        yield self.bars[-1]

    @contextmanager
    def board(self, title: str, rows: Sequence[str], columns: Sequence[str]) -> Iterator[Board]:
        self.boards.append(RecordedBoard(rows, columns))
        yield self.boards[-1]

    def message(self, text: str) -> None:
        self.said.append(text)
