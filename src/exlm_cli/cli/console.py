"""The only module that prints: results to stdout, progress, messages and errors to stderr."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from exlm_cli.distributed.launch import is_quiet
from exlm_cli.files import finite_or_none
from exlm_cli.format import format_count, format_duration, format_percent, format_value, printable, shorten_middle
from exlm_cli.progress import Bar, Progress, SilentProgress

if TYPE_CHECKING:
    from exlm_cli.config.base import Recipe

PIPE_WIDTH = 120
"""Columns of output that does not go to a terminal, unless $COLUMNS says otherwise."""

_MAX_LISTED_FILES = 8
"""More files of one kind in a folder have a line together."""
_MESSAGE_CHARACTERS, _LABEL_CHARACTERS = 2_000, 60
"""Maximum characters of a message, and of a bar's label; longer ones lose their middle."""
_LINE_EVERY_S, _LINE_EVERY_SHARE = 10.0, 0.01
"""Lines of a log are this far apart, or this share of the time so far: a run of a day leaves hundreds of lines."""


def open_progress() -> Progress:
    """Return bars where stderr is a terminal, throttled plain lines where it is a file or a pipe.

    With several ranks, only rank 0 shows anything.
    """
    if is_quiet():
        return SilentProgress()
    console = SafeConsole(stderr=True)
    return TerminalProgress(console) if console.is_terminal else LineProgress(sys.stderr)


class SafeConsole(Console):
    """Console that shows control characters of names and data as escapes, so that no string moves the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of something to print."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_without_controls(segment.text), segment.style)


class TerminalProgress(Progress):
    """Bars that are redrawn, with messages above them; a bar inside another one disappears when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichBars | None = None

    def message(self, text: str) -> None:
        """Print a message that stays."""
        self._console.print(Text(_message(text)))

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Show a bar until the context ends."""
        outer = self._bars
        bars = outer or RichBars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _StateColumn(),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            console=self._console,
            refresh_per_second=4,
            # over the last thousand updates, however slow they are: a sweep may advance once in an hour
            speed_estimate_period=float("inf"),
        )
        if outer is None:
            bars.start()
        self._bars = bars
        task = bars.add_task(_label(label), total=total, completed=done, shown={})
        try:
            yield _TerminalBar(bars, task)
        finally:
            self._bars = outer
            if outer is None:
                bars.stop()
            else:
                bars.remove_task(task)
                bars.refresh()


@dataclass(frozen=True)
class _TerminalBar(Bar):
    bars: RichBars
    task: TaskID

    def update(self, done: int, **fields: str) -> None:
        """Set how far the work is."""
        self.bars.update(self.task, completed=done, shown=fields)


class _StateColumn(ProgressColumn):
    """Count, fields and speed, to the right of the bar; cut where a terminal is narrow."""

    def render(self, task: Task) -> Text:
        """Return the text of one bar."""
        state = _state(task.completed, task.total, task.fields["shown"], task.speed)
        return Text(state, no_wrap=True, overflow="ellipsis")


class LineProgress(Progress):
    """Lines for logs: one every ten seconds, later fewer.

    Args:
        stream: Where lines go.
        clock: Seconds that only grow; for tests.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock

    def message(self, text: str) -> None:
        """Print one line that stays; nothing more is shown once its reader is gone, as `tee` is after Ctrl-C."""
        try:
            print(_message(text), file=self._stream, flush=True)
        except OSError:  # also a full disk: the work must still reach its checkpoint
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Print progress lines until the context ends, and a last one then, unless nothing was done."""
        bar = _LineBar(_label(label), total, done, self.message, self._clock)
        yield bar
        if bar.done > done:
            bar.print_line(is_end=True)


class _LineBar(Bar):
    def __init__(
        self, label: str, total: int | None, done: int, print_line: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._label, self._total, self._print, self._clock = label, total, print_line, clock
        self._start_s = self._printed_s = clock()
        self._first = self.done = done
        self._fields: dict[str, str] = {}

    def update(self, done: int, **fields: str) -> None:
        """Store how far the work is, and print a line when one is due."""
        self.done, self._fields = done, fields
        now_s = self._clock()
        is_due = now_s - self._printed_s >= max(_LINE_EVERY_S, _LINE_EVERY_SHARE * (now_s - self._start_s))
        if is_due and done != self._total:
            self.print_line(is_end=False)

    def print_line(self, *, is_end: bool) -> None:
        """Print how far the work is, and how long it takes or took."""
        self._printed_s = self._clock()
        elapsed_s = self._printed_s - self._start_s
        rate = (self.done - self._first) / elapsed_s if elapsed_s > 0 else None
        line = f"{self._label}: {_state(self.done, self._total, self._fields, rate)}"
        if is_end:
            line += f", {format_duration(elapsed_s)} in all"
        elif rate and self._total is not None:
            line += f", {format_duration(max(0.0, (self._total - self.done) / rate))} left"
        self._print(line)


def _state(done: float, total: float | None, fields: Mapping[str, str], rate: float | None) -> str:
    """Return `1,200/1,500, loss 2.31, 12,345 tokens/s`.

    Args:
        done, total: Steps.
        fields: Short strings by name. Where `rows` are among them, `done` and `total` are bytes, shown as a share.
        rate: Steps a second; shown where no field is called `speed` or `rate`.
    """
    if total is None:
        parts = [format_count(done)]
    elif "rows" in fields:
        parts = [format_percent(done / max(1, total), 0)]
    else:
        parts = [f"{format_count(done)}/{format_count(total)}"]
    parts += [value if name in ("speed", "rate") else f"{name} {value}" for name, value in fields.items()]
    if not {"speed", "rate"} & fields.keys() and rate:
        parts.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
    return ", ".join(parts)


def emit_text(text: str) -> None:
    """Write a result, its control characters as escapes; with several ranks, only rank 0 does."""
    if not is_quiet():
        sys.stdout.write(_without_controls(text.removesuffix("\n")) + "\n")


def emit_line(text: str) -> None:
    """Write a result on one line, such as a command to type next."""
    emit_text(printable(text))


def emit_sentence(text: str) -> None:
    """Write a sentence, broken between words where it is longer than a line."""
    emit_renderable(Text(printable(text)))


def emit_json(value: Any) -> None:
    """Write a result for programs: paths as strings, numbers that are not finite, which JSON does not have, as null."""
    emit_text(json.dumps(finite_or_none(value), indent=1, allow_nan=False, default=os.fspath))


def emit_recipe(recipe: "Recipe", *, as_json: bool) -> None:
    """Write a recipe with every key, as YAML or for programs."""
    from exlm_cli.config.load import dump_recipe

    emit_json(recipe.as_written()) if as_json else emit_text(dump_recipe(recipe))


def emit_listing(columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[Sequence[str]]) -> None:
    """Write rows under headings, each with notes indented below it; columns after the first are set flush right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def emit_row(cells: Sequence[str]) -> None:
        first, *others = zip(cells, widths, strict=True)
        emit_text("   ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]))

    emit_row(columns)
    for row, of_row in zip(rows, notes, strict=True):
        emit_row(row)
        for text in of_row:
            emit_renderable(Padding(Text(_message(text)), (0, 0, 0, 4), expand=False))


def emit_renderable(renderable: RenderableType) -> None:
    """Write something that rich lays out; without colours where stdout is not a terminal."""
    if is_quiet():
        return
    console = SafeConsole()
    has_width = console.is_terminal or "COLUMNS" in os.environ
    (console if has_width else SafeConsole(width=PIPE_WIDTH)).print(renderable, crop=False)


def emit_tables(tables: Iterable[RenderableType]) -> None:
    """Write tables, an empty line after each."""
    for table in tables:
        emit_renderable(table)
        emit_text("")


def emit_files(files: Iterable[Path]) -> None:
    """Write which files a command wrote, one a line; many of one kind in a folder have a line together."""
    files = list(files)
    counts = Counter((file.parent, file.suffix) for file in files)
    lines = [
        f"wrote {file}"
        if (count := counts[file.parent, file.suffix]) <= _MAX_LISTED_FILES
        else f"wrote {count} {file.suffix} files in {file.parent}"
        for file in files
    ]
    for line in dict.fromkeys(lines):
        emit_line(line)


def emit_pairs(pairs: Mapping[str, object]) -> None:
    """Write what a command made, one `name  value` line each; numbers as people read them."""
    width = max(map(len, pairs))
    for name, value in pairs.items():
        emit_text(f"{name.replace('_', ' '):<{width}}  {_message(format_value(value))}")


def emit_error(message: str, hint: str = "", *, is_stop: bool = False) -> None:
    """Write an error to stderr: one `error:` line, an empty line, a `hint:`.

    Args:
        message: The error.
        hint: What to do next; a stop needs none.
        is_stop: The user stopped the run, which is not an error.
    """
    console = SafeConsole(stderr=True)
    parts = [("" if is_stop else "error: ", "bold red", message), *([("hint: ", "bold cyan", hint)] if hint else [])]
    for number, (label, style, text) in enumerate(parts):
        if number:
            console.print()
        # whole in a log, where others search for it
        console.print(Text.assemble((label, style), _message(text)), soft_wrap=not console.is_terminal)


def _message(text: str) -> str:
    """Return a text on one line of limited length."""
    return printable(shorten_middle(text, _MESSAGE_CHARACTERS))


def _label(text: str) -> str:
    return printable(shorten_middle(text, _LABEL_CHARACTERS))


def _without_controls(text: str) -> str:
    """Return a string whose lines are printable."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))
