"""Rows of a user's table as a model reads them: the usable rows of a task, and all rows of a file to predict."""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from exlm_cli.config.tasks import InputKind, RowTaskConfig
from exlm_cli.data import IntArray
from exlm_cli.data.molecules import Molecule, read_molecules
from exlm_cli.data.rows.records import LINE_FORMATS, ColumnChoice, SkippedRow, format_of
from exlm_cli.data.rows.table import Table, read_table
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import SPLITS, FloatArray, Split

_MAX_LISTED = 20


@dataclass(frozen=True)
class InputRows:
    """The R rows of a table.

    Attributes:
        inputs: (R) text or SMILES of each row, as the file has it.
        problems: (R) why a row is not used; empty where it is.
        molecules: (R) molecule of each row; None for text.
        notes: What a report says about rows.
    """

    table: Table
    inputs: tuple[str, ...]
    problems: tuple[str, ...]
    molecules: Sequence[Molecule] | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> IntArray:
        """Rows that are used, counted from 0, ascending."""
        return np.array([row for row, problem in enumerate(self.problems) if not problem], dtype=np.int64)

    @property
    def keys(self) -> tuple[str, ...]:
        """(R) what identifies each row: RDKit's canonical SMILES of a molecule, or the text."""
        return self.model_inputs(canonical=True)

    @property
    def skipped(self) -> tuple[SkippedRow, ...]:
        """Rows that are not used, with reasons."""
        reasons = zip(self.inputs, self.problems, strict=True)
        return tuple(self.table.skipped(row, text, why) for row, (text, why) in enumerate(reasons) if why)

    def without(self, reasons: Mapping[int, str], what: str) -> "InputRows":
        """Drop the rows in `reasons`; a note counts and lists those that were still used, and says what they are."""
        dropped = [row for row in sorted(reasons) if not self.problems[row]]
        if not dropped:
            return self
        problems = tuple(problem or reasons.get(row, "") for row, problem in enumerate(self.problems))
        places = self.table.short_places(dropped, limit=_MAX_LISTED)
        note = f"left out {format_number_of(len(dropped), 'row')} {what}: {places}"
        return replace(self, problems=problems, notes=(*self.notes, note))

    def model_inputs(self, *, canonical: bool) -> tuple[str, ...]:
        """Return what the model reads of each row: RDKit's canonical SMILES of a molecule, or what the file has.

        A model of SMILES as written also sees how a molecule is written. In ClinTox that gives the label away: most
        molecules that failed in trials are written without aromatic atoms, and the presence of a `c` alone has a
        ROC-AUC of 0.87.
        """
        if self.molecules is None or not canonical:
            return self.inputs
        return tuple(found.canonical or text for text, found in zip(self.inputs, self.molecules, strict=True))


def usable_rows(table: Table, inputs: tuple[str, ...], config: RowTaskConfig, progress: Progress) -> InputRows:
    """Return the rows of a table; those with a text, or those that are molecules, are used.

    Args:
        inputs: The table's column of texts or SMILES.
        config: Says whether scaffolds are worked out, as a split by scaffold needs, and what happens to unusable rows.

    Raises:
        DataError: A row cannot be used while `task.on_invalid` is `error`, or none can.
    """
    kind = config.input_kind
    chirality = config.split in ("scaffold", "scaffold-chiral") if config.is_split_by_scaffold else None
    rows = _read_rows(table, inputs, kind, progress, has_chiral_scaffolds=chirality, reads_parents=config.reads_parents)
    bad = [row for row, problem in enumerate(rows.problems) if problem]
    is_hopeless = bool(bad) and len(bad) == len(inputs)
    if bad and (config.on_invalid == "error" or is_hopeless):
        what = "not a molecule: " if kind == "smiles" else ""
        hint = "`task.on_invalid=skip` leaves such rows out and lists them"
        if is_hopeless:
            hint = f"none of the {len(bad):,} rows can be used: give another file, or another column of it"
        raise DataError(f"{table.where(bad[0])}: {what}{rows.problems[bad[0]]}", hint)
    if not bad:
        return rows
    if kind == "text":
        note = f"left out {format_number_of(len(bad), 'row')} with an empty text: {table.short_places(bad)}"
    else:
        listed = "; ".join(f"{table.short_place(row)}: {rows.problems[row]}" for row in bad[:_MAX_LISTED])
        more = f"; and {len(bad) - _MAX_LISTED:,} more" if len(bad) > _MAX_LISTED else ""
        note = f"left out {len(bad):,} of {len(table):,} rows that are not molecules: {listed}{more}"
    return replace(rows, notes=(note, *rows.notes))


def read_input_rows(
    path: Path,
    kind: InputKind,
    progress: Progress,
    *,
    column: str | None = None,
    usual_column: str | None = None,
    has_literal_tsv: bool = False,
    reads_parents: bool = False,
) -> InputRows:
    """Read a table that a model is applied to, or lines of text or SMILES (.txt, .smi); no row is left out.

    Args:
        column: Column of the text or SMILES, as the user names it.
        usual_column: Column to read if the user names none and the file has it; else one with a usual name is read.
        has_literal_tsv: Quotes in a TSV are part of its cells.
        reads_parents: Read the parent of each molecule instead of the molecule.

    Raises:
        DataError: The file or its column cannot be read.
    """
    table = read_table(path, bare=kind, has_literal_tsv=has_literal_tsv)
    notes: tuple[str, ...] = ()
    if column is None and usual_column in table.columns:
        column = usual_column
    if column is None:
        column = ColumnChoice(kind, None, f"task.{kind}_column").choose(str(path), list(table.columns))
        if usual_column is not None and format_of(path) not in LINE_FORMATS:
            notes = (f"read the column `{column}`: {path.name} has no `{usual_column}`, which the run was trained on",)
    inputs = table.column(column, f"choose one with `task.{kind}_column=NAME`")
    rows = _read_rows(table, tuple(text.strip() for text in inputs), kind, progress, reads_parents=reads_parents)
    return replace(rows, notes=(*notes, *rows.notes))


def rows_of_list(
    inputs: Sequence[str], kind: InputKind, progress: Progress, *, reads_parents: bool = False
) -> InputRows:
    """Return texts or SMILES that are in memory as rows; their lines are counted from 1."""
    column = tuple(text.strip() for text in inputs)
    table = Table(Path("rows"), {kind: column}, tuple(range(1, len(column) + 1)))
    return _read_rows(table, column, kind, progress, reads_parents=reads_parents)


def _read_rows(
    table: Table,
    inputs: tuple[str, ...],
    kind: InputKind,
    progress: Progress,
    *,
    has_chiral_scaffolds: bool | None = None,
    reads_parents: bool = False,
) -> InputRows:
    if kind == "text":
        return InputRows(table, inputs, tuple("" if text else "the text is empty" for text in inputs))
    molecules = read_molecules(inputs, progress, has_chiral_scaffolds=has_chiral_scaffolds, reads_parents=reads_parents)
    notes = []
    if odd := [row for row, molecule in enumerate(molecules) if molecule.has_odd_metal]:
        kept, places = format_number_of(len(odd), "molecule"), table.short_places(odd, limit=_MAX_LISTED)
        notes.append(f"kept {kept} in which RDKit refuses the valence of a metal and nothing else: {places}")
    changed = [row for row, molecule in enumerate(molecules) if molecule.is_parent or molecule.num_fragments > 1]
    if changed:
        count, places = format_number_of(len(changed), "molecule"), table.short_places(changed, limit=_MAX_LISTED)
        what = (
            f"read the parents (the largest fragment, uncharged) of {count}"
            if reads_parents
            else f"read {count} of several fragments, such as salts, with all of them"
        )
        notes.append(f"{what}: {places}")
    return InputRows(table, inputs, tuple(molecule.problem for molecule in molecules), molecules, tuple(notes))


def group_rows(rows: Iterable[int], keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the rows that share a key, in the order given; groups in the order of their first rows.

    Args:
        keys: Key of each row of the table.
    """
    by_key: dict[Hashable, list[int]] = {}
    for row in rows:
        by_key.setdefault(keys[row], []).append(row)
    return list(by_key.values())


def describe_repeats(rows: InputRows, indices: Mapping[Split, IntArray], targets_RC: FloatArray) -> list[str]:
    """Return notes on molecules or texts in more than one split, and on those whose rows have different labels.

    Forms of one molecule in different splits, such as a base and its salt, have a note too.
    """
    what = "text" if rows.molecules is None else "molecule"
    split_of = {int(row): split for split in SPLITS if split in indices for row in indices[split]}
    groups = [group for group in group_rows(sorted(split_of), rows.keys) if len(group) > 1]
    place = rows.table.short_place
    notes = []
    across = [group for group in groups if len({split_of[row] for row in group}) > 1]
    if across:
        named = (" = ".join(f"{place(row)} ({split_of[row]})" for row in group) for group in across)
        notes.append(f"{format_number_of(len(across), what)} in more than one split: {name_some(named, limit=3)}")
    notes += _describe_forms(rows, split_of)
    known = ([column[~np.isnan(column)] for column in targets_RC[group].T] for group in groups)
    differing = [g for g, columns in zip(groups, known, strict=True) if any(len(np.unique(c)) > 1 for c in columns)]
    if differing:
        named = (" and ".join(map(place, group)) for group in differing)
        found = format_number_of(len(differing), what)
        notes.append(f"{found} with different labels in different rows: {name_some(named, limit=3)}")
    return notes


def _describe_forms(rows: InputRows, split_of: Mapping[int, Split]) -> list[str]:
    """Return a note on molecules of one parent in different splits, such as a base and its hydrochloride."""
    if rows.molecules is None:
        return []
    keys, place = rows.keys, rows.table.short_place
    across = []
    for group in group_rows(sorted(split_of), [molecule.parent for molecule in rows.molecules]):
        forms: dict[tuple[str, Split], int] = {}
        for row in group:
            forms.setdefault((keys[row], split_of[row]), row)
        if any(a != b and s != t for (a, s), (b, t) in itertools.combinations(forms, 2)):
            across.append(list(forms.values()))
    if not across:
        return []
    named = (" and ".join(f"{place(row)} ({split_of[row]})" for row in group) for group in across)
    what = f"{format_number_of(len(across), 'molecule')} in different forms, such as a base and its salt, in different"
    advice = "`task.standardise=parent` reads them as one molecule, which a scaffold split keeps in one split"
    return [f"{what} splits: {name_some(named, limit=3)}; {advice}"]
