"""A whole CSV or TSV file as columns of text, with the line of each row."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.data.rows.records import (
    DELIMITER_HINT,
    LINE_FORMATS,
    RowKind,
    SkippedRow,
    format_of,
    iter_records,
    other_delimiter,
)
from exlm_cli.errors import DataError
from exlm_cli.format import name_some

TABLE_FORMATS = (".csv", ".tsv")


@dataclass(frozen=True)
class Table:
    """The cells of a file, as text, blanks around them removed.

    Attributes:
        columns: Cells by column, in the order of the header.
        lines: Line of the file on which each row begins, counted from 1; the header is on line 1.
        added: First row and file of each further file that was appended.
    """

    path: Path
    columns: dict[str, tuple[str, ...]]
    lines: tuple[int, ...]
    added: tuple[tuple[int, Path], ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str, hint: str) -> tuple[str, ...]:
        """Return one column.

        Raises:
            DataError: There is no such column; it names the columns. The hint is the nearest one, else `hint`.
        """
        if name not in self.columns:
            if found := other_delimiter(self.path, [*self.columns]):
                raise DataError(f"{self.path}: no column `{name}`; {found}", DELIMITER_HINT)
            names = name_some((f"`{known}`" for known in self.columns), limit=12)
            raise DataError(f"{self.path}: no column `{name}`; there are {names}", self._nearest(name) or hint)
        return self.columns[name]

    def where(self, row: int) -> str:
        """Return the place of a row, counted from 0, as errors name it: `file.csv:7`."""
        return f"{self._file_of(row)}:{self.lines[row]}"

    def short_place(self, row: int) -> str:
        """Return the place of a row as notes name it: `line 6`, or `a.csv:6` if there are several files."""
        return f"{self._file_of(row).name}:{self.lines[row]}" if self.added else f"line {self.lines[row]}"

    def short_places(self, rows: Sequence[int], *, limit: int = 5) -> str:
        """Return the places of rows as notes name them: `line 6`, `lines 6, 8`, or `a.csv:6, b.csv:8`."""
        if self.added or len(rows) == 1:
            return name_some(map(self.short_place, rows), limit=limit)
        return f"lines {name_some((self.lines[row] for row in rows), limit=limit)}"

    def skipped(self, row: int, text: str, reason: str) -> SkippedRow:
        """Return a row, counted from 0, as one that is not used."""
        return SkippedRow(str(self._file_of(row)), str(self.lines[row]), self.where(row), text, reason)

    def joined_with(self, other: "Table") -> "Table":
        """Return the rows of both, those of `other` after these.

        Raises:
            DataError: A column of this table is missing in the other.
        """
        columns = {
            name: cells + other.column(name, "both files need the same columns") for name, cells in self.columns.items()
        }
        return Table(self.path, columns, self.lines + other.lines, (*self.added, (len(self), other.path)))

    def _file_of(self, row: int) -> Path:
        return next((path for start, path in reversed(self.added) if row >= start), self.path)

    def _nearest(self, name: str) -> str:
        by_folded = {known.casefold(): known for known in reversed(self.columns)}
        close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
        return f"did you mean `{by_folded[close[0]]}`?" if close else ""


def read_table(path: Path, *, bare: RowKind | None = None, has_literal_tsv: bool = False) -> Table:
    """Read a whole `.csv` or `.tsv`, also `.gz` and `.xz`; empty lines are skipped, and cells may be quoted.

    With `bare`, files of lines such as `.txt` and `.smi` are tables of this one column. For "smiles" it has the first
    word of each line, and a column `name` the rest, if any. `has_literal_tsv`: quotes in a TSV are part of its cells.

    Raises:
        DataError: The file is missing, has another format, is damaged, empty or without rows, names a column twice, or
            a row has more or fewer cells than the header.
    """
    columns: dict[str, list[str]] = {}
    lines: list[int] = []
    for record in iter_records(path, formats=TABLE_FORMATS, bare=bare, has_literal_tsv=has_literal_tsv):
        if record.problem is not None:
            hint = "give each row as many cells as the header has; a cell that holds the delimiter must be quoted"
            raise DataError(f"{record.where}: {record.problem}", hint)
        lines.append(record.number)
        for name, cell in record.values.items():
            columns.setdefault(name, []).append(cell)
    is_list = format_of(path) in LINE_FORMATS
    if is_list and not any(columns.get("name", ())):
        columns.pop("name", None)
    if not lines:
        raise DataError(
            f"{path}: {'the file is empty' if is_list else 'there is a header and no row below it'}",
            "give a file that has rows",
        )
    return Table(path, {name: tuple(cells) for name, cells in columns.items()}, tuple(lines))
