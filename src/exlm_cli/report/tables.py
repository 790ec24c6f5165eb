"""A table of scores as Markdown, CSV, LaTeX and in a terminal. Cells are texts; whoever makes the table rounds them."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.run_dir import write_atomically

if TYPE_CHECKING:
    from rich.console import RenderableType

SUFFIXES = {"markdown": ".md", "csv": ".csv", "latex": ".tex"}
"""Formats of files, and how their names end."""

NO_VALUE = "-"

# a backslash first, or the others' would be escaped again
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "→": r"$\to$", "<": r"\textless{}",
    ">": r"\textgreater{}",
}  # fmt: skip
_LATEX_PATTERN = re.compile("|".join(map(re.escape, _LATEX)))


@dataclass(frozen=True)
class ReportTable:
    """Rows under headings.

    Attributes:
        name: Of its files, like `table-1`.
        title: One line above it.
        columns: Headings; the first column names the row.
        groups: Rows, each with as many cells as there are columns; a line sets groups apart.
        notes: Lines below it.
        num_details: So many of the last columns say how a row came about. In a terminal, which has no room for them,
            they become lines below the table.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    notes: tuple[str, ...] = ()
    num_details: int = 0

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
    folder.mkdir(parents=True, exist_ok=True)
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

    align = ["---", *["---:"] * (len(table.columns) - 1)]
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
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
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
    """Return the table for a terminal, its details and notes as lines below."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    num_shown = len(table.columns) - table.num_details
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(table.columns[:num_shown]):
        drawn.add_column(Text(name), justify="right" if index else "left")
    for group in table.groups:
        for row in group:
            drawn.add_row(*map(Text, row[:num_shown]))
        drawn.add_section()
    details = [Text(text) for row in table.rows if (text := _describe_details(table, row))]
    return Group(Text(table.title), drawn, *details, *(Text(f"note: {note}") for note in table.notes))


def _describe_details(table: ReportTable, row: Sequence[str]) -> str:
    """Return `name: 3 seeds, 5.2 M parameters`; empty where nothing is known."""
    first = len(table.columns) - table.num_details
    known = [
        f"{heading} {cell}"
        for heading, cell in zip(table.columns[first:], row[first:], strict=True)
        if cell != NO_VALUE
    ]
    return f"{row[0]}: {', '.join(known)}" if known else ""


def _latex(text: str) -> str:
    return _LATEX_PATTERN.sub(lambda match: _LATEX[match.group()], text)
