"""Rows that cannot be used: the first is an error, or all are listed."""

import os
from pathlib import Path
from typing import Literal, Self, final

from exlm_cli.data.corpus.kept import Kept, Listed
from exlm_cli.data.rows.records import SKIPPED_COLUMNS, Row
from exlm_cli.errors import DataError
from exlm_cli.files import csv_line
from exlm_cli.format import format_number_of, shorten

_SHOWN_CHARACTERS = 80


@final
class SkippedRows:
    """Rows that cannot be used: the first one raises, or all are counted and written to a CSV."""

    def __init__(self, path: Path, on_invalid: Literal["error", "skip"], kept: Kept | None) -> None:
        self.path = path
        self.on_invalid = on_invalid
        self.listed = Listed() if kept is None else kept.skipped
        self._is_begun = kept is not None

    def __enter__(self) -> Self:
        mode = "a" if self._is_begun else "w"
        self._file = self.path.open(mode, encoding="utf-8", errors="backslashreplace", newline="")
        if not self._is_begun:
            self._file.write(csv_line(SKIPPED_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row, reason: str) -> None:
        """Skip a row.

        Raises:
            DataError: `on_invalid` is `error`, and the row is not null.
        """
        if self.on_invalid == "error" and not row.is_null:
            raise invalid_row(row, reason)
        self.listed.num_rows += 1
        self.listed.first = self.listed.first or _describe(row, reason)
        self._file.write(csv_line((row.source, row.number, reason, row.text)))

    def sync(self) -> None:
        """Wait until the list is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def describe(self) -> str:
        """Return how many there are and what is wrong with the first, as the end of a sentence; empty for none."""
        if not self.listed.num_rows:
            return ""
        return f"; {format_number_of(self.listed.num_rows, 'row')} skipped, the first: {self.listed.first}"


def invalid_row(row: Row, reason: str) -> DataError:
    """Return the error for a row that cannot be used."""
    return DataError(_describe(row, reason), "`--on-invalid skip` skips such rows and lists them in a CSV")


def _describe(row: Row, reason: str) -> str:
    shown = shorten(" ".join(row.text.split()), _SHOWN_CHARACTERS)
    return f"{row.source}:{row.number}: `{shown}`: {reason}" if shown else f"{row.source}:{row.number}: {reason}"
