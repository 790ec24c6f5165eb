"""Rows of a corpus that cannot be used: the first is an error, or all are listed in a CSV."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self, final

from exlm_cli.data.rows.decode import LARGEST_CSV_FIELD
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, Row
from exlm_cli.errors import DataError
from exlm_cli.files import csv_line, fsync
from exlm_cli.format import format_number_of, shorten

_SHOWN_CHARACTERS = 80


@final
class SkippedRows:
    """Rows that cannot be used: the first one raises, or all are counted and written to a CSV."""

    def __init__(self, path: Path, on_invalid: Literal["error", "skip"]) -> None:
        self.path = path
        self.on_invalid = on_invalid
        self.num_rows = 0
        self._first = ""

    def __enter__(self) -> Self:
        self._file = self.path.open("w", encoding="utf-8", errors="backslashreplace", newline="")
        self._file.write(csv_line(SKIPPED_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row, reason: str) -> None:
        """Skip a row.

        Raises:
            DataError: `on_invalid` is `error`.
        """
        if self.on_invalid == "error":
            raise invalid_row(row, reason)
        self.num_rows += 1
        self._first = self._first or _describe(row, reason)
        self._file.write(csv_line((row.source, row.number, reason, row.text)))

    def describe(self) -> str:
        """Return how many there are and what is wrong with the first, as the end of a sentence; empty for none."""
        if not self.num_rows:
            return ""
        return f"; {format_number_of(self.num_rows, 'row')} skipped, the first: {self._first}"


def invalid_row(row: Row, reason: str) -> DataError:
    """Return the error for a row that cannot be used."""
    return DataError(_describe(row, reason), "`data.on_invalid=skip` skips such rows and lists them in a CSV")


def _describe(row: Row, reason: str) -> str:
    shown = shorten(" ".join(row.text.split()), _SHOWN_CHARACTERS)
    return f"{row.source}:{row.number}: `{shown}`: {reason}" if shown else f"{row.source}:{row.number}: {reason}"


def copy_skipped(kept: Path, copy: Path, renamed: Mapping[str, str]) -> None:
    """Copy a list of skipped rows under other names of files."""
    csv.field_size_limit(LARGEST_CSV_FIELD)
    with (
        kept.open(encoding="utf-8", errors="backslashreplace", newline="") as old,
        copy.open("w", encoding="utf-8", errors="backslashreplace", newline="") as new,
    ):
        new.write(old.readline())
        for cells in csv.reader(old):
            new.write(csv_line([*(renamed.get(name, name) for name in cells[:1]), *cells[1:]]))
    fsync(copy)
