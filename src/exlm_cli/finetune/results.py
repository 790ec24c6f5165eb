"""Results of fine-tuning: what the files of a run hold, summaries over seeds, the choice of a grid point. No torch."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from exlm_cli.config.finetune import NO_GRID
from exlm_cli.data.rows.decode import LARGEST_CSV_FIELD
from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, absent_if_none, read_json, read_whole, reason_of, write_atomically
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import FloatArray, Loss

RESULT_FILE = "result.json"
"""File of a cell; a cell that has it is done."""
RESULTS_FILE = "results.json"
"""File of a run; a run that has it is finished."""
LOGITS_FILE = "logits-valid.npy"
"""File of a cell with the logits of spans, (sum of L, 2) float32; the calibration of answers is fitted to them."""
TARGETS_COLUMN = "class"
"""Column of `targets-<split>.csv` with the class index, where each row has one class."""

Aggregate = Literal["mean", "median"]
Scores = dict[str, dict[str, float | None]]
"""Metrics by split, then by name; None where a metric is not defined."""


class Summary(JsonModel):
    """One metric over seeds.

    Attributes:
        mean, median: Over the values that are defined; None where none is.
        std: Sample standard deviation (n - 1 in the denominator); None for fewer than two values.
        values: One for each seed, in order.
    """

    mean: float | None
    std: float | None
    median: float | None
    values: tuple[float | None, ...]

    def center(self, aggregate: Aggregate) -> float | None:
        """Return the mean or the median."""
        return self.median if aggregate == "median" else self.mean


Summaries = dict[str, dict[str, Summary]]
"""Summaries by split, then by metric."""
LabelScores = dict[str, Scores]
"""Metrics by split, then by label or value, then by name."""
LabelSummaries = dict[str, Summaries]
"""Summaries by split, then by label or value, then by metric."""
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
    mask_ratio: float


class GridChoice(JsonModel):
    """A point of a grid."""

    label: str
    values: dict[str, Any]


class GridScores(GridChoice):
    """A point of a grid and its validation scores."""

    valid: dict[str, Summary]


class BaselineResult(JsonModel):
    """Scores of a random forest on the same rows; fields as in `RunResults`."""

    name: str
    seeds: tuple[int, ...]
    metrics: Summaries
    labels: LabelSummaries = Field(default={})


class Replication(JsonModel):
    """Scores over replicated splits: those of the run, then of the runs under `replicates/`.

    Attributes:
        split_seeds: `task.split_seed` of each split.
        best_epochs, metrics, labels: As in `RunResults`; values by split, then by seed.
        elapsed_s, tokens_per_s, outside_model_share: As in `RunResults`, over all splits.
        intervals: Intervals of the mean (`verdict.mean_interval`) by split and metric; None where one is not defined.
        baseline: Scores of the baseline on the same splits.
    """

    split_seeds: tuple[int, ...]
    best_epochs: tuple[int, ...]
    elapsed_s: float
    tokens_per_s: float
    outside_model_share: float
    metrics: Summaries
    labels: LabelSummaries
    intervals: dict[str, dict[str, tuple[float, float] | None]]
    baseline: BaselineResult | None = absent_if_none()


class RunResults(JsonModel):
    """`results.json`: the scores of a fine-tuning run over its seeds, those of the best grid point.

    Attributes:
        loss: How outputs become a loss (`tasks.base.Loss`).
        known_rows: Of each split but `train`; of MNLI's `valid` the matched rows, as in its scores.
        split_sha256: Hash of the row numbers of every split.
        labels_sha256: As in `tasks.base.DownstreamTask`.
        max_rows, max_valid_rows: Limits on training and validation rows; None: all.
        best_epochs: Best epoch of each seed.
        elapsed_s: Sum over all cells; `tokens_per_s` and `outside_model_share` are their means.
        grid_best, grid: None and empty without a grid.
        labels: Metrics of each label or value, in its own unit, where the task has several.
        baseline: Present where the run was asked for it.
        replication: Present where there is more than one split.
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
    best_epochs: tuple[int, ...]
    elapsed_s: float
    tokens_per_s: float
    outside_model_share: float
    notes: tuple[str, ...]
    metrics: Summaries
    labels: LabelSummaries = Field(default={})
    grid_best: GridChoice | None
    grid: tuple[GridScores, ...]
    baseline: BaselineResult | None = absent_if_none()
    replication: Replication | None = absent_if_none()
    verdict: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_selection(self) -> Self:
        if self.selection_metric not in self.metrics.get("valid", {}):
            raise ValueError(f"`metrics.valid` has no `{self.selection_metric}`, by which the best epoch was chosen")
        return self

    @property
    def scored_split(self) -> Literal["test", "valid"]:
        """The split whose scores are reported: `test`, or `valid` where no test labels are public."""
        return "test" if "test" in self.metrics else "valid"

    def best_seed(self) -> int:
        """Return the seed with the best validation score, the first of equals."""
        values = self.metrics["valid"][self.selection_metric].values
        sign = -1.0 if self.is_greater_better else 1.0
        ranks = [math.inf if value is None else sign * value for value in values]
        return self.seeds[ranks.index(min(ranks))]


def summarise_values(values: Iterable[float | None]) -> Summary:
    """Return mean, standard deviation and median over seeds; values that are not defined become None."""
    listed = tuple(None if v is None or math.isnan(v) else float(v) for v in values)
    known = np.array([v for v in listed if v is not None])
    mean, median = (float(known.mean()), float(np.median(known))) if len(known) else (None, None)
    return Summary(mean=mean, std=float(known.std(ddof=1)) if len(known) > 1 else None, median=median, values=listed)


def summarise_metrics(runs: Sequence[Mapping[str, Mapping[str, float | None]]]) -> Summaries:
    """Return a summary of each metric of each split over runs that have the same splits and metrics."""
    return {
        split: {name: summarise_values(run[split][name] for run in runs) for name in metrics}
        for split, metrics in runs[0].items()
    }


def summarise_labels(runs: Sequence[LabelScores]) -> LabelSummaries:
    """Return a summary of each metric of each label of each split over runs that have the same ones."""
    return {split: summarise_metrics([run[split] for run in runs]) for split in runs[0]}


def count_known_rows(loss: Loss, targets_NC: FloatArray, num_classes: int) -> KnownRows:
    """Return how many of N rows have which target.

    Args:
        targets_NC: As in `tasks.base.EncodedExamples`.
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


def selection_value(cells: Sequence[CellResult], metric: str, aggregate: Aggregate) -> float:
    """Return the aggregated validation metric of a grid point's cells; NaN where it is never defined."""
    value = summarise_values(cell.metrics["valid"][metric] for cell in cells).center(aggregate)
    return math.nan if value is None else value


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


def cell_folder(run: Path, label: str, seed: int) -> Path:
    """Return the folder of a cell of a run."""
    return run / "cells" / label / f"seed-{seed}"


def best_cell_folder(run: Path, results: RunResults, seed: int) -> Path:
    """Return the folder of a seed's cell at the best grid point."""
    return cell_folder(run, results.grid_best.label if results.grid_best else NO_GRID, seed)


def how_to_redo(cell: Path) -> str:
    """Return the hint on how to train a finished cell again."""
    return f"delete {cell / RESULT_FILE} and continue with `{resume_command('finetune', cell.parents[2])}`"


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


def read_split_outputs(run: Path, results: RunResults, split: str) -> tuple[list[int], FloatArray, FloatArray]:
    """Return the rows of a split, and what the seeds of the best grid point predicted for them; not for spans.

    Returns:
        N rows of the input, counted from 0; (K, N, C) probabilities or values; targets as in
        `tasks.base.EncodedExamples`.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    truth = run / f"targets-{split}.csv"
    rows, targets = read_predictions(truth, "fine-tune again")
    by_seed = []
    for seed in results.seeds:
        cell = best_cell_folder(run, results, seed)
        path = cell / f"predictions-{split}.csv"
        found_rows, values = read_predictions(path, how_to_redo(cell), num_columns=len(results.output_names))
        if found_rows != rows:
            raise CheckpointError(f"{path}: its rows are not those of {truth}", how_to_redo(cell))
        by_seed.append(values)
    return rows, np.stack(by_seed), targets


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
