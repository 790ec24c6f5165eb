"""MoleculeNet (App. L, Table 9): seven sets of molecules with 0/1 labels, from local CSV files or their public home."""

import math
from pathlib import Path

import numpy as np

from exlm_cli.config.spelling import how_to_set
from exlm_cli.config.tasks import MoleculeNetTaskConfig
from exlm_cli.data.download import fetch_once
from exlm_cli.data.rows.table import Table, read_table
from exlm_cli.errors import DataError
from exlm_cli.format import format_counts
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.moleculenet_sets import IDENTIFIER_COLUMNS, MOLECULENET_SETS, SMILES_COLUMNS, MoleculeNetSet
from exlm_cli.tasks.molecules import read_molecules, written_for_model
from exlm_cli.tasks.row_split import describe_repeats, scaffold_chirality, split_rows, usable_molecules
from exlm_cli.tasks.scaffold import SPLITS, SplitIndices
from exlm_cli.tasks.table_task import TableTask, name_some
from exlm_cli.tasks.task_files import existing_folder, find_file, given_file

_MOST_ROWS_OFF = 5
"""By which a public file may differ from Table 9 for the reasons that are known."""


def load_moleculenet(config: MoleculeNetTaskConfig, progress: Progress) -> TableTask:
    """Read one set, split and ready for fine-tuning.

    The file is `task.files.train`, else `<set>.csv` (also .gz, .xz) in `task.data_dir` or its folder `moleculenet`,
    else it is fetched once. A row whose SMILES, letter by letter, stands in an earlier row is left out, and so are rows
    that are no molecules: with that the sizes of Table 9 come out. Empty labels are missing.

    Raises:
        DataError: The file is missing, cannot be fetched, is malformed or lacks a column, or a label is not 0 or 1.
    """
    known = MOLECULENET_SETS[config.name.removeprefix("moleculenet/")]
    table = read_table(_find_file(known, config, progress))
    smiles = table.column(_smiles_column(table, config))
    labels = _label_columns(known, table)
    targets_RC = _read_labels(table, labels)
    progress.message(f"{config.name}: {len(table):,} rows of {table.path}")
    molecules = read_molecules(smiles, progress, chiral_scaffolds=scaffold_chirality(config))
    rows, notes, left_out = usable_molecules(table, smiles, molecules, config)
    first_rows = {text: row for row, text in reversed(list(enumerate(smiles)))}
    is_first = np.array([first_rows[smiles[row]] == row for row in rows])
    if not is_first.all():
        lines = name_some((table.short_place(row) for row in rows[~is_first]), most=20)
        notes.append(f"left out {(~is_first).sum():,} rows whose SMILES stands in an earlier one: lines {lines}")
        for row in rows[~is_first].tolist():
            where = table.where(first_rows[smiles[row]])
            left_out.append(table.skipped(row, smiles[row], f"its SMILES stands in {where} too"))
        rows = rows[is_first]
    classes = [_class_key(row) for row in targets_RC] if len(labels) == 1 else None
    indices, split_notes = split_rows(config, rows, len(table), molecules=molecules, classes=classes)
    notes += split_notes
    if config.split.startswith("scaffold") and config.max_rows is None:
        notes += _compare_with_table_9(known, indices)
    notes += describe_repeats(table, indices, molecules, targets_RC)
    return TableTask(
        config.name,
        "smiles",
        "binary",
        labels,
        written_for_model(smiles, molecules, canonical=config.canonical_smiles),
        targets_RC,
        indices,
        split_name=config.split,
        is_balanced=config.class_weights == "balanced",
        notes=notes,
        left_out=left_out,
    )


def _find_file(known: MoleculeNetSet, config: MoleculeNetTaskConfig, progress: Progress) -> Path:
    if config.files.train is not None:
        return given_file(config, config.files.train)
    if config.data_dir is None:
        given = how_to_set("task.data_dir", "DIR", "--data-dir DIR")
        hint = f"{given} reads {known.file_names[0]}.csv (also .gz, .xz) of your own instead"
        return fetch_once(known.remote, "moleculenet", progress, hint=hint)
    folder = existing_folder(config, ("moleculenet",))
    for stem in known.file_names:
        found = find_file(folder, stem, (".csv",))
        if found is not None:
            return found
    names = " or ".join(f"{stem}.csv" for stem in known.file_names)
    raise DataError(
        f"{folder}: no {names}, nor one with .gz or .xz",
        f"{how_to_set('task.data_dir', 'DIR', '--data-dir DIR')} names the folder that holds the file",
    )


def _smiles_column(table: Table, config: MoleculeNetTaskConfig) -> str:
    if config.smiles_column is not None:
        return config.smiles_column
    return next((name for name in SMILES_COLUMNS if name in table.columns), SMILES_COLUMNS[0])


def _label_columns(known: MoleculeNetSet, table: Table) -> tuple[str, ...]:
    labels = known.labels or tuple(name for name in table.columns if name not in (*SMILES_COLUMNS, *IDENTIFIER_COLUMNS))
    for name in labels:
        table.column(name)
    if len(labels) != known.num_labels:
        raise DataError(f"{table.path}: {len(labels)} label columns, {known.name} has {known.num_labels}")
    return labels


def _read_labels(table: Table, labels: tuple[str, ...]) -> FloatArray:
    """Return (R, C) labels, NaN where a cell is empty."""
    values = {"": math.nan, "0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "nan": math.nan}
    targets = np.empty((len(table), len(labels)))
    for index, name in enumerate(labels):
        for row, cell in enumerate(table.columns[name]):
            value = values.get(cell.lower())
            if value is None:
                raise DataError(f"{table.where(row)}: `{name}` is `{cell}`; accepted: 0, 1 or empty")
            targets[row, index] = value
    return targets


def _class_key(targets_C: FloatArray) -> float:
    """One class for each row, missing being one of them (NaN is no equal of itself)."""
    return -1.0 if math.isnan(targets_C[0]) else float(targets_C[0])


def _compare_with_table_9(known: MoleculeNetSet, indices: SplitIndices) -> list[str]:
    sizes = tuple(len(indices.get(split, ())) for split in SPLITS)
    if sizes == known.table_9:
        return []
    found, printed = (format_counts(three) for three in (sizes, known.table_9))
    is_public_file = all(abs(a - b) <= _MOST_ROWS_OFF for a, b in zip(sizes, known.table_9, strict=True))
    reason = f": {known.known_difference}" if known.known_difference and is_public_file else ""
    return [f"{found} molecules, Table 9 has {printed}{reason}"]
