"""Rows into sequences: which are held out, how text is packed, which SMILES are refused."""

import csv
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, final

from exlm_cli.data.rows.records import SKIPPED_COLUMNS, Row, RowKind
from exlm_cli.errors import DataError

_LARGEST_BLOCK_BYTES = 1 << 16
_SHOWN_CHARACTERS = 80


@final
class Holdout:
    """Decides, from hashes, which rows are for validation; the same rows every time.

    SMILES go by their text, so that a duplicate is never on both sides. Text goes by blocks: a document, or so many
    bytes or rows of one, so that sentences of one passage stay together; a smaller corpus has smaller blocks.
    """

    def __init__(
        self,
        kind: RowKind,
        fraction: float,
        total_bytes: int | None,
        max_rows: int | None = None,
        forced: bytes | None = None,
    ) -> None:
        """Set up.

        Args:
            kind: Of the rows.
            fraction: Share to hold out.
            total_bytes: Size of the whole corpus where it is known.
            max_rows: How many rows of it are read, where not all are.
            forced: Hold out what has this hash too (`smallest` of a first attempt that held nothing out).
        """
        self.kind: RowKind = kind
        self.smallest: bytes | None = None
        self._limit = int(fraction * 2**64).to_bytes(8)
        self._forced = forced
        largest = _LARGEST_BLOCK_BYTES
        self._block_bytes = largest if total_bytes is None else min(largest, int(total_bytes * fraction / 8))
        self._block_rows = math.inf if max_rows is None else max_rows * fraction / 8
        self._filled_bytes = 0
        self._filled_rows = 0
        self._num_blocks = 0
        self._is_held_out = False

    def takes(self, row: Row) -> bool:
        """Return whether a row is held out; rows must come in order."""
        if self.kind == "smiles":
            return self._draw(row.text)
        is_full = self._filled_bytes > self._block_bytes or self._filled_rows > self._block_rows
        if row.starts_document or is_full:
            self._num_blocks += 1
            self._filled_bytes = self._filled_rows = 0
            self._is_held_out = self._draw(f"block {self._num_blocks}")
        self._filled_bytes += len(row.text)
        self._filled_rows += 1
        return self._is_held_out

    def _draw(self, unit: str) -> bool:
        drawn = hashlib.blake2b(unit.encode(), digest_size=8, person=b"exlm hold-out").digest()
        if self.smallest is None or drawn < self.smallest:
            self.smallest = drawn
        return drawn < self._limit or drawn == self._forced


@final
class Packer:
    """Cuts the tokens of successive rows into sequences of exactly `size`, as RoBERTa's `sample-break-mode none` does.

    Documents are separated by [SEP], lines of one document by a newline.
    """

    def __init__(self, size: int, sep_id: int, newline_ids: Sequence[int]) -> None:
        self.size = size
        self._sep_ids = [sep_id]
        self._newline_ids = list(newline_ids)
        self._pending: list[int] = []
        self._has_begun = False

    def add(self, ids: Sequence[int], *, starts_document: bool) -> list[list[int]]:
        """Append a row and return the sequences that are full now."""
        if self._has_begun:
            self._pending += self._sep_ids if starts_document else self._newline_ids
        self._has_begun = True
        self._pending += ids
        num_whole = len(self._pending) // self.size * self.size
        full = [self._pending[i : i + self.size] for i in range(0, num_whole, self.size)]
        del self._pending[:num_whole]
        return full

    def finish(self) -> list[list[int]]:
        """Return the remainder, if it holds at least two tokens."""
        return [self._pending] if len(self._pending) >= 2 else []


def cut_row(ids: list[int], size: int) -> list[list[int]]:
    """Cut one row into sequences of at most `size` tokens."""
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@final
class SkippedRows:
    """Rows that cannot be used: the first one stops, or all are counted and written to a CSV."""

    def __init__(self, path: Path, on_invalid: Literal["error", "skip"]) -> None:
        self.path = path
        self.on_invalid = on_invalid
        self.num_rows = 0
        self._first = ""

    def describe(self) -> str:
        """Say how many there are, and what is wrong with the first."""
        first = f", the first: {self._first}" if self._first else ""
        return f"{self.num_rows:,} {'row was' if self.num_rows == 1 else 'rows were'} rejected{first}"

    def __enter__(self) -> Self:
        self._file = self.path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerow(SKIPPED_COLUMNS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, row: Row, reason: str) -> None:
        """Refuse a row.

        Raises:
            DataError: Invalid rows are errors here.
        """
        if self.on_invalid == "error":
            raise DataError(
                _describe(row, reason),
                "`data.on_invalid=skip` leaves such rows out and lists them in a CSV",
            )
        self.num_rows += 1
        self._first = self._first or _describe(row, reason)
        self._writer.writerow((row.source, row.number, reason, row.text))


def _describe(row: Row, reason: str) -> str:
    shown = " ".join(row.text.split())
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return f"{row.source}:{row.number}: `{shown}`: {reason}"
