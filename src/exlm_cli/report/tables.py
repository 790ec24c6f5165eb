"""A table of scores as Markdown, CSV, LaTeX and in a terminal. Cells are texts; whoever makes the table rounds them."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exlm_cli.files import make_folder, write_atomically
from exlm_cli.format import NO_VALUE

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

SUFFIXES = {"markdown": ".md", "csv": ".csv", "latex": ".tex"}
"""Formats of files, and how their names end."""

# a backslash first, or the others' would be escaped again
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$", "<": r"\textless{}",
    ">": r"\textgreater{}", "`": "'",
}  # fmt: skip
_LATEX_PATTERN = re.compile("|".join(map(re.escape, _LATEX)))


@dataclass(frozen=True)
class ReportTable:
    """Rows under headings.

    Attributes:
        name: Of its files, like `table-1`.
        title: One line above it.
        columns: Headings.
        groups: Rows, each with as many cells as there are columns; a line sets groups apart.
        notes: Lines below it.
        num_keys: So many of the first columns name the row.
        num_details: So many of the last columns say how a row came about. In a terminal, which has no room for them,
            they become lines below the table.
        is_sparse: In a terminal, leave out columns in which the last group has no value.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    notes: tuple[str, ...] = ()
    num_keys: int = 1
    num_details: int = 0
    is_sparse: bool = False

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows of all groups."""
        return tuple(row for group in self.groups for row in group)


def write_tables(tables: Sequence[ReportTable], folder: Path, formats: Sequence[str]) -> list[Path]:
    """Write each table in each format to `<folder>/<name><suffix>`.

    Raises:
        CheckpointError: The file system refuses.
    """
    render = {"markdown": as_markdown, "csv": as_csv, "latex": as_latex}
    make_folder(folder)
    written = []
    for table in tables:
        for name in formats:
            written.append(folder / f"{table.name}{SUFFIXES[name]}")
            write_atomically(written[-1], render[name](table).encode())
    return written


def as_markdown(table: ReportTable) -> str:
    """Return the table for a document; notes become a list."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"

    align = ["---"] * table.num_keys + ["---:"] * (len(table.columns) - table.num_keys)
    lines = [f"**{table.title}**", "", line(table.columns), f"|{'|'.join(align)}|", *map(line, table.rows)]
    if table.notes:
        lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def as_csv(table: ReportTable) -> str:
    """Return headings and rows alone."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.columns, *table.rows])
    return text.getvalue()


def as_latex(table: ReportTable) -> str:
    """Return a `table` environment with `booktabs` rules."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_latex, cells)) + r" \\"

    body = ["\n".join(map(line, group)) for group in table.groups]
    notes = [rf"\par\footnotesize {_latex(note)}" for note in table.notes]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(table.title)}}}",
            rf"\begin{{tabular}}{{{'l' * table.num_keys}{'r' * (len(table.columns) - table.num_keys)}}}",
            r"\toprule",
            line(table.columns),
            r"\midrule",
            "\n\\midrule\n".join(body),
            r"\bottomrule",
            r"\end{tabular}",
            *notes,
            r"\end{table}",
            "",
        ]
    )


def as_terminal(table: ReportTable) -> "RenderableType":
    """Return the table for a terminal, details and notes as lines below; one that is too wide is cut between columns
    into parts that each begin with the names of the rows.
    """
    return _TerminalTable(table)


class _TerminalTable:
    """Knows its width only when rich draws it."""

    def __init__(self, table: ReportTable) -> None:
        self._table = table

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = self._table
        yield Text(table.title)
        for part in _column_parts(table, options.max_width):
            drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
            for index in part:
                justify: Literal["left", "right"] = "left" if index < table.num_keys else "right"
                drawn.add_column(Text(table.columns[index]), justify=justify)
            for group in table.groups:
                for row in group:
                    drawn.add_row(*(Text(row[index]) for index in part))
                drawn.add_section()
            yield ""
            yield drawn
        yield ""
        for row in table.rows:
            if text := _describe_details(table, row):
                yield Text(text)
        for note in table.notes:
            yield Text(f"note: {note}")


def _column_parts(table: ReportTable, width: int) -> list[list[int]]:
    """Return the columns of each part of a table that is cut to a width; beside the names stands at least one."""
    first_detail = len(table.columns) - table.num_details
    shown = list(range(table.num_keys, first_detail))
    if table.is_sparse and table.groups:
        shown = [index for index in shown if any(row[index] != NO_VALUE for row in table.groups[-1])] or shown
    # a blank to the right of each cell, and the blank that sets columns apart
    widths = [max(map(len, cells)) + 2 for cells in zip(table.columns, *table.rows, strict=True)]
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
        f"{heading} {cell}"
        for heading, cell in zip(table.columns[first:], row[first:], strict=True)
        if cell != NO_VALUE
    ]
    return f"{' '.join(row[: table.num_keys])}: {', '.join(known)}" if known else ""


def _latex(text: str) -> str:
    return _LATEX_PATTERN.sub(lambda match: _LATEX[match.group()], text)
