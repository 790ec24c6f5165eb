"""A model of molecules or of one text a row, applied to a table: every row comes back, in its place.

Axes: K seeds, R rows of the table, C outputs.
"""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.files import write_atomically
from exlm_cli.progress import Progress
from exlm_cli.tasks.applied import Applied, FinetunedModels, describe_cut, probabilities_by_seed
from exlm_cli.tasks.base import FloatArray, Loss
from exlm_cli.tasks.labels import read_known_targets
from exlm_cli.tasks.new_rows import NewRows, read_new_rows
from exlm_cli.tasks.table_task import score_rows

_LINE, _CLASS, _PROBLEM = "line", "predicted_class", "problem"


@dataclass(frozen=True)
class TablePredictions:
    """What a run says of each row of a table.

    Attributes:
        rows: The table.
        loss: Of the run's task.
        names: C labels, classes or values.
        mean: (R, C) mean over the seeds of probabilities, or of values; NaN where a row cannot be read.
        std: (R, C) sample deviation over the seeds; None with one seed.
        metrics: Scores of `mean` where the table has label columns of the run; empty where it has none.
        notes: What a report has to say.
    """

    rows: NewRows
    loss: Loss
    names: tuple[str, ...]
    mean: FloatArray
    std: FloatArray | None
    metrics: dict[str, float]
    notes: tuple[str, ...]


def apply_to_table(
    finetuned: FinetunedModels, path: Path, written: Path, *, column: str | None = None, progress: Progress
) -> Applied:
    """Predict the rows of a table and write them; errors are those of `predict_rows` and `prediction_csv`."""
    predictions = predict_rows(finetuned, path, column=column, progress=progress)
    text, notes = prediction_csv(predictions)
    write_atomically(written, text.encode())
    rows = predictions.rows
    num_unreadable = len(rows.table) - len(rows.readable)
    return Applied((written,), len(rows.table), num_unreadable, predictions.metrics, (*predictions.notes, *notes))


def predict_rows(finetuned: FinetunedModels, path: Path, *, column: str | None, progress: Progress) -> TablePredictions:
    """Apply every seed of a run to the rows of a table and take the mean of their probabilities or values.

    Args:
        finetuned: Of MoleculeNet or of a CSV.
        path: CSV or TSV, also .gz and .xz, or .smi and .txt.
        column: Of the SMILES or text; none: the one the run was trained on, else the one that is called like it.
        progress: Who is told.

    Raises:
        DataError: The table, its column, or a label in it cannot be read.
    """
    task, results = finetuned.recipe.task, finetuned.results
    kind, loss, names = results.input_kind, results.loss, results.output_names
    rows = read_new_rows(
        path,
        kind,
        progress,
        column=column,
        usual_column=task.input_column,
        canonical_smiles=task.has_canonical_smiles,
    )
    label_columns = task.label_columns if isinstance(task, CsvTaskConfig) and loss == "classes" else names
    # before the model runs: a cell that is no label stops the work at once
    targets = read_known_targets(rows.table, label_columns, loss, names)
    encoded, num_cut = rows.encode(finetuned.tokenizer, finetuned.sequence_length)
    by_seed = np.full((len(finetuned.runners), len(rows.table), len(names)), math.nan)
    by_seed[:, rows.readable] = probabilities_by_seed(finetuned, encoded, progress)
    mean = by_seed.mean(axis=0)
    notes = [*rows.notes, *describe_cut(num_cut, finetuned.sequence_length)]
    missing = [name for name in label_columns if name not in rows.table.columns]
    if 0 < len(missing) < len(label_columns):
        notes.append(f"scored without the labels that the table lacks: {', '.join(missing)}")
    return TablePredictions(
        rows,
        loss,
        names,
        mean,
        by_seed.std(axis=0, ddof=1) if len(by_seed) > 1 else None,
        score_rows(loss, mean[rows.readable], targets[rows.readable]) if len(missing) < len(label_columns) else {},
        tuple(notes),
    )


def prediction_csv(predictions: TablePredictions) -> tuple[str, tuple[str, ...]]:
    """Return one row for each row of the table, in its order, and notes.

    Columns: `line` of the table; all its own; `<name>_probability` of each label or class, or `<name>_predicted` value;
    of classes `predicted_class`; of several seeds `<name>_std`; `problem` of a row that cannot be read. An own column
    of such a name is left out.
    """
    rows, names = predictions.rows, predictions.names
    added = [f"{name}_{'predicted' if predictions.loss == 'regression' else 'probability'}" for name in names]
    if predictions.loss == "classes":
        added.append(_CLASS)
    if predictions.std is not None:
        added += [f"{name}_std" for name in names]
    replaced = [name for name in rows.table.columns if name in (_LINE, *added, _PROBLEM)]
    own = [cells for name, cells in rows.table.columns.items() if name not in replaced]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_LINE, *(name for name in rows.table.columns if name not in replaced), *added, _PROBLEM])
    for row, problem in enumerate(rows.problems):
        mean = predictions.mean[row]
        cells = [_cell(value) for value in mean]
        if predictions.loss == "classes":
            cells.append("" if problem else names[int(mean.argmax())])
        if predictions.std is not None:
            cells += [_cell(value) for value in predictions.std[row]]
        writer.writerow([rows.table.lines[row], *(column[row] for column in own), *cells, problem])
    listed = ", ".join(f"`{name}`" for name in replaced)
    return text.getvalue(), (f"the table's own {listed} made room for what is predicted",) if replaced else ()


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
