"""Tables of results: the one class that every command prints, and writes as Markdown or CSV.

An entry is a string or a `Number`, which people read rounded, as `exlm_cli.format` writes it, and programs in full.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exlm_cli.files import make_folder, write_atomically, write_csv
from exlm_cli.format import NO_VALUE, format_plain, printable, shorten_middle

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

SUFFIXES = {"markdown": ".md", "csv": ".csv"}
"""Suffixes of the files, by the name of their format."""

_ENTRY_CHARACTERS, _NOTE_CHARACTERS = 200, 2_000


@dataclass(frozen=True)
class Number:
    """A number as an entry; its text is `0.8123 ± 0.0101`, `0.8123 (0.8001 to 0.8201)` or `2.30 % (2.25 %)`.

    Attributes:
        value: NaN where there is none.
        write: Writes it and the others, a function of `exlm_cli.format`.
        std: Standard deviation, or NaN.
        low, high: Ends around it, or NaN.
        expected: What it should be, or NaN.
        missing: Text where there is no value.
    """

    value: float
    write: Callable[[float], str]
    std: float = math.nan
    low: float = math.nan
    high: float = math.nan
    expected: float = math.nan
    missing: str = NO_VALUE

    def __str__(self) -> str:
        """Return the text."""
        if math.isnan(self.value):
            return self.missing
        text = self.write(self.value)
        if not math.isnan(self.std):
            text += f" ± {self.write(self.std)}"
        if not math.isnan(self.low):
            text += f" ({self.write(self.low)} to {self.write(self.high)})"
        return text if math.isnan(self.expected) else f"{text} ({self.write(self.expected)})"

    def by_ending(self) -> dict[str, float]:
        """Return the numbers by the ending of their CSV column."""
        others = {"_std": self.std, "_low": self.low, "_high": self.high, "_expected": self.expected}
        return {"": self.value, **{end: number for end, number in others.items() if not math.isnan(number)}}


Entry = str | Number
Row = tuple[Entry, ...]


@dataclass(frozen=True)
class ReportTable:
    """Rows under headings. Printing one with rich draws it for the terminal.

    A terminal table that is too wide is cut between columns into parts that each begin with the names of the rows;
    details and notes become lines below it.

    Attributes:
        name: Name of its files, like `table-1`.
        title: One line above it.
        entries: Groups of rows, each with as many entries as there are columns; a line separates groups.
        notes: Lines below it.
        num_keys: Number of columns, the first ones, that name the row.
        num_details: Number of columns, the last ones, that describe how a row was made. A terminal shows them as lines.
        is_sparse: A terminal leaves out columns in which the last group has no value.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    entries: tuple[tuple[Row, ...], ...]
    notes: tuple[str, ...] = ()
    num_keys: int = 1
    num_details: int = 0
    is_sparse: bool = False

    @property
    def groups(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """The text of each entry."""
        return tuple(tuple(tuple(map(str, row)) for row in group) for group in self.entries)

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The text of each entry of the rows of all groups."""
        return tuple(row for group in self.groups for row in group)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Yield the title, the parts of the table, the details and the notes."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        yield Text(_shown(self.title, _NOTE_CHARACTERS))
        for part in _column_parts(self, options.max_width):
            drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
            for index in part:
                justify: Literal["left", "right"] = "left" if index < self.num_keys else "right"
                drawn.add_column(Text(_shown(self.columns[index])), justify=justify)
            for group in self.groups:
                for row in group:
                    drawn.add_row(*(Text(_shown(row[index])) for index in part))
                drawn.add_section()
            yield ""
            yield drawn
        lines = [
            *filter(None, (_describe_details(self, row) for row in self.rows)),
            *(f"note: {n}" for n in self.notes),
        ]
        if lines:
            yield ""
        yield from (Text(_shown(line, _NOTE_CHARACTERS)) for line in lines)


def write_tables(tables: Sequence[ReportTable], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write each table in each format to `<folder>/<name><suffix>`.

    CSV has plain numbers, such as 0.15 for `15 %`. The deviation of `NAME` is in a column `NAME_std`, the ends around
    it are in `NAME_low` and `NAME_high`, what it should be is in `NAME_expected`.

    Args:
        tables: Tables of different names.
        folder: Made where it does not exist.
        formats: Keys of `SUFFIXES`.

    Returns:
        The files.

    Raises:
        CheckpointError: A file cannot be written.
    """
    make_folder(folder)
    files = {folder / f"{table.name}{SUFFIXES[name]}": table for table in tables for name in formats}
    for path, table in files.items():
        if path.suffix == ".csv":
            write_csv(path, *_csv_content(table))
        else:
            write_atomically(path, as_markdown(table).encode())
    return list(files)


def _csv_content(table: ReportTable) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows; the first entry is the name of the row."""
    rows = [row for group in table.entries for row in group]
    heading, columns = [table.columns[0]], [[str(row[0]) for row in rows]]
    for index, name in enumerate(table.columns[1:], start=1):
        entries = [_plain_entries(row[index]) for row in rows]
        for end in dict.fromkeys(["", *(end for entry in entries for end in entry)]):
            heading.append(name + end)
            columns.append([entry.get(end, "") for entry in entries])
    return heading, [list(row) for row in zip(*columns, strict=True)]


def _plain_entries(entry: Entry) -> dict[str, str]:
    """Return what programs read, by the ending of its column."""
    if isinstance(entry, Number):
        return {end: format_plain(number) for end, number in entry.by_ending().items()}
    return {"": "" if entry == NO_VALUE else entry}


def as_markdown(table: ReportTable) -> str:
    """Return the table as Markdown; notes become a list."""

    def line(entries: Sequence[str]) -> str:
        return "| " + " | ".join(printable(entry).replace("\\", "\\\\").replace("|", "\\|") for entry in entries) + " |"

    align = ["---"] * table.num_keys + ["---:"] * (len(table.columns) - table.num_keys)
    lines = [f"**{printable(table.title)}**", "", line(table.columns), f"|{'|'.join(align)}|", *map(line, table.rows)]
    if table.notes:
        lines += ["", *(f"- {printable(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _shown(text: str, max_characters: int = _ENTRY_CHARACTERS) -> str:
    """Return a text as the terminal shows it."""
    return printable(shorten_middle(text, max_characters))


def _column_parts(table: ReportTable, width: int) -> list[list[int]]:
    """Cut a table into parts that fit a width; return their columns: the row names and at least one more."""
    first_detail = len(table.columns) - table.num_details
    shown = list(range(table.num_keys, first_detail))
    if table.is_sparse and table.groups:
        shown = [index for index in shown if any(row[index] != NO_VALUE for row in table.groups[-1])] or shown
    # a blank to the right of each entry, and the blank between columns
    widths = [max(map(len, entries)) + 2 for entries in zip(table.columns, *table.rows, strict=True)]
    keys = list(range(table.num_keys))
    parts: list[list[int]] = []
    room = 0
    for index in shown:
        if not parts or widths[index] > room:
            parts.append([*keys])
            room = width - sum(widths[: table.num_keys])
        parts[-1].append(index)
        room -= widths[index]
    return parts or [keys]


def _describe_details(table: ReportTable, row: Sequence[str]) -> str:
    """Return `name: seeds 3, parameters 5.2 M`; empty where nothing is known."""
    first = len(table.columns) - table.num_details
    known = [
        f"{heading} {entry}"
        for heading, entry in zip(table.columns[first:], row[first:], strict=True)
        if entry != NO_VALUE
    ]
    return f"{' '.join(row[: table.num_keys])}: {', '.join(known)}" if known else ""
