"""Steps from rows to sequences: which rows are held out for validation, and how token ids are packed or cut."""

import hashlib
import math
from collections.abc import Sequence
from typing import final

from exlm_cli.data.rows.records import Row, RowKind

_LARGEST_BLOCK_CHARACTERS = 1 << 16


@final
class Holdout:
    """Chooses the validation rows by hash, so that the choice is the same every time.

    SMILES are chosen by their text, so that a duplicate is never on both sides. Text is chosen by blocks (a document,
    or a number of characters or rows of one), so that sentences of one passage stay together; a smaller corpus has
    smaller blocks.
    """

    def __init__(
        self,
        kind: RowKind,
        fraction: float,
        total_bytes: int | None,
        max_rows: int | None = None,
        forced: bytes | None = None,
    ) -> None:
        """Decide the size of blocks.

        Args:
            total_bytes: Size of the whole corpus if it is known; blocks take it for its number of characters.
            max_rows: Number of rows that are read, if not all are.
            forced: Hash of a unit to hold out as well: `smallest` of a first pass that held nothing out.
        """
        self.kind: RowKind = kind
        self.smallest: bytes | None = None
        self._limit = int(fraction * 2**64).to_bytes(8)
        self._forced = forced
        largest = _LARGEST_BLOCK_CHARACTERS
        self._block_characters = largest if total_bytes is None else min(largest, int(total_bytes * fraction / 8))
        self._block_rows = math.inf if max_rows is None else max_rows * fraction / 8
        self._filled_characters = 0
        self._filled_rows = 0
        self._num_blocks = 0
        self._is_held_out = False

    def takes(self, row: Row) -> bool:
        """Return whether a row is held out; rows must come in order."""
        if self.kind == "smiles":
            return self._draw(row.text)
        is_full = self._filled_characters > self._block_characters or self._filled_rows > self._block_rows
        if row.starts_document or is_full:
            self._num_blocks += 1
            self._filled_characters = self._filled_rows = 0
            self._is_held_out = self._draw(f"block {self._num_blocks}")
        self._filled_characters += len(row.text)
        self._filled_rows += 1
        return self._is_held_out

    def _draw(self, unit: str) -> bool:
        drawn = hashlib.blake2b(unit.encode(), digest_size=8, person=b"exlm hold-out").digest()
        if self.smallest is None or drawn < self.smallest:
            self.smallest = drawn
        return drawn < self._limit or drawn == self._forced


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Return a row in pieces of at most `size` tokens."""
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@final
class Packer:
    """Makes sequences of exactly `size` tokens each, as RoBERTa's `sample-break-mode none`.

    [SEP] separates documents, a newline the lines of one document.
    """

    def __init__(self, size: int, sep_id: int, newline_ids: Sequence[int]) -> None:
        self.size = size
        self._sep_ids = [sep_id]
        self._newline_ids = list(newline_ids)
        self._pending: list[int] = []
        self._has_begun = False

    def add(self, ids: list[int], *, starts_document: bool) -> list[list[int]]:
        """Append a row and return the sequences that are full now."""
        if self._has_begun:
            self._pending += self._sep_ids if starts_document else self._newline_ids
        self._has_begun = True
        self._pending += ids
        num_whole = len(self._pending) // self.size * self.size
        full = cut(self._pending[:num_whole], self.size)
        del self._pending[:num_whole]
        return full

    def finish(self) -> list[list[int]]:
        """Return the remainder, if it holds at least two tokens."""
        return [self._pending] if len(self._pending) >= 2 else []
