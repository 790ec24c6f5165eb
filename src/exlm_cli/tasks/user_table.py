"""Task of a user's table: a column of SMILES or text, label columns, and a split."""

from collections.abc import Sequence

import numpy as np

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.rows.records import DELIMITER_HINT, ColumnChoice
from exlm_cli.data.rows.table import Table, read_table
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.format import format_number_of, name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks.base import SPLITS, Split, SplitIndices
from exlm_cli.tasks.rows.inputs import InputRows, usable_rows
from exlm_cli.tasks.rows.labels import Labels, read_labels, read_numbers, with_decimal_points
from exlm_cli.tasks.rows.splits import RowSplit, follow_split, limit_rows, split_rows
from exlm_cli.tasks.rows.task import RowTask, table_task
from exlm_cli.tasks.sources import given_file

_OWN_NAMES = ("row", "line", "input", "problem", "in_split", "nearest_train_tanimoto")
_SPLIT_WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def load_user_table(config: CsvTaskConfig, progress: Progress) -> RowTask:
    """Read a table and split it.

    `task.files.train` holds all rows. `task.split_column` says the split of each row; without it `task.split` follows
    a file or cuts 80/10/10: text at random, molecules by scaffold by default. With `task.files.valid`, each file is a
    split, and rows are numbered on from one file to the next. `tasks/rows/labels.py` finds what the labels are. Rows
    without any label are left out, and so are unusable inputs unless `task.on_invalid` is `error`.

    Raises:
        ConfigError: The recipe does not name the file or the label columns, or its values do not fit the table.
        DataError: A file, column or cell cannot be used.
    """
    table, files = _read_files(config)
    column = _input_column(config, table)
    if not config.label_columns:
        names = name_some((f"`{name}`" for name in table.columns if name != column), limit=12)
        raise ConfigError(
            f"{table.path}: which columns hold the labels? There are {names}",
            "name them with `task.label_columns=[A,B]`",
        )
    if column in config.label_columns:
        raise ConfigError(
            f"{table.path}: `{column}` cannot be input and label at once",
            f"name other columns with `task.label_columns=[A,B]` or `task.{config.input_kind}_column=NAME`",
        )
    if column in config.descriptor_columns:
        raise ConfigError(
            f"{table.path}: `{column}` cannot be input and descriptor at once",
            "name other columns with `task.descriptor_columns=[A,B]`",
        )
    _refuse_own_names(table, config.label_columns, [f"{name}_true" for name in config.label_columns])
    label_table = with_decimal_points(table, config.label_columns) if config.decimal_comma else table
    labels = read_labels(
        label_table,
        config.label_columns,
        config.label_kind,
        missing=config.missing_values,
        positive=config.positive_class,
    )
    if labels.loss == "classes":
        _refuse_own_names(table, labels.names, ["true_class"])
    if labels.loss == "regression" and config.class_weights == "balanced":
        raise ConfigError(
            f"{table.path}: `task.class_weights: balanced` is for labels and classes; found values to predict",
            "leave it out, or say what the labels are with `task.label_kind=classes` (or `multi_label`)",
        )
    which = f"{table.path}" if files is None else f"{table.path} and {len(files) - 1} more"
    progress.message(f"{which}: {len(table):,} rows; {labels.notes[0]}")
    for note in labels.notes[1:]:  # before hours of training, what may be a slip
        progress.message(note)
    usable = usable_rows(table, table.columns[column], config, progress)
    usable = usable.without(dict.fromkeys(labels.missing, "has no label"), "without any label")
    numbers = read_numbers(table, config) if config.descriptor_columns else None
    return table_task(config, usable, labels, _split(config, usable, files, labels), numbers=numbers)


def _refuse_own_names(table: Table, names: Sequence[str], truths: Sequence[str]) -> None:
    """Refuse labels or classes with the name of a column that files of predictions have besides them."""
    if taken := [name for name in names if name in (*_OWN_NAMES, *truths)]:
        raise ConfigError(
            f"{table.path}: files of predictions have a column `{taken[0]}` of their own",
            "give the column of labels, or the class, another name",
        )


def _read_files(config: CsvTaskConfig) -> tuple[Table, SplitIndices | None]:
    """Return the rows of all files, and the rows of each split if there is a file for each."""
    files = config.files
    if files.train is None:
        raise ConfigError("no table is given", "name one with `task.files.train=FILE`")
    table = read_table(given_file(config, files.train))
    if files.valid is None:
        return table, None
    indices: SplitIndices = {"train": np.arange(len(table))}
    others: dict[Split, str | None] = {"valid": files.valid, "test": files.test}
    for split, given in others.items():
        if given is not None:
            added = read_table(given_file(config, given))
            indices[split] = np.arange(len(table), len(table) + len(added))
            table = table.joined_with(added)
    return table, indices


def _input_column(config: CsvTaskConfig, table: Table) -> str:
    """Return the column that the model reads; if none is named, one with a usual name for SMILES."""
    named = config.input_column
    if named is not None:
        table.column(named, f"choose one with `task.{config.input_kind}_column=NAME`")
        return named
    try:
        return ColumnChoice("smiles", None, "task.smiles_column").choose(str(table.path), list(table.columns))
    except DataError as error:
        if error.hint == DELIMITER_HINT:
            raise
        raise DataError(error.message, f"{error.hint}, or a column of text with `task.text_column=NAME`") from error


def _split(config: CsvTaskConfig, usable: InputRows, files: SplitIndices | None, labels: Labels) -> RowSplit:
    if files is not None:
        return limit_rows(config, follow_split("files", files, usable))
    if config.split_column is not None:
        return limit_rows(config, _split_by_column(config.split_column, usable))
    return split_rows(config, usable, labels.classes)


def _split_by_column(column: str, usable: InputRows) -> RowSplit:
    table = usable.table
    parts: dict[Split, list[int]] = {split: [] for split in SPLITS}
    num_empty = 0
    for row, cell in enumerate(
        table.column(column, "name the column that says train, valid or test with `task.split_column=NAME`")
    ):
        split = _SPLIT_WORDS.get(cell.lower())
        if split is not None:
            parts[split].append(row)
        elif cell:
            raise DataError(
                f"{table.where(row)}: `{column}` is `{cell}`; accepted: train, valid, test",
                "correct the cell, or leave it empty to leave the row out",
            )
        else:
            num_empty += 1
    for needed in ("train", "valid"):
        if not parts[needed]:
            raise DataError(
                f"{table.path}: no row has `{needed}` in `{column}`",
                "training and validation rows are needed; test rows may be missing",
            )
    named = {split: np.array(part, dtype=np.int64) for split, part in parts.items() if part}
    notes = [f"{format_number_of(num_empty, 'row')} in no split: `{column}` is empty"] if num_empty else []
    return follow_split("column", named, usable, notes)
