"""Rows of a user's table: its cells with their lines, numbers in them, and the text or molecule that a model reads.

Numbers have a decimal point or a decimal comma, and may be bounds such as `>10000`.

Axes: R rows, C columns.
"""

import datetime
import difflib
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exlm_cli.config.tasks import InputKind, RowTaskConfig
from exlm_cli.data import IntArray
from exlm_cli.data.molecules import Molecule, parse_molecule, read_molecules
from exlm_cli.data.rows.records import (
    LINE_FORMATS,
    ColumnChoice,
    RowKind,
    SkippedRow,
    delimiter_of,
    format_of,
    iter_records,
)
from exlm_cli.errors import DataError
from exlm_cli.format import format_number_of, name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import FloatArray

TABLE_FORMATS = (".csv", ".tsv", ".parquet", ".sdf")
_MAX_LISTED = 20
_NUM_LOOKED_AT = 20
"""Different cells of a column that show whether it holds molecules."""

Parser = Callable[[str], float | None]
"""Number of a cell that is not missing; None if the cell is not a label."""
_BOUND = re.compile(r"([<>≤≥])=?\s*(.+)")
_COMMA = re.compile("[-+\N{MINUS SIGN}]?\\d*,(\\d+)(?:[eE][-+\N{MINUS SIGN}]?\\d+)?")


@dataclass(frozen=True)
class Table:
    """The cells of a file, as text, blanks around them removed.

    Attributes:
        columns: Cells by column, in the order of the header.
        lines: Line of the file on which each row begins, of Parquet its record, counted from 1; a header is on line 1.
        added: First row and file of each further file that was appended.
        delimiter: What parts the cells of CSV and TSV.
    """

    path: Path
    columns: dict[str, tuple[str, ...]]
    lines: tuple[int, ...]
    added: tuple[tuple[int, Path], ...] = ()
    delimiter: str = ","

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str, hint: str) -> tuple[str, ...]:
        """Return one column.

        Raises:
            DataError: There is no such column; it names the columns. The hint is the nearest one, else `hint`.
        """
        if name not in self.columns:
            names = name_some((f"`{known}`" for known in self.columns), limit=12)
            raise DataError(f"{self.path}: no column `{name}`; there are {names}", self._nearest(name) or hint)
        return self.columns[name]

    def with_cells(self, names: Sequence[str], change: Callable[[str], str]) -> "Table":
        """Return the table with changed cells in some columns; those that it lacks are left out."""
        changed = {name: tuple(map(change, self.columns[name])) for name in names if name in self.columns}
        return replace(self, columns=self.columns | changed)

    def blanked(self, kept: IntArray, names: Sequence[str]) -> "Table":
        """Return the table with empty cells in some columns of all rows but those kept."""
        rows = set(kept.tolist())
        blank = {name: tuple(c if i in rows else "" for i, c in enumerate(self.columns[name])) for name in names}
        return replace(self, columns=self.columns | blank)

    def where(self, row: int) -> str:
        """Return the place of a row, counted from 0, as errors name it: `file.csv:7`, or `file.parquet, record 6`."""
        path, unit = self._file_of(row), self._unit(row)
        return f"{path}:{self.lines[row]}" if unit == "line" else f"{path}, {unit} {self.lines[row]}"

    def short_place(self, row: int) -> str:
        """Return the place of a row as notes name it: `line 6`, or `a.csv:6` if there are several files."""
        return f"{self._file_of(row).name}:{self.lines[row]}" if self.added else f"{self._unit(row)} {self.lines[row]}"

    def short_places(self, rows: Sequence[int], *, limit: int = 5) -> str:
        """Return the places of rows as notes name them: `line 6`, `lines 6, 8`, or `a.csv:6, b.csv:8`."""
        if self.added or len(rows) == 1:
            return name_some(map(self.short_place, rows), limit=limit)
        return f"{self._unit(0)}s {name_some((self.lines[row] for row in rows), limit=limit)}"

    def skipped(self, row: int, text: str, reason: str) -> SkippedRow:
        """Return a row, counted from 0, as one that is not used."""
        return SkippedRow(str(self._file_of(row)), str(self.lines[row]), self.where(row), text, reason)

    def joined_with(self, other: "Table") -> "Table":
        """Return the rows of both, those of `other` after these.

        Raises:
            DataError: A column of this table is missing in the other.
        """
        columns = {
            name: cells + other.column(name, "both files need the same columns") for name, cells in self.columns.items()
        }
        added = (*self.added, (len(self), other.path))
        return replace(self, columns=columns, lines=self.lines + other.lines, added=added)

    def _file_of(self, row: int) -> Path:
        return next((path for start, path in reversed(self.added) if row >= start), self.path)

    def _unit(self, row: int) -> str:
        return "record" if format_of(self._file_of(row)) == ".parquet" else "line"

    def _nearest(self, name: str) -> str:
        by_folded = {known.casefold(): known for known in reversed(self.columns)}
        close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
        return f"did you mean `{by_folded[close[0]]}`?" if close else ""


def read_table(path: Path, *, bare: RowKind | None = None, has_literal_tsv: bool = False) -> Table:
    """Read a whole `.csv`, `.tsv`, `.parquet` or `.sdf`, also `.gz`; empty lines are skipped, and cells may be quoted.

    Values of Parquet become text: a missing one an empty cell, a date as in ISO 8601. A property that a molecule of SDF
    lacks is an empty cell.

    With `bare`, files of lines such as `.txt` and `.smi` are tables of this one column. For "smiles" it has the first
    word of each line, and a column `name` the rest, if any. `has_literal_tsv`: quotes in a TSV are part of its cells.

    Raises:
        DataError: The file is missing, has another format, is damaged, empty or without rows, names a column twice, or
            a row has more or fewer cells than the header.
    """
    columns: dict[str, list[str]] = {}
    lines: list[int] = []
    for record in iter_records(path, formats=TABLE_FORMATS, bare=bare, has_literal_tsv=has_literal_tsv):
        if record.problem is not None:
            hint = "give each row as many cells as the header has; a cell that holds the delimiter must be quoted"
            if not lines and record.problem.startswith(f"the row has {len(record.values) + 1} cells"):
                hint += "; R writes names of rows with no name in the header unless `row.names=FALSE`"
            raise DataError(f"{record.where}: {record.problem}", hint)
        lines.append(record.number)
        for name, value in record.values.items():
            column = columns.setdefault(name, [])
            column += [""] * (len(lines) - 1 - len(column))
            column.append(value if isinstance(value, str) else _as_cell(value))
    for column in columns.values():
        column += [""] * (len(lines) - len(column))
    is_list = format_of(path) in LINE_FORMATS
    if is_list and not any(columns.get("name", ())):
        columns.pop("name", None)
    if not lines:
        raise DataError(
            f"{path}: {'the file is empty' if is_list else 'there is a header and no row below it'}",
            "give a file that has rows",
        )
    texts = {name: tuple(cells) for name, cells in columns.items()}
    return Table(path, texts, tuple(lines), delimiter=delimiter_of(path, has_literal_tsv=has_literal_tsv))


def _as_cell(value: Any) -> str:
    """Return a value of Parquet as text."""
    if value is None or value != value:
        return ""
    if isinstance(value, datetime.date | datetime.datetime):
        return value.isoformat()
    return json.dumps(value, default=str) if isinstance(value, list | dict | bool) else str(value)


def with_points(table: Table, columns: Sequence[str], missing: Collection[str]) -> tuple[Table, tuple[str, ...]]:
    """Return a table whose decimal commas in some columns are points, and a note on them.

    Commas are decimal in a table whose delimiter is another, in columns that hold nothing but numbers with them, unless
    three digits follow each: `1,355` may be thousands.

    Args:
        columns: Those that it lacks are left out.
        missing: Words of missing numbers, in any case.
    """
    if table.delimiter == ",":
        return table, ()
    found, missing = [], {word.lower() for word in missing}
    for name in columns:
        cells = {cell for cell in table.columns.get(name, ()) if cell and cell.lower() not in missing}
        cells = {_BOUND.sub(r"\2", cell) for cell in cells}
        digits = {len(match[1]) for cell in cells if (match := _COMMA.fullmatch(cell))}
        if digits - {3} and all(read_number(cell, decimal_comma=True) is not None for cell in cells):
            found.append(name)
    if not found:
        return table, ()
    note = f"read the commas in {name_some(f'`{name}`' for name in found)} as decimal: 1,5 is 1.5"
    return table.with_cells(found, lambda cell: cell.replace(",", ".")), (note,)


def read_number(cell: str, *, decimal_comma: bool = False) -> float | None:
    """Return a finite number, with U+2212 as a minus too, or None; `1_000`, which Python reads as one, is none."""
    if decimal_comma:
        cell = "" if "." in cell else cell.replace(",", ".") if _COMMA.fullmatch(cell) else cell
    try:
        value = math.nan if "_" in cell else float(cell.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_bound(cell: str, number: Parser) -> tuple[float, float] | None:
    """Return what a censored value lies between: `>5` between 5 and infinity; None for other cells."""
    match = _BOUND.fullmatch(cell)
    value = None if match is None else number(match[2])
    if match is None or value is None:
        return None
    return (value, math.inf) if match[1] in ">≥" else (-math.inf, value)


def read_bounds(table: Table, columns: Sequence[str], number: Parser, targets_RC: FloatArray) -> FloatArray | None:
    """Return (R, C, 2) what each value lies between, as in `EncodedRows`; None where no cell is a bound.

    Args:
        columns: Those that the table lacks are left out.
        targets_RC: The values, NaN where one is missing or censored.
    """
    is_missing_RC = np.isnan(targets_RC)
    low_RC, high_RC = (np.where(is_missing_RC, end, targets_RC) for end in (-np.inf, np.inf))
    has_any = False
    for index, name in enumerate(columns):
        for row, cell in enumerate(table.columns.get(name, ())):
            if bound := read_bound(cell, number):
                low_RC[row, index], high_RC[row, index], has_any = *bound, True
    return np.stack([low_RC, high_RC], axis=2) if has_any else None


@dataclass(frozen=True)
class InputRows:
    """The R rows of a table.

    Attributes:
        inputs: (R) text or SMILES of each row, as the file has it; of pairs the first text.
        problems: (R) why a row is not used; empty where it is.
        molecules: (R) molecule of each row; None for text.
        notes: What a report says about rows.
        seconds: (R) second text of each pair; None: rows are no pairs.
    """

    table: Table
    inputs: tuple[str, ...]
    problems: tuple[str, ...]
    molecules: Sequence[Molecule] | None = None
    notes: tuple[str, ...] = ()
    seconds: tuple[str, ...] | None = None

    @property
    def rows(self) -> IntArray:
        """Rows that are used, counted from 0, ascending."""
        return np.array([row for row, problem in enumerate(self.problems) if not problem], dtype=np.int64)

    @property
    def keys(self) -> tuple[str, ...]:
        """(R) what identifies each row: RDKit's canonical SMILES of a molecule, a text, or two texts with NUL."""
        return tuple(map("\0".join, self.texts(canonical=True)))

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

    def texts(self, *, canonical: bool) -> list[tuple[str, ...]]:
        """Return what the model reads of each row: RDKit's canonical SMILES of a molecule, or what the file has, which
        is two texts of a pair.

        A model of SMILES as written also sees how a molecule is written. In ClinTox that gives the label away: most
        molecules that failed in trials are written without aromatic atoms, and the presence of a `c` alone has a
        ROC-AUC of 0.87.
        """
        if self.seconds is not None:
            return list(zip(self.inputs, self.seconds, strict=True))
        if self.molecules is None or not canonical:
            return [(text,) for text in self.inputs]
        return [(found.canonical or text,) for text, found in zip(self.inputs, self.molecules, strict=True)]


def usable_rows(
    table: Table,
    inputs: tuple[str, ...],
    config: RowTaskConfig,
    progress: Progress,
    seconds: tuple[str, ...] | None = None,
) -> InputRows:
    """Return the rows of a table; those with a text, or those that are molecules, are used.

    A row whose cells are the names of the columns is not used.

    Args:
        inputs: The table's column of texts or SMILES.
        seconds: Its column of the second texts of pairs; None: there are no pairs.
        config: Says whether scaffolds are worked out, as a split by scaffold needs, and what happens to unusable rows.

    Raises:
        DataError: A row cannot be used while `task.on_invalid` is `error`, or none can.
    """
    kind = config.input_kind
    chirality = config.split == "scaffold" if config.is_split_by_scaffold else None
    rows = _read_rows(
        table,
        inputs,
        kind,
        progress,
        has_chiral_scaffolds=chirality,
        reads_parents=config.reads_parents,
        finds_compounds=True,
        seconds=seconds,
    )
    headers = [row for row, cells in enumerate(zip(*table.columns.values(), strict=True)) if cells == (*table.columns,)]
    if headers:  # of files that were appended to each other
        problems = tuple("it repeats the header" if row in headers else why for row, why in enumerate(rows.problems))
        rows = replace(rows, problems=problems)
    bad = [row for row, problem in enumerate(rows.problems) if problem]
    is_hopeless = bool(bad) and len(bad) == len(inputs)
    if bad and (config.on_invalid == "error" or is_hopeless):
        what = "not a molecule: " if kind == "smiles" else ""
        hint = "`--set task.on_invalid=skip` leaves such rows out and lists them"
        if is_hopeless:
            hint = f"none of the {len(bad):,} rows can be used: give another file, or another column of it"
        raise DataError(f"{table.where(bad[0])}: {what}{rows.problems[bad[0]]}", hint)
    if not bad:
        return rows
    if kind == "text":
        kinds = {"an empty text": [row for row in bad if row not in headers], "the header again": headers}
        notes = [
            f"left out {format_number_of(len(found), 'row')} with {what}: {table.short_places(found)}"
            for what, found in kinds.items()
            if found
        ]
    else:
        listed = "; ".join(f"{table.short_place(row)}: {rows.problems[row]}" for row in bad[:_MAX_LISTED])
        more = f"; and {len(bad) - _MAX_LISTED:,} more" if len(bad) > _MAX_LISTED else ""
        notes = [f"left out {len(bad):,} of {len(table):,} rows that are not molecules: {listed}{more}"]
    return replace(rows, notes=(*notes, *rows.notes))


def describe_other_molecules(table: Table, column: str) -> list[str]:
    """Return a note on columns besides the one that is read whose first cells are molecules, such as a solvent's.

    Single atoms and pairs of them, like N and CN, are more likely codes.
    """
    found = []
    for name, cells in table.columns.items():
        several = itertools.islice(dict.fromkeys(filter(None, cells)), _NUM_LOOKED_AT)
        parsed = [] if name == column else [parse_molecule(cell)[0] for cell in several]
        if 2 * sum(molecule is not None and molecule.GetNumAtoms() > 2 for molecule in parsed) > len(parsed):
            found += [f"`{name}`"] if None not in parsed else []
    if not found:
        return []
    holds = "holds" if len(found) == 1 else "hold"
    return [
        f"warning: {name_some(found)} {holds} molecules too, which the model does not read: it reads `{column}` alone"
    ]


def read_input_columns(
    path: Path,
    kind: InputKind,
    *,
    columns: tuple[str, ...] = (),
    usual_columns: tuple[str, ...] = (),
    has_literal_tsv: bool = False,
) -> tuple[Table, list[tuple[str, ...]], tuple[str, ...]]:
    """Return a table that a model is applied to, its texts or SMILES, two of pairs, and notes; also of lines (.txt).

    Args:
        columns: Column of the text or SMILES, or both of pairs, as the user names them.
        usual_columns: Columns to read if the user names none and the file has them, both where rows are pairs; else one
            with a usual name is read.
        has_literal_tsv: As for `read_table`.

    Raises:
        DataError: The file or its column cannot be read.
    """
    table = read_table(path, bare=kind, has_literal_tsv=has_literal_tsv)
    notes: tuple[str, ...] = ()
    is_pair = len(usual_columns) == 2
    hint = "name both with `--text-column A,B`" if is_pair else f"choose one with `--{kind}-column NAME`"
    if not columns and (is_pair or set(usual_columns) <= set(table.columns)):
        columns = usual_columns
    if not columns:
        columns = (ColumnChoice(kind, is_of_task=True).choose(str(path), list(table.columns)),)
        if usual_columns and format_of(path) not in LINE_FORMATS:
            listed = f"`{columns[0]}`: {path.name} has no `{usual_columns[0]}`"
            notes = (f"read the column {listed}, which the run was trained on",)
    if len(columns) != 1 + is_pair:
        reads = "pairs of texts" if is_pair else "one text a row"
        raise DataError(f"`--text-column {','.join(columns)}`: the run reads {reads}", hint)
    return table, [tuple(text.strip() for text in table.column(column, hint)) for column in columns], notes


def read_input_rows(
    path: Path,
    kind: InputKind,
    progress: Progress,
    *,
    columns: tuple[str, ...] = (),
    usual_columns: tuple[str, ...] = (),
    has_literal_tsv: bool = False,
    reads_parents: bool = False,
) -> InputRows:
    """Read rows that a model is applied to; no row is left out.

    Args:
        columns, usual_columns, has_literal_tsv: As for `read_input_columns`.
        reads_parents: Read the parent of each molecule instead of the molecule.

    Raises:
        DataError: The file or its column cannot be read.
    """
    table, (inputs, *seconds), notes = read_input_columns(
        path, kind, columns=columns, usual_columns=usual_columns, has_literal_tsv=has_literal_tsv
    )
    second = seconds[0] if seconds else None
    rows = _read_rows(table, inputs, kind, progress, reads_parents=reads_parents, seconds=second)
    return replace(rows, notes=(*notes, *rows.notes))


def rows_of_list(
    rows: Sequence[tuple[str, ...]], kind: InputKind, progress: Progress, *, reads_parents: bool = False
) -> InputRows:
    """Return texts, pairs of texts or SMILES that are in memory as rows; their lines are counted from 1."""
    inputs, *seconds = (tuple(text.strip() for text in column) for column in zip(*rows, strict=True)) if rows else ((),)
    table = Table(Path("rows"), {kind: inputs}, tuple(range(1, len(inputs) + 1)))
    return _read_rows(
        table, inputs, kind, progress, reads_parents=reads_parents, seconds=seconds[0] if seconds else None
    )


def _read_rows(
    table: Table,
    inputs: tuple[str, ...],
    kind: InputKind,
    progress: Progress,
    *,
    has_chiral_scaffolds: bool | None = None,
    reads_parents: bool = False,
    finds_compounds: bool = False,
    seconds: tuple[str, ...] | None = None,
) -> InputRows:
    if seconds is not None:
        problems = ("" if all(pair) else "one of its two texts is empty" for pair in zip(inputs, seconds, strict=True))
        return InputRows(table, inputs, tuple(problems), seconds=seconds)
    if kind == "text":
        return InputRows(table, inputs, tuple("" if text else "the text is empty" for text in inputs))
    molecules = read_molecules(
        inputs,
        progress,
        has_chiral_scaffolds=has_chiral_scaffolds,
        reads_parents=reads_parents,
        finds_compounds=finds_compounds,
    )
    notes = []
    if odd := [row for row, molecule in enumerate(molecules) if molecule.has_odd_metal]:
        kept, places = format_number_of(len(odd), "molecule"), table.short_places(odd, limit=_MAX_LISTED)
        notes.append(f"kept {kept} in which RDKit refuses the valence of a metal and nothing else: {places}")
    if bare := [row for row, molecule in enumerate(molecules) if molecule.is_bare]:
        what = f"{len(bare):,} of {len(molecules):,} molecules have radicals, and no hydrogen on any carbon"
        places = table.short_places(bare)
        notes.append(f"warning: {what}: {places}; SMARTS and SELFIES look so when they are read as SMILES")
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
