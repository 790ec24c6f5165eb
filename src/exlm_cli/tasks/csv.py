"""Anybody's table: a column of SMILES or text, columns of labels, and a way to split it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.spelling import how_to_set
from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.records import ColumnChoice, SkippedRow
from exlm_cli.data.rows.table import Table, read_table
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import Split
from exlm_cli.tasks.labels import Labels, read_labels
from exlm_cli.tasks.molecules import Molecule, read_molecules, written_for_model
from exlm_cli.tasks.row_split import (
    describe_repeats,
    limit_training_rows,
    scaffold_chirality,
    split_rows,
    usable_molecules,
)
from exlm_cli.tasks.scaffold import SPLITS, SplitIndices
from exlm_cli.tasks.table_task import InputKind, TableTask, name_some
from exlm_cli.tasks.task_files import given_file

_SPLIT_WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def load_csv(config: CsvTaskConfig, progress: Progress) -> TableTask:
    """Read a table and split it.

    `task.files.train` holds all rows, which `task.split_column`, or else `task.split`, cuts 80/10/10: molecules by
    scaffold unless told otherwise, text always by chance. With `task.files.valid`, each file is a split, and rows are
    counted on from one to the next. What labels are, `tasks/labels.py` finds. Rows without any label are left out, and
    so are SMILES that are no molecules, as `task.on_invalid` says.

    Raises:
        ConfigError: Columns or files that the recipe has to name are missing, or contradict each other.
        DataError: A file, column or cell that cannot be used.
    """
    table, file_indices = _read_files(config)
    column, kind = _input_column(config, table)
    if not config.label_columns:
        raise ConfigError(
            f"{table.path}: which columns hold the labels? There are {_listed(table, column)}",
            f"name them with {how_to_set('task.label_columns', '[A,B]', '--label-columns A,B')}",
        )
    if column in config.label_columns:
        raise ConfigError(f"{table.path}: `{column}` cannot be input and label at once")
    texts = table.columns[column]
    labels = read_labels(table, config.label_columns, config.label_kind)
    if labels.loss == "regression" and config.class_weights == "balanced":
        raise ConfigError(
            f"{table.path}: `task.class_weights: balanced` is for labels and classes; found values to predict",
            f"leave it out, or say with {how_to_set('task.label_kind', 'classes|multi_label')} what the labels are",
        )
    progress.message(f"{table.path}: {len(table):,} rows; {labels.notes[0]}")
    has_label: NDArray[np.bool_] = np.asarray(~np.isnan(labels.targets).all(axis=1))
    notes = list(labels.notes)
    if not has_label.all():
        lines = name_some(table.short_place(row) for row in np.flatnonzero(~has_label).tolist())
        notes.append(f"left out {(~has_label).sum():,} rows without any label: lines {lines}")
    molecules: list[Molecule] | None = None
    if kind == "smiles":
        needs_scaffolds = file_indices is None and config.split_column is None
        chirality = scaffold_chirality(config) if needs_scaffolds else None
        molecules = read_molecules(texts, progress, chiral_scaffolds=chirality)
        rows, row_notes, left_out = usable_molecules(table, texts, molecules, config)
        texts = written_for_model(texts, molecules, canonical=config.canonical_smiles)
    else:
        rows, row_notes, left_out = _filled_rows(table, texts, config)
    notes += row_notes
    unlabelled = rows[~has_label[rows]].tolist()
    left_out += [table.skipped(row, texts[row], "has no label") for row in unlabelled]
    rows = rows[has_label[rows]]
    indices = _split(config, table, rows, file_indices, molecules, labels, notes)
    if molecules is not None:
        notes += describe_repeats(table, indices, molecules, labels.targets)
    return TableTask(
        config.name,
        kind,
        labels.loss,
        labels.names,
        texts,
        labels.targets,
        indices,
        split_name=_split_name(config, kind),
        is_balanced=config.class_weights == "balanced",
        notes=notes,
        left_out=left_out,
    )


def _read_files(config: CsvTaskConfig) -> tuple[Table, SplitIndices | None]:
    """Return the rows of all files, and where there is one for each split the rows of each."""
    files = config.files
    if files.train is None:
        raise ConfigError("no table is given", f"name one with {how_to_set('task.files.train', 'FILE')}")
    table = read_table(given_file(config, files.train))
    if files.valid is None:
        return table, None
    indices: SplitIndices = {"train": np.arange(len(table))}
    for split in ("valid", "test"):
        given = getattr(files, split)
        if given is not None:
            added = read_table(given_file(config, given))
            indices[split] = np.arange(len(table), len(table) + len(added))
            table = table.joined_with(added)
    return table, indices


def _input_column(config: CsvTaskConfig, table: Table) -> tuple[str, InputKind]:
    """Return the column that the model reads and what it holds; without one named, the one called like SMILES."""
    if config.text_column is not None:
        table.column(config.text_column, _choose("text"))
        return config.text_column, "text"
    if config.smiles_column is not None:
        table.column(config.smiles_column, _choose("smiles"))
        return config.smiles_column, "smiles"
    try:
        return ColumnChoice("smiles").choose(str(table.path), list(table.columns)), "smiles"
    except DataError as error:
        raise DataError(error.message, f"{_choose('smiles')}; a column of text with `text_column` likewise") from error


def _choose(kind: InputKind) -> str:
    return f"choose one with {how_to_set(f'task.{kind}_column', 'NAME', f'--{kind}-column NAME')}"


def _filled_rows(
    table: Table, texts: Sequence[str], config: CsvTaskConfig
) -> tuple[IntArray, list[str], list[SkippedRow]]:
    empty = [row for row, text in enumerate(texts) if not text]
    if empty and (config.on_invalid == "error" or len(empty) == len(texts)):
        raise DataError(
            f"{table.where(empty[0])}: the text is empty",
            f"{how_to_set('task.on_invalid', 'skip')} leaves such rows out and lists them",
        )
    lines = name_some(table.short_place(row) for row in empty)
    notes = [f"left out {len(empty):,} rows with an empty text: lines {lines}"] if empty else []
    left_out = [table.skipped(row, "", "the text is empty") for row in empty]
    return np.array([row for row, text in enumerate(texts) if text]), notes, left_out


def _split(
    config: CsvTaskConfig,
    table: Table,
    rows: IntArray,
    file_indices: SplitIndices | None,
    molecules: Sequence[Molecule] | None,
    labels: Labels,
    notes: list[str],
) -> SplitIndices:
    if file_indices is not None or config.split_column is not None:
        named = file_indices if file_indices is not None else _rows_by_column(config, table, notes)
        indices: SplitIndices = {split: part[np.isin(part, rows)] for split, part in named.items()}
        return limit_training_rows(config, indices, notes)
    has_one_class = labels.loss != "regression" and labels.targets.shape[1] == 1
    classes = np.nan_to_num(labels.targets[:, 0], nan=-1).tolist() if has_one_class else None
    indices, split_notes = split_rows(config, rows, len(table), molecules=molecules, classes=classes)
    notes += split_notes
    return indices


def _split_name(config: CsvTaskConfig, kind: InputKind) -> str:
    if config.files.valid is not None:
        return "files"
    if config.split_column is not None:
        return "column"
    # text has no scaffolds
    return "random" if kind == "text" and config.split != "file" else config.split


def _rows_by_column(config: CsvTaskConfig, table: Table, notes: list[str]) -> SplitIndices:
    assert config.split_column is not None
    parts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    num_empty = 0
    for row, cell in enumerate(table.column(config.split_column)):
        split = _SPLIT_WORDS.get(cell.lower())
        if split is not None:
            parts[split].append(row)
        elif cell:
            raise DataError(f"{table.where(row)}: `{config.split_column}` is `{cell}`; accepted: train, valid, test")
        else:
            num_empty += 1
    for needed in ("train", "valid"):
        if not parts[needed]:
            raise DataError(
                f"{table.path}: `{config.split_column}` says `{needed}` in no row",
                "rows to train on and rows to validate on are needed; those to test on may be missing",
            )
    if num_empty:
        notes.append(f"{num_empty:,} rows are in no split: `{config.split_column}` is empty")
    return {split: np.array(part, dtype=np.int64) for split, part in parts.items() if part}


def _listed(table: Table, without: str) -> str:
    return name_some((f"`{name}`" for name in table.columns if name != without), most=12)
