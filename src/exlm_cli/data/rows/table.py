"""A CSV or TSV file as columns, with the line each row stands on."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.data.rows.decode import csv_records, decompress, explaining_damage
from exlm_cli.data.rows.left_out import LeftOut
from exlm_cli.data.rows.readers import COMPRESSIONS, format_of
from exlm_cli.errors import DataError

_MOST_NAMED = 12
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars"}


@dataclass(frozen=True)
class Table:
    """The cells of a file, as text, blanks around them removed.

    Attributes:
        path: Where it was read from.
        columns: Cells by column, in the order of the header.
        lines: Line of the file on which each row begins, counted from 1; the header is on line 1.
        added: Of rows that come from further files: the first of them, and the file.
    """

    path: Path
    columns: dict[str, tuple[str, ...]]
    lines: tuple[int, ...]
    added: tuple[tuple[int, Path], ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str, hint: str = "") -> tuple[str, ...]:
        """Return one column.

        Args:
            name: As the header has it.
            hint: What to do where there is neither it nor one that is called almost so.

        Raises:
            DataError: There is no such column; names the nearest one, or all.
        """
        if name not in self.columns:
            raise DataError(f"{self.path}: no column `{name}`; {self._describe_columns()}", self._nearest(name) or hint)
        return self.columns[name]

    def where(self, row: int) -> str:
        """Return the place of a row, counted from 0, as errors name it: `file.csv:7`."""
        return f"{self._file_of(row)}:{self.lines[row]}"

    def short_place(self, row: int) -> str:
        """Return the line of a row, and its file's name where there are several."""
        return f"{self._file_of(row).name}:{self.lines[row]}" if self.added else str(self.lines[row])

    def left_out(self, row: int, text: str, reason: str) -> LeftOut:
        """Return a row, counted from 0, as one that is not used."""
        return LeftOut(str(self._file_of(row)), self.where(row), text, reason)

    def joined_with(self, other: "Table") -> "Table":
        """Return the rows of both, those of `other` after these.

        Raises:
            DataError: A column of this table is missing in the other.
        """
        columns = {name: cells + other.column(name) for name, cells in self.columns.items()}
        return Table(self.path, columns, self.lines + other.lines, (*self.added, (len(self), other.path)))

    def _file_of(self, row: int) -> Path:
        return next((path for start, path in reversed(self.added) if row >= start), self.path)

    def _describe_columns(self) -> str:
        names = list(self.columns)
        if len(names) == 1:
            for delimiter, words in _OTHER_DELIMITERS.items():
                if delimiter in names[0]:
                    return f"the header seems to be set apart by {words}, not by commas"
        shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
        return f"there are {shown}" + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")

    def _nearest(self, name: str) -> str:
        by_folded = {known.casefold(): known for known in reversed(self.columns)}
        close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
        return f"did you mean `{by_folded[close[0]]}`?" if close else ""


def read_table(path: Path, *, header: Sequence[str] | None = None) -> Table:
    """Read a whole `.csv` or `.tsv`, also `.gz` and `.xz`; empty lines are left out. Cells of TSV are never quoted.

    Args:
        path: The file.
        header: Names of the columns of a file that has no header.

    Raises:
        DataError: It is missing, has another format, is damaged, empty or without rows, names a column twice, or a row
            has more or fewer cells than the header.
    """
    kind = format_of(path)
    if kind not in (".csv", ".tsv"):
        accepted = ", ".join(f"{suffix}[{'|'.join(COMPRESSIONS)}]" for suffix in (".csv", ".tsv"))
        raise DataError(f"{path}: not a table that can be read: accepted are {accepted}")
    try:
        raw = path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    with raw, explaining_damage(path), decompress(path, raw) as file:
        records = csv_records(path, file, is_tsv=kind == ".tsv")
        names = list(header) if header is not None else [cell.strip() for cell in next(records, (1, []))[1]]
        if not names:
            raise DataError(f"{path}: the file is empty", "its first line must name the columns")
        check_header(path, names)
        lines, rows = [], []
        for line, record in records:
            if not record:
                continue
            if len(record) != len(names):
                raise DataError(
                    f"{path}:{line}: the row has {len(record)} cells, the header has {len(names)}",
                    "a cell that holds a comma must be quoted" if kind == ".csv" else "",
                )
            lines.append(line)
            rows.append([cell.strip() for cell in record])
    if not rows:
        raise DataError(f"{path}: there is a header and no row below it")
    return Table(path, dict(zip(names, zip(*rows, strict=True), strict=True)), tuple(lines))


def check_header(path: Path, names: Sequence[str]) -> None:
    """Refuse a header that names a column twice; one column without a name, as pandas writes an index, is allowed.

    Raises:
        DataError: It does.
    """
    seen = set()
    for name in names:
        if name in seen:
            raise DataError(f"{path}: the header names column `{name}` twice")
        seen.add(name)
