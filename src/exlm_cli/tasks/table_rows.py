"""Rows of a user's table as a model reads them: the usable rows of a task, and all rows of a file to predict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import CsvTaskConfig, InputKind, RowTaskConfig
from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.records import ColumnChoice, SkippedRow
from exlm_cli.data.rows.table import Table, read_table
from exlm_cli.errors import DataError
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import SPLITS, FloatArray, Split, name_some
from exlm_cli.tasks.molecules import Molecule, model_smiles, read_molecules, repeated_molecules

_SKIP_HINT = "`task.on_invalid=skip` leaves such rows out and lists them"
_MAX_LISTED = 20


@dataclass(frozen=True)
class UsableRows:
    """Rows of a table that a task can use.

    Attributes:
        table: The whole table, of R rows.
        inputs: (R) text or SMILES of each row, as the file has it.
        rows: Usable rows, counted from 0, ascending.
        molecules: (R) molecule of each row; None for text.
        notes: What a report says about rows.
        skipped: The other rows, with reasons.
    """

    table: Table
    inputs: tuple[str, ...]
    rows: IntArray
    molecules: Sequence[Molecule] | None = None
    notes: tuple[str, ...] = ()
    skipped: tuple[SkippedRow, ...] = ()

    def without(
        self, bad: Sequence[int], reason: Callable[[int], str], note: Callable[[Sequence[int]], str] | None = None
    ) -> "UsableRows":
        """Return the same rows but for some of them.

        Args:
            bad: Rows to drop; those that are dropped already are passed over.
            reason: Reason for dropping a row.
            note: Note on the dropped rows; None: no note.
        """
        dropped = np.intersect1d(self.rows, np.array(bad, dtype=np.int64)).tolist()
        if not dropped:
            return self
        skipped = tuple(self.table.skipped(row, self.inputs[row], reason(row)) for row in dropped)
        notes = self.notes if note is None else (*self.notes, note(dropped))
        return replace(self, rows=np.setdiff1d(self.rows, dropped), notes=notes, skipped=self.skipped + skipped)

    def model_inputs(self, *, canonical: bool) -> tuple[str, ...]:
        """Return what the model reads of each of the R rows: as the file has it, or canonical SMILES."""
        if self.molecules is None or not canonical:
            return self.inputs
        return model_smiles(self.inputs, self.molecules)

    def places(self, rows: Sequence[int], *, limit: int = 5) -> str:
        """Return the lines of rows, as notes name them."""
        return name_some((self.table.short_place(row) for row in rows), limit=limit)


def usable_molecules(table: Table, smiles: tuple[str, ...], config: RowTaskConfig, progress: Progress) -> UsableRows:
    """Return the rows that are molecules.

    Args:
        table: The table.
        smiles: Its column of molecules.
        config: Its `split` decides whether scaffolds are worked out, and `on_invalid` what happens to other rows.
        progress: Shows a bar.

    Raises:
        DataError: A row is not a molecule while `task.on_invalid` is `error`, or none is one.
    """
    molecules = read_molecules(smiles, progress, has_chiral_scaffolds=_has_chiral_scaffolds(config))
    bad = [row for row, molecule in enumerate(molecules) if molecule.problem is not None]
    if bad and (config.on_invalid == "error" or len(bad) == len(molecules)):
        raise DataError(f"{table.where(bad[0])}: not a molecule: {molecules[bad[0]].problem}", _SKIP_HINT)

    def describe(rows: Sequence[int]) -> str:
        listed = "; ".join(f"line {table.short_place(row)}: {molecules[row].problem}" for row in rows[:_MAX_LISTED])
        more = f"; and {len(rows) - _MAX_LISTED:,} more" if len(rows) > _MAX_LISTED else ""
        return f"left out {len(rows):,} of {len(table):,} rows that are no molecules: {listed}{more}"

    usable = UsableRows(table, smiles, np.arange(len(table)), molecules)
    usable = usable.without(bad, lambda row: str(molecules[row].problem), describe)
    odd = [row for row, molecule in enumerate(molecules) if molecule.has_odd_metal]
    if not odd:
        return usable
    note = (
        f"kept {len(odd):,} molecules in which RDKit refuses the valence of a metal and nothing else: "
        f"lines {usable.places(odd, limit=_MAX_LISTED)}"
    )
    return replace(usable, notes=(*usable.notes, note))


def usable_texts(table: Table, texts: tuple[str, ...], config: CsvTaskConfig) -> UsableRows:
    """Return the rows whose text is not empty.

    Raises:
        DataError: A text is empty while `task.on_invalid` is `error`, or all are.
    """
    empty = [row for row, text in enumerate(texts) if not text]
    if empty and (config.on_invalid == "error" or len(empty) == len(texts)):
        raise DataError(f"{table.where(empty[0])}: the text is empty", _SKIP_HINT)
    usable = UsableRows(table, texts, np.arange(len(table)))
    return usable.without(
        empty,
        lambda _: "the text is empty",
        lambda rows: f"left out {len(rows):,} rows with an empty text: lines {usable.places(rows)}",
    )


def describe_repeats(usable: UsableRows, indices: Mapping[Split, IntArray], targets_RC: FloatArray) -> list[str]:
    """Return notes on molecules that are in more than one split, and on molecules whose rows have different labels."""
    if usable.molecules is None:
        return []
    split_of = {int(row): split for split in SPLITS if split in indices for row in indices[split]}
    groups = repeated_molecules(sorted(split_of), usable.molecules)
    place = usable.table.short_place
    notes = []
    across = [group for group in groups if len({split_of[row] for row in group}) > 1]
    if across:
        named = (" = ".join(f"line {place(row)} ({split_of[row]})" for row in group) for group in across)
        notes.append(f"{len(across):,} molecules are in more than one split: {name_some(named, limit=3)}")
    differing = [group for group in groups if _labels_differ(targets_RC[group])]
    if differing:
        named = ("lines " + " and ".join(map(place, group)) for group in differing)
        notes.append(
            f"{len(differing):,} molecules occur more than once with different labels: {name_some(named, limit=3)}"
        )
    return notes


@dataclass(frozen=True)
class InputRows:
    """All R rows of a file that a model is applied to.

    Attributes:
        table: The file.
        column: Column of the text or SMILES.
        inputs: What the model reads of each row.
        problems: Why the model cannot read a row; empty where it can.
        notes: What a report says about them.
    """

    table: Table
    column: str
    inputs: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def readable(self) -> IntArray:
        """Rows that the model reads, counted from 0."""
        return np.array([row for row, problem in enumerate(self.problems) if not problem], dtype=np.int64)


def read_input_rows(
    path: Path,
    kind: InputKind,
    progress: Progress,
    *,
    column: str | None = None,
    usual_column: str | None = None,
    canonical_smiles: bool = False,
) -> InputRows:
    """Read a table that a model is applied to, or lines of text or SMILES (.txt, .smi); no row is left out.

    Args:
        path: The file.
        kind: What the model reads.
        progress: Shows a bar of molecules.
        column: Column of the text or SMILES, as the user names it.
        usual_column: Column to read if the user names none and the file has it; else one with a usual name is read.
        canonical_smiles: Let the model read RDKit's canonical SMILES.

    Raises:
        DataError: The file or its column cannot be read.
    """
    table = read_table(path, bare=kind)
    if column is None and usual_column in table.columns:
        column = usual_column
    if column is None:
        column = ColumnChoice(kind, None, f"task.{kind}_column").choose(str(path), list(table.columns))
    inputs = table.column(column, f"choose one with `task.{kind}_column=NAME`")
    if kind == "text":
        return InputRows(table, column, inputs, tuple("" if text else "is empty" for text in inputs), ())
    molecules = read_molecules(inputs, progress)
    num_odd = sum(molecule.has_odd_metal for molecule in molecules)
    note = f"{num_odd:,} molecules with a metal of a valence that RDKit refuses are read all the same"
    return InputRows(
        table,
        column,
        model_smiles(inputs, molecules) if canonical_smiles else inputs,
        tuple(molecule.problem or "" for molecule in molecules),
        (note,) if num_odd else (),
    )


def _has_chiral_scaffolds(config: RowTaskConfig) -> bool | None:
    """Return whether a split needs scaffolds with chirality, without it, or (None) no scaffolds."""
    return config.split in ("scaffold", "scaffold-chiral") if config.split.startswith("scaffold") else None


def _labels_differ(targets_GC: FloatArray) -> bool:
    """Return whether the rows of a group contradict each other in a column that both know."""
    is_missing: NDArray[np.bool_] = np.isnan(targets_GC)
    highest = np.where(is_missing, -np.inf, targets_GC).max(axis=0)
    lowest = np.where(is_missing, np.inf, targets_GC).min(axis=0)
    return bool((lowest < highest).any())
