"""The choice of validation rows of a corpus that has none of its own, by hash."""

import hashlib
import math
from typing import final

from exlm_cli.data.corpus.kept import HeldOut
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
        forced: int | None = None,
        at: HeldOut | None = None,
    ) -> None:
        """Decide the size of blocks.

        Args:
            total_bytes: Size of the whole corpus if it is known; it stands for the number of characters.
            max_rows: Number of rows that are read, if not all are.
            forced: Hash of a unit to hold out as well: the smallest of a first pass that held nothing out.
            at: How far an interrupted one had come; None: at the first row.
        """
        self.kind: RowKind = kind
        self.forced = forced
        self.at = at or HeldOut()
        self._limit = int(fraction * 2**64)
        largest = _LARGEST_BLOCK_CHARACTERS
        self._block_characters = largest if total_bytes is None else min(largest, int(total_bytes * fraction / 8))
        self._block_rows = math.inf if max_rows is None else max_rows * fraction / 8

    def takes(self, row: Row) -> bool:
        """Return whether a row is held out; rows must come in order."""
        if self.kind == "smiles":
            return self._draw(row.text)
        at = self.at
        is_full = at.filled_characters > self._block_characters or at.filled_rows > self._block_rows
        if row.starts_document or is_full:
            at.num_blocks += 1
            at.filled_characters = at.filled_rows = 0
            at.is_held_out = self._draw(f"block {at.num_blocks}")
        at.filled_characters += len(row.text)
        at.filled_rows += 1
        return at.is_held_out

    def _draw(self, unit: str) -> bool:
        drawn = int.from_bytes(hashlib.blake2b(unit.encode(), digest_size=8, person=b"exlm hold-out").digest())
        if self.at.smallest is None or drawn < self.at.smallest:
            self.at.smallest = drawn
        return drawn < self._limit or drawn == self.forced
