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

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichBars
from rich.segment import Segment
from rich.text import Text

from exlm_cli.cli.options import to_options
from exlm_cli.files import finite_or_none
from exlm_cli.format import format_count, format_duration, format_percent, format_value, printable, shorten_middle, wrap
from exlm_cli.launch import is_quiet
from exlm_cli.progress import Bar, Progress, SilentProgress

if TYPE_CHECKING:
    from exlm_cli.config.base import Recipe

PIPE_WIDTH = 120
"""Columns of output that does not go to a terminal, unless $COLUMNS says otherwise."""

_SHORTEST_BAR = 6
_MAX_LISTED_FILES = 8
"""More files of one kind in a folder have a line together."""
_MESSAGE_CHARACTERS, _LABEL_CHARACTERS = 2_000, 60
"""Maximum characters of a message, and of a bar's label; longer ones lose their middle."""
_LINE_EVERY_S = 10.0
_LINE_EVERY_SHARE = 0.05
_LINE_EVERY_ELAPSED_SHARE = 0.01  # a run of a day leaves hundreds of lines, not thousands
_LINE_AT_MOST_EVERY_S = 1.0


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
        self._bars: _Bars | None = None

    def message(self, text: str) -> None:
        """Print a message that stays."""
        self._console.print(_wrapped(_shown(text), self._console), soft_wrap=True)

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Show a bar until the context ends."""
        is_outer = self._bars is None
        if self._bars is None:
            self._bars = _Bars(self._console)
            self._bars.start()
        bars = self._bars
        task = bars.add_task(_label(label), total=total, completed=done, fields={})
        try:
            yield _TerminalBar(bars, task)
        finally:
            if is_outer:
                bars.stop()
                self._bars = None
            else:
                bars.remove_task(task)
                bars.refresh()


class _Bars(RichBars):
    """Bars, one a line."""

    def __init__(self, console: Console) -> None:
        self._terminal = console
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            _CountColumn(self._room_for_text),
            console=console,
            expand=True,
            refresh_per_second=4,
            # over the last thousand updates, however slow they are: a sweep may advance once in an hour
            speed_estimate_period=float("inf"),
        )

    def _room_for_text(self) -> int:
        """Return the columns right of the bar, which keeps a few."""
        labels = max((len(task.description) for task in self.tasks), default=0)
        return self._terminal.width - len("^C ") - labels - len("  ") - _SHORTEST_BAR

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bars."""
        # room for the ^C that a terminal echoes: it would wrap a full line and leave a copy of the bar behind
        for bars in super().get_renderables():
            yield Constrain(bars, self._terminal.width - len("^C "))


@dataclass(frozen=True)
class _TerminalBar(Bar):
    bars: RichBars
    task: TaskID

    def update(self, done: int, **fields: str) -> None:
        """Set how far the work is."""
        self.bars.update(self.task, completed=done, fields=fields)


class _CountColumn(TextColumn):
    """`1,200/1,500, loss 2.31, 12,345 tokens/s, 0:00:12 left`, on the right of the bar.

    On a narrow terminal the speed goes, then the other fields from the first on: count and time always fit.

    Args:
        room: Returns the columns that the text may take.
    """

    def __init__(self, room: Callable[[], int]) -> None:
        super().__init__("", markup=False)
        self._room = room

    def render(self, task: Task) -> Text:
        """Return the text of one bar."""
        end_s, left_s = (task.elapsed or 0.0, None) if task.finished else (None, task.time_remaining)
        fields = dict(task.fields["fields"])
        dropped = sorted(fields, key=lambda name: name not in ("speed", "rate"))
        text = _state(task.completed, task.total, fields, task.speed, end_s, left_s)
        while dropped and len(text) > self._room():
            fields.pop(dropped.pop(0))
            text = _state(task.completed, task.total, fields, None, end_s, left_s)
        return Text(text)


class LineProgress(Progress):
    """Lines for logs: one every ten seconds (later fewer) or twentieth of the work, at most one a second.

    Args:
        stream: Where lines go.
        clock: Seconds that only grow; for tests.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock

    def message(self, text: str) -> None:
        """Print one line that stays; nothing more is shown once its reader is gone, as `tee` is after Ctrl-C."""
        try:
            print(_shown(text), file=self._stream, flush=True)
        except OSError:  # also a full disk: the work must still reach its checkpoint
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Print progress lines until the context ends, and a last one then."""
        bar = _LineBar(_label(label), total, done, self.message, self._clock)
        yield bar
        bar.end()


class _LineBar(Bar):
    def __init__(
        self, label: str, total: int | None, done: int, print_line: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._label, self._total, self._print, self._clock = label, total, print_line, clock
        self._start_s = self._printed_s = self._advanced_s = clock()
        self._first = self._printed = self._done = done
        self._last_advance = 0
        self._fields: dict[str, str] = {}

    def update(self, done: int, **fields: str) -> None:
        """Store how far the work is, and print a line when one is due."""
        now_s = self._clock()
        if done > self._done:
            self._advanced_s, self._last_advance = now_s, done - self._done
        self._done, self._fields = done, fields
        if done == self._total:
            return  # `end` prints it
        waited_s = now_s - self._printed_s
        is_far = self._total is not None and done - self._printed >= _LINE_EVERY_SHARE * self._total
        is_long_ago = waited_s >= max(_LINE_EVERY_S, _LINE_EVERY_ELAPSED_SHARE * (now_s - self._start_s))
        if is_long_ago or (is_far and waited_s >= _LINE_AT_MOST_EVERY_S):
            self._line(is_end=False)

    def end(self) -> None:
        """Print a last line, unless nothing was done."""
        if self._done > self._first:
            self._line(is_end=True)

    def _line(self, *, is_end: bool) -> None:
        now_s = self._clock()
        elapsed_s = now_s - self._start_s
        # rate up to the last advance; time since then is subtracted, so that a slow step does not raise the time left
        worked_s = self._advanced_s - self._start_s
        rate = (self._done - self._first) / worked_s if worked_s > 0 else None
        left_s = None
        if rate and self._total is not None:
            waited_s = min(now_s - self._advanced_s, self._last_advance / rate)
            left_s = max(0.0, (self._total - self._done) / rate - waited_s)
        state = _state(self._done, self._total, self._fields, rate, elapsed_s if is_end else None, left_s)
        self._print(f"{self._label}: {state}")
        self._printed_s, self._printed = now_s, self._done


def emit_text(text: str) -> None:
    """Write a result, its control characters as escapes; with several ranks, only rank 0 does."""
    if is_quiet():
        return
    sys.stdout.write(_without_controls(text.removesuffix("\n")) + "\n")


def emit_line(text: str) -> None:
    """Write a result on one line."""
    emit_text(printable(text))


def emit_sentence(text: str) -> None:
    """Write a sentence, broken between words where it is longer than a line."""
    if not is_quiet():
        console = _stdout()
        console.print(_wrapped(printable(text), console), soft_wrap=True)


def emit_command(label: str, command: str) -> None:
    """Write a command to type next, below its label where both are longer than a line."""
    line = printable(f"{label}: {command}")
    emit_text(line if cell_len(line) <= _stdout().width else f"{printable(label)}:\n  {printable(command)}")


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

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "   ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)])

    room = _stdout().width
    lines = [line(columns)]
    for row, of_row in zip(rows, notes, strict=True):
        lines.append(line(row))
        for text in of_row:
            lines += (f"    {part}" for part in wrap(_message(text), room - 4))
    emit_text("\n".join(lines))


def emit_renderable(renderable: RenderableType) -> None:
    """Write something that rich lays out; without colours where stdout is not a terminal."""
    if is_quiet():
        return
    _stdout().print(renderable, crop=False)


def emit_tables(tables: Iterable[RenderableType]) -> None:
    """Write tables, an empty line after each."""
    for table in tables:
        emit_renderable(table)
        emit_text("")


def emit_files(files: Iterable[Path]) -> None:
    """Write which files a command wrote, one a line; many of one kind in a folder have a line together."""
    files = list(files)
    counts = Counter((file.parent, file.suffix) for file in files)
    listed: set[tuple[Path, str]] = set()
    for file in files:
        kind = file.parent, file.suffix
        if counts[kind] <= _MAX_LISTED_FILES:
            emit_line(f"wrote {file}")
        elif kind not in listed:
            emit_line(f"wrote {counts[kind]} {file.suffix} files in {file.parent}")
        listed.add(kind)


def emit_pairs(pairs: Mapping[str, object]) -> None:
    """Write what a command made, one `name  value` line each; numbers as people read them."""
    width = max(map(len, pairs))
    emit_text(
        "".join(
            f"{name.replace('_', ' '):<{width}}  {_message(format_value(value))}\n" for name, value in pairs.items()
        )
    )


def emit_error(message: str, hint: str = "", *, is_stop: bool = False) -> None:
    """Write an error to stderr: one `error:` line, an empty line, a `hint:`.

    Args:
        message: The error.
        hint: What to do next; a stop needs none.
        is_stop: The user stopped the run, which is not an error.
    """
    console = SafeConsole(stderr=True)

    def show(label: str, style: str, text: str) -> None:
        # whole in a log, where others search for it
        shown = _wrapped(f"{label}{_shown(text)}", console) if console.is_terminal else Text(f"{label}{_shown(text)}")
        shown.stylize(style, 0, len(label))
        console.print(shown, soft_wrap=True)

    show("" if is_stop else "error: ", "bold red", message)
    if hint:
        console.print()
        show("hint: ", "bold cyan", hint)


def _shown(text: str) -> str:
    """Return a message on one line of limited length, its settings as the options of the running command."""
    return _message(to_options(text))


def _wrapped(text: str, console: Console) -> Text:
    return Text("\n".join(wrap(text, console.width)))


def _message(text: str) -> str:
    return printable(shorten_middle(text, _MESSAGE_CHARACTERS))


def _label(text: str) -> str:
    return printable(shorten_middle(text, _LABEL_CHARACTERS))


def _without_controls(text: str) -> str:
    """Return a string whose lines are printable."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _stdout() -> Console:
    console = SafeConsole()
    return console if console.is_terminal or "COLUMNS" in os.environ else SafeConsole(width=PIPE_WIDTH)


def _state(
    done: float,
    total: float | None,
    fields: Mapping[str, str],
    rate: float | None,
    end_s: float | None,
    left_s: float | None,
) -> str:
    """Return `1,200/1,500, loss 2.31, 12,345 tokens/s, 0:00:12 left`.

    Args:
        done, total: Steps.
        fields: Short strings by name. Where `rows` are among them, `done` and `total` are bytes, shown as a share.
        rate: Steps a second; shown where no field is called `speed` or `rate`.
        end_s: Seconds that the work took, once it is done.
        left_s: Seconds that it will still take.
    """
    if total is None:
        parts = [format_count(done)]
    elif "rows" in fields:  # rows of a file: `done` and `total` are bytes
        parts = [format_percent(done / max(1, total), 0)]
    else:
        parts = [f"{format_count(done)}/{format_count(total)}"]
    parts += [value if name in ("speed", "rate") else f"{name} {value}" for name, value in fields.items()]
    if not {"speed", "rate"} & fields.keys() and rate is not None:
        parts.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
    if end_s is not None:
        parts.append(f"{format_duration(end_s)} in all")
    elif left_s is not None:
        parts.append(f"{format_duration(left_s)} left")
    return ", ".join(parts)
