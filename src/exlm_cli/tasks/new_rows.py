"""Rows of a user's table on their way into a model: which can be read, and their tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.records import ColumnChoice
from exlm_cli.data.rows.table import Table, read_table
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import EncodedSplit
from exlm_cli.tasks.molecules import read_molecules, written_for_model
from exlm_cli.tasks.pairs import encode_pairs

InputKind = Literal["text", "smiles"]


@dataclass(frozen=True)
class NewRows:
    """A table's rows.

    Attributes:
        table: As it was read.
        column: Of the text or SMILES.
        kind: Which of the two.
        texts: What the model reads of each row.
        problems: Of every row, why the model does not read it; empty where it does.
        notes: What was done otherwise than one might think.
    """

    table: Table
    column: str
    kind: InputKind
    texts: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def readable(self) -> IntArray:
        """Rows that the model reads, counted from 0."""
        return np.array([row for row, problem in enumerate(self.problems) if not problem], dtype=np.int64)

    def encode(self, tokenizer: Tokenizer, sequence_length: int) -> tuple[EncodedSplit, int]:
        """Return the readable rows as [CLS] text [SEP], and how many were cut."""
        token_ids, num_cut = encode_pairs([(self.texts[row],) for row in self.readable], tokenizer, sequence_length)
        return EncodedSplit(token_ids, np.zeros((len(token_ids), 1))), num_cut


def read_new_rows(
    path: Path,
    kind: InputKind,
    progress: Progress,
    *,
    column: str | None = None,
    usual_column: str | None = None,
    canonical_smiles: bool = False,
) -> NewRows:
    """Read a table that a model is to be applied to, or lines of text or SMILES (.txt, .smi); no row is left out.

    Args:
        path: Of the file.
        kind: What the model reads.
        progress: Shown how far the molecules are.
        column: Of the input, as the user says.
        usual_column: Of the input where the user says nothing, if there is such a column; else the one that is called
            like it.
        canonical_smiles: Let the model read RDKit's canonical SMILES.

    Raises:
        DataError: The file or its column cannot be read.
    """
    table = read_table(path, bare=kind)
    if column is None:
        column = usual_column if usual_column in table.columns else None
    if column is None:
        column = ColumnChoice(kind, None, f"task.{kind}_column").choose(str(path), list(table.columns))
    texts = table.column(column, f"choose one with `task.{kind}_column=NAME`")
    if kind == "text":
        return NewRows(table, column, kind, texts, tuple("" if text else "is empty" for text in texts), ())
    molecules = read_molecules(texts, progress)
    odd = sum(molecule.has_odd_metal for molecule in molecules)
    notes = (f"{odd:,} molecules with a metal of a valence that RDKit refuses are read all the same",) if odd else ()
    problems = tuple(molecule.problem or "" for molecule in molecules)
    return NewRows(
        table, column, kind, written_for_model(texts, molecules, canonical=canonical_smiles), problems, notes
    )
