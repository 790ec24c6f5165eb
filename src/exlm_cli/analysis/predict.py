"""A fine-tuned model applied to rows it has not seen.

Axes: K seeds, R rows of the table, C outputs.
"""

import csv
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exlm_cli.analysis.new_rows import NewRows, read_new_rows
from exlm_cli.errors import ConfigError
from exlm_cli.progress import Progress
from exlm_cli.run_dir import write_atomically
from exlm_cli.tasks.downstream import FloatArray, Loss
from exlm_cli.tasks.finetuned import Finetuned
from exlm_cli.tasks.labels import read_known_targets
from exlm_cli.tasks.metrics import score_binary, score_classes, score_regression
from exlm_cli.tasks.table_task import to_probabilities


@dataclass(frozen=True)
class Predictions:
    """What a run says of each row of a table.

    Attributes:
        rows: The table.
        loss: Of the run's task.
        names: C labels, classes or values.
        mean: (R, C) mean over the seeds of probabilities, or of values; NaN where a row cannot be read.
        std: (R, C) deviation over the seeds (n - 1); None with one seed.
        metrics: Scores of `mean` where the table has the run's label columns; empty where it has not.
        notes: What a report has to say.
    """

    rows: NewRows
    loss: Loss
    names: tuple[str, ...]
    mean: FloatArray
    std: FloatArray | None
    metrics: dict[str, float]
    notes: tuple[str, ...]


def predict(finetuned: Finetuned, path: Path, *, column: str | None = None, progress: Progress) -> Predictions:
    """Apply every seed of a run to the rows of a table and take the mean of their probabilities or values.

    Args:
        finetuned: Of a task of molecules or of a CSV.
        path: CSV or TSV, also .gz and .xz, or .smi and .txt.
        column: Of the SMILES or text; none: the one the run was trained on, else the one that is called like it.
        progress: Who is told.

    Raises:
        ConfigError: The run's task takes more than one text a row.
        DataError: The table, its column, or a label in it cannot be read.
    """
    task, results = finetuned.recipe.task, finetuned.results
    if task.suite not in ("csv", "moleculenet"):
        raise ConfigError(
            f"{finetuned.run}: a model of {task.name} cannot be applied to a table of one text a row",
            "models of `exlm finetune csv` and of MoleculeNet can",
        )
    kind = results["input_kind"]
    usual = task.smiles_column if kind == "smiles" else task.text_column
    rows = read_new_rows(path, kind, progress, column=column, usual_column=usual)
    encoded, num_cut = rows.encode(finetuned.tokenizer, finetuned.sequence_length)
    loss, names = results["loss"], tuple(results["output_names"])
    by_seed = np.full((len(finetuned.runners), len(rows.table), len(names)), math.nan)
    with progress.bar("seeds", len(finetuned.runners)) as bar:
        for index, runner in enumerate(finetuned.runners.values()):
            if len(encoded):
                outputs = np.stack(runner.predict(encoded))
                by_seed[index, rows.readable] = to_probabilities(loss, outputs)
            bar.update(index + 1)
    mean = by_seed.mean(axis=0)
    std = by_seed.std(axis=0, ddof=1) if len(by_seed) > 1 else None
    notes = list(rows.notes)
    if num_cut:
        notes.append(f"cut {num_cut:,} rows to {finetuned.sequence_length} tokens")
    num_bad = len(rows.table) - len(rows.readable)
    if num_bad:
        notes.append(f"{num_bad:,} of {len(rows.table):,} rows cannot be read; the last column says why")
    return Predictions(rows, loss, names, mean, std, _score(finetuned, rows, loss, names, mean), tuple(notes))


def write_prediction_csv(predictions: Predictions, path: Path) -> None:
    """Write one row for each row of the table, in its order.

    Columns: `line` of the table, its column of SMILES or text, the outputs (probabilities of labels or classes, or
    values), `predicted` for classes, each output's `<name>_std` over the seeds, `problem` of a row that cannot be read.

    Raises:
        CheckpointError: The file system refuses.
    """
    rows, names = predictions.rows, predictions.names
    is_classes = predictions.loss == "classes"
    spread = [] if predictions.std is None else [f"{name}_std" for name in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["line", rows.column, *names, *(["predicted"] if is_classes else []), *spread, "problem"])
    inputs = rows.table.columns[rows.column]
    for row, problem in enumerate(rows.problems):
        mean = predictions.mean[row]
        best = [names[int(mean.argmax())] if not problem else ""] if is_classes else []
        std = [] if predictions.std is None else [_cell(value) for value in predictions.std[row]]
        writer.writerow([rows.table.lines[row], inputs[row], *map(_cell, mean), *best, *std, problem])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _score(
    finetuned: Finetuned, rows: NewRows, loss: Loss, names: tuple[str, ...], mean_RC: FloatArray
) -> dict[str, float]:
    """Score the readable rows where the table has all label columns."""
    columns = finetuned.recipe.task.label_columns or names
    if not set(columns) <= set(rows.table.columns):
        return {}
    targets = read_known_targets(rows.table, columns, loss, names)[rows.readable]
    predicted = mean_RC[rows.readable]
    match loss:
        case "binary":
            return score_binary(predicted, targets)
        case "classes":
            return score_classes(predicted, targets[:, 0])
        case _:
            return score_regression(predicted, targets)
