"""Task of a user's table: a column of SMILES or text, label columns, and a split; and tables to predict.

Axes: R rows of a table, N examples of a split, C outputs.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exlm_cli.config.tasks import CsvTaskConfig, RowTaskConfig
from exlm_cli.data.rows.records import LINE_FORMATS, ColumnChoice, format_of
from exlm_cli.errors import ConfigError, DataError
from exlm_cli.format import format_number_of, name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import (
    NO_TEST_NOTE,
    SPLITS,
    FloatArray,
    NewRows,
    Split,
    SplitIndices,
    TableColumns,
    TrainedTask,
)
from exlm_cli.tasks.rows.assays import Measured, average_replicates, read_weights
from exlm_cli.tasks.rows.labels import (
    CHOOSE_COLUMNS,
    Labels,
    read_known_targets,
    read_labels,
    read_numbers,
)
from exlm_cli.tasks.rows.splits import RowSplit, describe_repeats, follow_split, limit_rows, split_rows
from exlm_cli.tasks.rows.table import (
    InputRows,
    Table,
    describe_other_molecules,
    read_input_rows,
    read_table,
    usable_rows,
    with_points,
)
from exlm_cli.tasks.rows.task import LabelledRows, RowTask, TokenStore, labelled_rows, rows_to_predict, without_log10
from exlm_cli.tasks.sources import given_file

_OWN_NAMES = ("row", "line", "input", "problem", "in_split", "nearest_train_tanimoto")
_WORD = re.compile(r"(?:^|(?<=\s))[^\W\d_]{2,}(?=[\s.,;:!?]|$)")
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
    table, files, notes = _read_files(config)
    columns = _columns_to_read(config, table)
    inputs, *seconds = (table.columns[column] for column in columns)
    usable = usable_rows(table, inputs, config, progress, seconds[0] if seconds else None)
    if config.input_kind == "smiles":
        notes = (*notes, *describe_other_molecules(table, columns[0]))
    usable = replace(usable, notes=(*notes, *usable.notes))
    labels = _labels_of(config, table, usable)
    which = f"{table.path}" if files is None else f"{table.path} and {len(files) - 1} more"
    progress.message(f"{which}: {len(table):,} rows; {labels.notes[0]}")
    for note in (*labels.notes[1:], *notes):  # before hours of training, what may be a slip
        progress.message(note)
    usable = usable.without(dict.fromkeys(labels.missing, "has no label"), "without any label")
    measured = Measured(
        labels,
        weights=None if config.weight_column is None else read_weights(usable, config.weight_column),
        numbers=read_numbers(table, config) if config.descriptor_columns else None,
    )
    return table_task(config, usable, measured, _split(config, usable, files, labels))


def _columns_to_read(config: CsvTaskConfig, table: Table) -> tuple[str, ...]:
    """Return the columns of the input; refuse labels that are missing or are columns of the input."""
    columns = _input_columns(config, table)
    if not config.label_columns:
        names = name_some((f"`{name}`" for name in table.columns if name not in columns), limit=12)
        raise ConfigError(
            f"{table.path}: which columns hold the labels? There are {names}",
            "name them with `--label-columns A,B`",
        )
    if both := set(columns) & set(config.label_columns):
        raise ConfigError(
            f"{table.path}: `{min(both)}` cannot be input and label at once",
            f"name other columns with `--label-columns A,B` or `--{config.input_kind}-column NAME`",
        )
    _refuse_own_names(table, config.label_columns, [f"{name}_true" for name in config.label_columns])
    for name in config.label_columns:  # before minutes of reading molecules
        table.column(name, CHOOSE_COLUMNS)
    return columns


def _labels_of(config: CsvTaskConfig, table: Table, usable: InputRows) -> Labels:
    # what only unusable rows have, like a row of units below the header, is no label of the task
    labels = read_labels(
        table.blanked(usable.rows, config.label_columns),
        config.label_columns,
        config.label_kind,
        missing=config.missing_values,
        positive=config.positive_class,
        decimal_comma=config.decimal_comma,
        log10=config.log10,
    )
    if labels.loss != "regression" and config.replicates == "mean":
        raise ConfigError(
            f"{table.path}: `task.replicates: mean` is for values to predict; found labels or classes",
            "leave it out: the rows of a molecule are in one split anyway",
        )
    if labels.loss == "classes":
        _refuse_own_names(table, labels.names, ["true_class"])
    if labels.loss == "regression" and config.class_weights == "balanced":
        raise ConfigError(
            f"{table.path}: `task.class_weights: balanced` is for labels and classes; found values to predict",
            "leave it out, or say what the labels are with `--set task.label_kind=classes` (or `multi_label`)",
        )
    return labels


def _refuse_own_names(table: Table, names: Sequence[str], truths: Sequence[str]) -> None:
    """Refuse labels or classes with the name of a column that files of predictions have besides them."""
    if taken := [name for name in names if name in (*_OWN_NAMES, *truths)]:
        raise ConfigError(
            f"{table.path}: files of predictions have a column `{taken[0]}` of their own",
            "give the column of labels, or the class, another name",
        )


def _read_files(config: CsvTaskConfig) -> tuple[Table, SplitIndices | None, tuple[str, ...]]:
    """Return the rows of all files, the rows of each split if there is a file for each, and notes."""
    files = config.files
    if files.train is None:
        raise ConfigError("no table is given", "name one with `--set task.files.train=FILE`")
    table, notes = _with_points(config, read_table(given_file(config, files.train)))
    if files.valid is None:
        return table, None, notes
    indices: SplitIndices = {"train": np.arange(len(table))}
    others: dict[Split, str | None] = {"valid": files.valid, "test": files.test}
    for split, given in others.items():
        if given is not None:
            added, more = _with_points(config, read_table(given_file(config, given)))
            notes += tuple(f"{split}: {note}" for note in more)
            indices[split] = np.arange(len(table), len(table) + len(added))
            table = table.joined_with(added)
    return table, indices, notes


def _with_points(config: CsvTaskConfig, table: Table) -> tuple[Table, tuple[str, ...]]:
    """Return a table without decimal commas in the columns that are read as numbers, and notes."""
    if config.decimal_comma:
        return table, ()
    names = (*config.label_columns, *config.descriptor_columns, config.weight_column or "")
    return with_points(table, names, config.missing_values)


def _input_columns(config: CsvTaskConfig, table: Table) -> tuple[str, ...]:
    """Return the column, or two of pairs, that the model reads; if none is named, one with a usual name for SMILES."""
    for named in config.input_columns:
        table.column(named, f"choose one with `--{config.input_kind}-column NAME`")
    if config.input_columns:
        return config.input_columns
    try:
        return (ColumnChoice("smiles", is_of_task=True).choose(str(table.path), list(table.columns)),)
    except DataError as error:
        hint = f"{error.hint}, or a column of text with `--text-column NAME`"
        if texts := _text_columns(table):
            holds = "holds texts" if len(texts) == 1 else "hold texts"
            option = f"`--text-column {','.join(texts[:2])}`"
            how = f"{option} reads them" + (" as pairs, and a single name one of them" if len(texts) > 1 else "")
            hint = f"{name_some(f'`{name}`' for name in texts)} {holds}: {how}"
        raise DataError(error.message, hint) from error


def _text_columns(table: Table) -> list[str]:
    """Return the columns most of whose cells are several words of letters."""
    found = []
    for name, cells in table.columns.items():
        filled = [cell for cell in cells if cell]
        if 2 * sum(len(_WORD.findall(cell)) > 2 for cell in filled) > len(filled):
            found.append(name)
    return found


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
        table.column(column, "name the column that says train, valid or test with `--split-column NAME`")
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


def table_task(
    config: RowTaskConfig,
    usable: InputRows,
    measured: Measured,
    split: RowSplit,
    notes: Sequence[str] = (),
    tokens: TokenStore | None = None,
) -> RowTask:
    """Return the task of one table, with labels, classes or values in its columns.

    Args:
        split: Rows of each split; a test split without rows is left out, with a note.
        tokens: Of the task of the same table on another split; None: there is none.

    Raises:
        DataError: The training or validation split is empty, or every training row of a user's table has one label.
    """
    whole = measured
    if isinstance(config, CsvTaskConfig) and config.replicates == "mean":
        measured, split = average_replicates(usable, measured, split)
    labels, indices = measured.labels, split.indices
    for needed in ("train", "valid"):
        if not len(indices.get(needed, ())):
            hint = "give more rows, another `task.split` (`random` fills all three), or a `task.split_file`"
            if split.name in ("files", "column", "file"):
                hint = "training and validation need rows that can be used"
            raise DataError(f"{config.name}: the split leaves no rows in `{needed}`", hint)
    tokens = tokens or TokenStore()
    examples = _examples(config, usable, measured, indices, tokens)
    task = RowTask(config.name, labels.loss, labels.names, examples)
    if isinstance(config, CsvTaskConfig):
        notes = [*notes, *_describe_constant(config, task, usable.table)]
        used = np.sort(np.concatenate([split.indices[part] for part in examples]))
        known = [labels.targets[used], *([] if labels.bounds is None else [labels.bounds[used]])]
        task.labels_sha256 = hashlib.sha256(b"".join(array.tobytes() for array in (used, *known))).hexdigest()
    task.input_kind, task.skipped = config.input_kind, usable.skipped
    task.split_name, task.split_imitates = split.name, split.imitates
    if config.class_weights == "balanced":
        task.class_weights = _balanced_weights(task)
    found = [*labels.notes, *usable.notes, *split.notes, *notes, *describe_repeats(usable, indices, labels.targets)]
    if config.input_kind == "smiles" and not config.has_canonical_smiles:
        found.append("SMILES are read as written: their spelling alone may give labels away")
    if "test" in indices and "test" not in examples:
        found.append(NO_TEST_NOTE)
    if "test" not in examples:
        found.append("the scores are those of `valid`, on which the best epoch is chosen too: they are optimistic")
    task.selection_metric, task.is_greater_better, metric_notes = _choose_metric(task)
    task.notes = (*found, *_describe_targets(task), *metric_notes)

    def resplit(split_seed: int) -> RowTask:
        changed = config.model_copy(update={"split_seed": split_seed})
        return table_task(changed, usable, whole, split_rows(changed, usable, labels.classes), tokens=tokens)

    task.resplit = resplit
    return task


def _examples(
    config: RowTaskConfig, usable: InputRows, measured: Measured, indices: SplitIndices, tokens: TokenStore
) -> dict[Split, LabelledRows]:
    weights = measured.weights
    if weights is not None:
        weights = weights / max(weights[indices["train"]].mean(), np.finfo(float).tiny)
    by_row = {"numbers": measured.numbers, "bounds": measured.labels.bounds, "weights": weights}
    return {
        part: labelled_rows(
            usable,
            rows,
            measured.labels.targets[rows],
            canonical_smiles=config.has_canonical_smiles,
            tokens=tokens,
            is_log10=config.is_log10,
            **{name: of_rows[rows] for name, of_rows in by_row.items() if of_rows is not None},
        )
        for part, rows in indices.items()
        if len(rows)
    }


def _describe_constant(config: CsvTaskConfig, task: RowTask, table: Table) -> list[str]:
    """Return warnings of values that are the same in all training rows; refuse to train where there is no other."""
    columns = task.output_names if task.loss != "classes" else config.label_columns
    constant = _constant_in_train(task, columns)
    if len(constant) == len(columns):
        raise DataError(
            f"{table.path}: {name_some(constant)} in every training row: nothing to learn",
            "give training rows with other labels, another split (`--split random`, or `--split-column NAME`), or "
            "other label columns",
        )
    if task.loss != "regression":
        return []
    return [f"warning: {said} in every training row: nothing to learn of it" for said in constant]


def _constant_in_train(task: RowTask, columns: Sequence[str]) -> list[str]:
    """Return in words which label columns have one label, value or class in all training rows."""
    found = []
    for column, targets in zip(columns, task.examples["train"].targets.T, strict=True):
        present = np.unique(targets[~np.isnan(targets)])
        if len(present) < 2:
            value = [f"`{task.output_names[int(v)]}`" if task.loss == "classes" else f"{v:g}" for v in present]
            found.append(f"`{column}` is {''.join(value) or 'missing'}")
    return found


def _describe_targets(task: RowTask) -> list[str]:
    notes = []
    share = float(1 - np.concatenate([task.examples[split].is_known for split in task.splits]).mean())
    if share > 0:
        notes.append(f"{100 * share:.1f} % of the labels are missing; they are left out of loss and scores")
    if task.loss == "classes":
        trained = set(task.examples["train"].targets[:, 0].tolist())
        if unseen := [f"`{name}`" for index, name in enumerate(task.output_names) if index not in trained]:
            notes.append(f"warning: no training row has the class {name_some(unseen)}: the model never predicts it")
    for split in task.splits:
        if note := task.examples[split].describe_bounds(split):
            notes.append(note)
        unscorable = _unscorable(task, split)
        if unscorable and task.loss == "classes" and len(task.output_names) > 2:
            notes.append(f"{split}: `class` {unscorable['class']}, so its scores are meaningless")
        elif unscorable:
            listed = name_some(f"`{name}` {reason}" for name, reason in unscorable.items())
            notes.append(f"{split}: without both classes there is no ROC-AUC: {listed}")
    return notes


def _unscorable(task: RowTask, split: Split) -> dict[str, str]:
    targets_NC = task.examples[split].targets
    if task.loss == "binary":
        return metrics.describe_unscorable(targets_NC, task.output_names)
    present = np.unique(targets_NC)
    if task.loss == "regression" or len(present) > 1:
        return {}
    return {"class": f"is {task.output_names[int(present[0])]} in every row"}


def _choose_metric(task: RowTask) -> tuple[str, bool, list[str]]:
    """Return the metric that chooses the best epoch, whether more of it is better, and notes."""
    if task.loss == "regression":
        return ("rmse" if len(task.output_names) == 1 else "standardised_rmse"), False, []
    has_auc = task.loss == "binary" or len(task.output_names) == 2
    num_labels = len(task.output_names) if task.loss == "binary" else 1
    if has_auc and len(_unscorable(task, "valid")) < num_labels:
        return "roc_auc", True, []
    note = "valid has no label with both classes: accuracy, not ROC-AUC, chooses the best epoch"
    return "accuracy", True, [note] if has_auc else []


def _balanced_weights(task: RowTask) -> FloatArray:
    """Return n / (C * n_c) for classes, negatives per positive for labels, over the training rows."""
    targets_NC = task.examples["train"].targets
    if task.loss == "classes":
        counts = np.bincount(targets_NC[:, 0].astype(int), minlength=len(task.output_names))
        return np.where(counts > 0, counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1.0)
    positives, negatives = (np.asarray(np.count_nonzero(targets_NC == label, axis=0)) for label in (1, 0))
    has_both = (positives > 0) & (negatives > 0)
    return np.where(has_both, negatives / np.maximum(positives, 1), 1.0)


def read_new_table(task: TrainedTask, path: Path, columns: tuple[str, ...], progress: Progress) -> NewRows:
    """Read a table to predict: every row comes back in its place, with the table's own columns.

    It is a CSV, TSV, Parquet or SDF, also .gz, or lines of text or SMILES (.txt, .smi). Without `columns`, those of the
    task are read, else the one with a usual name. Labels are read where the table has them.

    Raises:
        DataError: The table or its column cannot be read.
    """
    config = task.config
    found = read_input_rows(
        path,
        task.input_kind,
        progress,
        columns=columns,
        usual_columns=config.input_columns,
        reads_parents=config.reads_parents,
    )
    table, numbers = found.table, None
    commas: tuple[str, ...] = ()
    rules: dict[str, Any] = {}
    label_columns = without_log10(task.output_names) if config.is_log10 else task.output_names
    if isinstance(config, CsvTaskConfig):
        table, commas = _with_points(config, table)
        numbers = read_numbers(table, config)[found.rows] if config.descriptor_columns else None
        label_columns = config.label_columns if task.loss == "classes" else label_columns
        rules = {"kind": config.label_kind, "missing": config.missing_values, "decimal_comma": config.decimal_comma}
    if format_of(path) in LINE_FORMATS:
        table = replace(table, columns={})  # a list has no labels, also where its names stand under `name`
    known, bounds, odd = read_known_targets(
        table, label_columns, task.loss, task.output_names, log10=config.is_log10, **rules
    )
    targets = known[found.rows]
    notes, missing = (*commas, *odd, *found.notes), [name for name in label_columns if name not in table.columns]
    if missing and not np.isnan(targets).all():
        notes = (*notes, f"scored without the labels that the table lacks: {', '.join(missing)}")
    if "line" in table.columns:
        notes = (*notes, "lines of the file replace the table's own column `line`")
    cells = {"line": found.table.lines} | {name: c for name, c in found.table.columns.items() if name != "line"}
    return new_rows(found, task, targets, cells, notes, numbers, None if bounds is None else bounds[found.rows])


def new_rows(
    found: InputRows,
    task: TrainedTask,
    targets: FloatArray,
    columns: TableColumns,
    notes: tuple[str, ...],
    numbers: FloatArray | None = None,
    bounds: FloatArray | None = None,
) -> NewRows:
    """Return rows of a table or list as rows to predict.

    Args:
        targets: (N, C) known targets of the readable rows, NaN where unknown.
        columns, notes: As in `NewRows`.
        numbers, bounds: As in `LabelledRows`.
    """
    more = {"canonical_smiles": task.config.has_canonical_smiles, "is_log10": task.config.is_log10}
    rows = labelled_rows(found, found.rows, targets, **more, numbers=numbers, bounds=bounds)
    notes = (*notes, *filter(None, [rows.describe_bounds("")]))
    return rows_to_predict(rows, task.loss, task.output_names, columns, problems=found.problems, notes=notes)
