"""Results of fine-tuning: a finished run with its scores, what else its files hold, and its predictions. No torch."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from exlm_cli.config.sections import OneOrRange
from exlm_cli.data.rows.records import LARGEST_CSV_FIELD
from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, absent_if_none, read_json, read_whole, reason_of, write_atomically
from exlm_cli.finetune.scores import (
    BASELINE_NAMES,
    BOTH,
    Aggregate,
    LabelScores,
    Predictor,
    Scores,
    predictors_with,
)
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import PLACE_COLUMN, FloatArray, Loss

ENCODER_FILE = "encoder.yaml"
"""The recipe of pre-training, in the run directory of fine-tuning."""
RESULT_FILE = "result.json"
"""File of a cell; a cell that has it is done."""
RESULTS_FILE = "results.json"
"""File of a run; a run that has it is finished."""
LOGITS_FILE = "logits-valid.npy"
"""File of a cell with the logits of spans, (sum of L, 2) float32, of whose mean over seeds the score is."""
TARGETS_COLUMN = "class"
"""Column of `targets-<split>.csv` with the class index, where each row has one class."""

INPUT_COLUMNS = ("input", "input_a", "input_b")
"""Last columns of `predictions-<split>.csv`: what the model read."""

KnownRows = tuple[tuple[int, ...], ...]
"""Rows with a known target: of each label those with 0 and those with 1, of classes those of each class, of each value
their number; empty for spans."""


class CellResult(JsonModel):
    """`result.json`: the scores of one seed at one grid point.

    Attributes:
        grid: Values of the grid point by dotted key.
        epochs: Epochs trained; `best_epoch` counts from 1.
        elapsed_s: Time in steps and validations.
        labels: Metrics of each label or value, where the task has several.
        notes: How the predictions are degenerate, in words.
        outside_model_share: Share of the time in steps that is not spent in the model and the optimiser.
    """

    task: str
    seed: int
    grid: dict[str, Any]
    parameters: int
    epochs: int
    best_epoch: int
    steps: int
    best_step: int
    elapsed_s: float
    metrics: Scores
    labels: LabelScores = Field(default={})
    notes: tuple[str, ...] = ()
    tokens_per_s: float
    outside_model_share: float

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        if "valid" not in self.metrics:
            raise ValueError("`metrics.valid` is missing")
        return self


class InitialWeights(JsonModel):
    """The weights that fine-tuning begins with.

    Attributes:
        checkpoint: Absolute path; None for weights drawn from the seed.
        sha256: Hash of the weights, the same in every copy of the checkpoint; None likewise.
    """

    checkpoint: str | None
    sha256: str | None
    recipe: str
    objective: Literal["exlm", "mlm", "scratch"]
    steps: int
    tokens: int
    num_states_per_mask: int
    num_repeats: int
    mask_ratio: OneOrRange


class GridChoice(JsonModel):
    """A point of a grid."""

    label: str
    values: dict[str, Any]


Over = Literal["rows", "seeds", "splits"]


class Interval(JsonModel):
    """A 95 % interval, never beyond the range of its metric.

    Attributes:
        over: What it leaves open: which rows were tested, which seed trained, or how the rows were split.
        num: Number of rows, seeds or splits.
    """

    low: float
    high: float
    over: Over
    num: int


class Comparison(JsonModel):
    """The model beside the baseline that is better on the validation rows, by the metric that chose the epoch.

    Attributes:
        baseline: As `model` in `scores.csv`.
        split: Part of the rows that both are scored on.
        of_model, of_baseline: Score of the mean prediction of the seeds, mean over the splits of the rows.
        gain: Their difference; positive: the model is better. None where a score is not defined.
        intervals: Of the gain; over seeds, that of the gain of a single one.
    """

    baseline: str
    metric: str
    split: str
    of_model: float | None
    of_baseline: float | None
    gain: float | None
    intervals: tuple[Interval, ...] = ()


class Predictors(JsonModel):
    """What can predict new rows, and which of it is best on the validation rows.

    Attributes:
        baselines: The baseline that is better there, as `model` in `scores.csv`, the first of equals; of each split of
            the rows, as of `shares`.
        shares: Weight of the model in the mean of both; the baseline has the rest.
        valid: Score there by the selection metric, mean over the splits; None where it is not defined.
        best: The first of equals; the model where no score is defined.
    """

    baselines: tuple[str, ...] = Field(min_length=1)
    shares: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    valid: dict[Predictor, float | None]
    best: Predictor

    @property
    def names(self) -> tuple[Predictor, ...]:
        """What can predict: `model`, `forest` or `tfidf`, `both`."""
        return predictors_with(self.baselines[0])

    @property
    def distinct(self) -> tuple[Predictor, ...]:
        """Those that differ: a mean of both that gives one of them no weight on any split is left out."""
        is_one_of_them = set(self.shares) in ({0.0}, {1.0}) and self.best != "both"
        return self.names[:-1] if is_one_of_them else self.names

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not set(self.baselines) <= set(BASELINE_NAMES) or len(set(map(predictors_with, self.baselines))) > 1:
            raise ValueError("`baselines` does not name baselines of one kind")
        if set(self.valid) != set(self.names) or self.best not in self.names:
            raise ValueError("`valid` or `best` does not name what predicts")
        if len(self.baselines) != len(self.shares):
            raise ValueError(f"`shares` has {len(self.shares)} values for {len(self.baselines)} baselines")
        return self


class RunResults(JsonModel):
    """`results.json`: what a fine-tuning run did; its scores are in `scores.csv`.

    Attributes:
        loss: How outputs become a loss (`tasks.base.Loss`).
        split_seeds: `task.split_seed` of each split of the rows; `split`, `split_sizes`, `known_rows`, `split_sha256`,
            `best_seed`, `grid_best`, `no_answer_threshold` and `rows_interval` are of the first one.
        points: Label of the grid point of each split that is reported, and predicts.
        known_rows: Of each part but `train`; of MNLI's `valid` the matched rows, as in its scores.
        split_sha256: Hash of the row numbers of every part.
        labels_sha256: As in `tasks.base.DownstreamTask`.
        max_rows, max_valid_rows: Limits on training and validation rows; None: all.
        best_seed: The seed with the best validation score, the first of equals.
        best_epochs: Best epoch of each seed, on one split after the other.
        elapsed_s: Sum over all cells; `tokens_per_s` and `outside_model_share` are their means.
        notes: Caveats; one that not all splits share names its split.
        grid_best, grid: The point that is reported, and all points; None and empty without a grid.
        no_answer_threshold: Median over the seeds of what SQuAD's `f1_threshold` is; absent for other tasks.
        rows_interval: Of the mean prediction's score by the selection metric, over the rows of the scored split; absent
            for metrics that are not resampled.
        comparison, predictors: Present where a baseline was scored.
        split_intervals: Of each metric of the scored part, over splits; empty for a single one.
        verdict: What the scores say, in sentences.
    """

    task: str
    kind: Literal["finetune"]
    recipe: str
    init: InitialWeights
    parameters: int
    input_kind: Literal["text", "smiles"]
    loss: Loss
    output_names: tuple[str, ...]
    num_labels: int
    split: str
    split_seeds: tuple[int, ...] = Field(min_length=1)
    points: tuple[str, ...] = Field(min_length=1)
    split_sizes: dict[str, int]
    known_rows: dict[str, KnownRows]
    max_rows: int | None
    max_valid_rows: int | None = None
    split_sha256: str
    labels_sha256: str
    selection_metric: str
    is_greater_better: bool
    aggregate: Aggregate
    seeds: tuple[int, ...] = Field(min_length=1)
    best_seed: int
    best_epochs: tuple[int, ...]
    elapsed_s: float
    tokens_per_s: float
    outside_model_share: float
    notes: tuple[str, ...]
    grid_best: GridChoice | None
    grid: tuple[GridChoice, ...]
    no_answer_threshold: float | None = absent_if_none()
    rows_interval: Interval | None = absent_if_none()
    comparison: Comparison | None = absent_if_none()
    predictors: Predictors | None = absent_if_none()
    split_intervals: dict[str, Interval] = Field(default={})
    verdict: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        numbers = [len(self.points), *([] if self.predictors is None else [len(self.predictors.baselines)])]
        if set(numbers) != {len(self.split_seeds)}:
            raise ValueError("`split_seeds`, `points` and `predictors` are of different numbers of splits")
        return self

    @property
    def of_splits(self) -> list["RunResults"]:
        """The same results as those of each split alone, for what is read of its folders."""
        found = []
        for index, seed in enumerate(self.split_seeds):
            predictors = self.predictors
            if predictors is not None:
                baselines, shares = (predictors.baselines[index],), (predictors.shares[index],)
                predictors = predictors.model_copy(update={"baselines": baselines, "shares": shares})
            changed = {"split_seeds": (seed,), "points": (self.points[index],), "predictors": predictors}
            found.append(self.model_copy(update=changed))
        return found

    @property
    def scored_split(self) -> Literal["test", "valid"]:
        """The split whose scores are reported: `test`, or `valid` where no test labels are public."""
        return "test" if "test" in self.split_sizes else "valid"

    @property
    def test_share(self) -> float:
        """Rows of the scored split for each training row."""
        return self.split_sizes[self.scored_split] / self.split_sizes["train"]


def count_known_rows(loss: Loss, targets_NC: FloatArray, num_classes: int) -> KnownRows:
    """Return how many of N rows have which target.

    Args:
        targets_NC: As in `tasks.base.EncodedRows`.
        num_classes: For `classes`.
    """
    match loss:
        case "binary":
            return tuple(tuple(int(np.count_nonzero(column == label)) for label in (0, 1)) for column in targets_NC.T)
        case "classes":
            known = targets_NC[~np.isnan(targets_NC)].astype(np.int64)
            return (tuple(np.bincount(known, minlength=num_classes).tolist()),)
        case "regression":
            return tuple((count,) for count in np.count_nonzero(~np.isnan(targets_NC), axis=0).tolist())
        case "span":
            return ()


def read_results(run: Path) -> RunResults:
    """Return the results of a finished run.

    Raises:
        CheckpointError: The run is not finished, or its results cannot be read.
    """
    path = run / RESULTS_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{run}: the run is not finished: it has no {RESULTS_FILE}",
            f"finish it with `{resume_command('finetune', run)}`",
        )
    return read_json(path, RunResults, hint=f"`{resume_command('finetune', run)}` writes it again")


def cell_folder(run: Path, label: str, split_seed: int, seed: int) -> Path:
    """Return the folder of a cell of a run."""
    return run / "cells" / label / f"split-{split_seed}" / f"seed-{seed}"


def best_cell_folder(run: Path, results: RunResults, seed: int) -> Path:
    """Return the folder of a seed's cell at the best grid point of the first split."""
    return cell_folder(run, results.points[0], results.split_seeds[0], seed)


def how_to_redo(cell: Path) -> str:
    """Return the hint on how to train a finished cell again."""
    return f"delete {cell / RESULT_FILE} and continue with `{resume_command('finetune', cell.parents[3])}`"


def read_predictions(path: Path, hint: str, *, num_columns: int | None = None) -> tuple[list[int], FloatArray]:
    """Read back what `tasks.base.write_outputs` wrote: rows of the input, (N, C) values.

    `num_columns` is C; None: all columns hold values.

    Raises:
        CheckpointError: The file is missing or altered; `hint` says how to get it back.
    """
    csv.field_size_limit(LARGEST_CSV_FIELD)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file)
        if any(len(line) != len(header) for line in lines):
            raise ValueError("a row is cut off")
        num_columns = len(header) - 1 if num_columns is None else num_columns
        values = np.array([[float(cell) for cell in line[1 : 1 + num_columns]] for line in lines])
        return [int(line[0]) for line in lines], values.reshape(len(lines), num_columns)
    except (OSError, ValueError, IndexError, csv.Error) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: not readable as predictions: {reason}", hint) from error


def baseline_folder(run: Path, model: str, split_seed: int, seed: int) -> Path:
    """Return the folder with the predictions of a baseline, or of the mean of both."""
    return run / "baselines" / model / f"split-{split_seed}" / f"seed-{seed}"


def name_of_predictor(predictor: Predictor, results: RunResults) -> str | None:
    """Return the name of what predicts in `scores.csv` and the folder of baselines; None: the model.

    Args:
        results: Of one split.
    """
    if predictor == "model":
        return None
    assert results.predictors is not None, "only a run with baselines has other predictors"
    return BOTH if predictor == "both" else results.predictors.baselines[0]


def read_split_outputs(
    run: Path, results: RunResults, split: str, *, baseline: str | None = None
) -> tuple[list[int], FloatArray, FloatArray]:
    """Return a part of the rows, and what the seeds of the best grid point predicted for it on the first split.

    Args:
        split: Name of the part; not for spans.
        baseline: Read what this baseline, or the mean of both, predicted instead.

    Returns:
        N rows of the input, counted from 0; (K, N, C) probabilities or values; targets as in
        `tasks.base.EncodedRows`.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    rows, targets = read_predictions(run / f"targets-{split}.csv", "fine-tune again")
    return rows, read_seed_outputs(run, results, split, rows, baseline=baseline), targets


def read_seed_outputs(
    run: Path, results: RunResults, split: str, rows: Sequence[int], *, baseline: str | None = None
) -> FloatArray:
    """Return the (K, N, C) predictions of the seeds for a part of the rows on the first split of `results`.

    Args:
        rows: Rows of the part.
        baseline: As in `read_split_outputs`.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    by_seed = []
    for seed in results.seeds:
        if baseline is None:
            cell = best_cell_folder(run, results, seed)
            hint = how_to_redo(cell)
        else:
            cell = baseline_folder(run, baseline, results.split_seeds[0], seed)
            hint = f"delete {cell} and continue with `{resume_command('finetune', run)}`"
        path = cell / f"predictions-{split}.csv"
        found_rows, values = read_predictions(path, hint, num_columns=len(results.output_names))
        if found_rows != list(rows):
            raise CheckpointError(f"{path}: its rows are not those of the split", hint)
        by_seed.append(values)
    return np.stack(by_seed)


def read_split_inputs(run: Path, results: RunResults, split: str) -> tuple[str, ...]:
    """Return the text or SMILES of each of the N rows of a split, as the model read it; two texts have a bar between.

    None where the predictions hold no inputs.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    return _read_columns(run, results, split, INPUT_COLUMNS)


def read_split_places(run: Path, results: RunResults, split: str) -> tuple[str, ...]:
    """Return the place of each of the N rows of a split in its file, like `line 7`; none where it is not known.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    return _read_columns(run, results, split, (PLACE_COLUMN,))


def _read_columns(run: Path, results: RunResults, split: str, names: Sequence[str]) -> tuple[str, ...]:
    cell = best_cell_folder(run, results, results.best_seed)
    path = cell / f"predictions-{split}.csv"
    content = read_whole(path, hint=how_to_redo(cell)).decode(errors="backslashreplace")
    csv.field_size_limit(LARGEST_CSV_FIELD)
    header, *lines = csv.reader(io.StringIO(content, newline=""))
    # behind the predictions, whose names may be anything
    first = 1 + len(results.output_names)
    columns = [index for index, name in enumerate(header) if index >= first and name in names]
    return tuple(" | ".join(line[index] for index in columns) for line in lines) if columns else ()


def write_logits(cell: Path, outputs: Sequence[FloatArray]) -> None:
    """Write the (L, 2) logits of the validation examples of spans.

    Raises:
        CheckpointError: A file cannot be written.
    """
    buffer = io.BytesIO()
    np.save(buffer, np.concatenate(outputs).astype(np.float32))
    write_atomically(cell / LOGITS_FILE, buffer.getvalue())


def read_logits(cell: Path, lengths: Sequence[int]) -> list[FloatArray]:
    """Return what `write_logits` wrote, for N examples of L tokens each.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    path = cell / LOGITS_FILE
    content = read_whole(path, hint=how_to_redo(cell))
    try:
        logits = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError) as error:
        raise CheckpointError(f"{path}: not readable as logits: {error}", how_to_redo(cell)) from error
    if logits.shape != (sum(lengths), 2) or logits.dtype != np.float32:
        raise CheckpointError(f"{path}: not the logits of these {len(lengths):,} windows", how_to_redo(cell))
    return np.split(logits.astype(np.float64), np.cumsum(lengths)[:-1])
