"""Steps from rows to sequences: which rows are held out for validation or shared, and how ids are packed or cut."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import final

from exlm_cli.data.rows.records import Row, RowKind
from exlm_cli.files import JsonModel

_LARGEST_BLOCK_CHARACTERS = 1 << 16
_MOST_COMPARED = 1 << 20
"""Validation rows whose hashes are held at once: about 100 MB."""


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
            total_bytes: Size of the whole corpus if it is known; it stands for the number of characters.
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


class Overlap(JsonModel):
    """How many validation rows are training rows too.

    Attributes:
        num_compared: Validation rows that were looked for, at most a million.
        num_shared: Those that are training rows too.
        share: Their part of the characters: headings and other short texts repeat by chance in any corpus.
    """

    num_compared: int
    num_shared: int
    share: float


@final
class SharedRows:
    """Counts the validation rows whose text is a training row too; validation rows are added first.

    It holds 64-bit hashes of the first million validation rows, and no text.
    """

    def __init__(self) -> None:
        self._num_compared = self._num_shared = 0
        self._characters = self._shared_characters = 0
        self._unseen: Counter[int] = Counter()

    def add_valid(self, text: str) -> None:
        """Add a validation row."""
        if self._num_compared < _MOST_COMPARED:
            self._num_compared += 1
            self._characters += len(text)
            self._unseen[hash(text)] += 1

    def add_train(self, text: str) -> None:
        """Add a training row."""
        num_equal = self._unseen.pop(hash(text), 0)
        self._num_shared += num_equal
        self._shared_characters += num_equal * len(text)

    @property
    def overlap(self) -> Overlap:
        """What has been found so far."""
        share = self._shared_characters / max(1, self._characters)
        return Overlap(num_compared=self._num_compared, num_shared=self._num_shared, share=share)


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
