"""Results of fine-tuning: a finished run with its scores, what its JSON files hold, and its folders. No torch."""

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from exlm_cli.config.sections import OneOrRange
from exlm_cli.config.tasks import SEEDED_SPLITS
from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, absent_if_none, read_json
from exlm_cli.finetune.scores import (
    BASELINE_NAMES,
    BOTH,
    MODEL,
    PREDICTORS,
    Aggregate,
    LabelScores,
    Predictor,
    RunScores,
    Scores,
    Spread,
    read_scores,
)
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import Loss

ENCODER_FILE = "encoder.yaml"
"""The recipe of pre-training, in the run directory of fine-tuning."""
RESULT_FILE = "result.json"
"""File of a cell; a cell that has it is done."""
RESULTS_FILE = "results.json"
"""File of a run; a run that has it is finished."""


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
    """The model beside the baseline that is the best on the validation rows, by the metric that chose the epoch.

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
        baselines: The best baseline there, as `model` in `scores.csv`, the first of equals; of each split of the rows.
        valid: Score there by the selection metric, mean over the splits; None where it is not defined.
        num_telling: Validation rows that tell one from another (`metrics.count_telling_rows`), of all splits.
        best: The first of equals; the model where no score is defined; `both` where too few rows tell.
    """

    baselines: tuple[str, ...] = Field(min_length=1)
    valid: dict[Predictor, float | None]
    num_telling: int = Field(ge=0)
    best: Predictor

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not set(self.baselines) <= set(BASELINE_NAMES):
            raise ValueError("`baselines` does not name baselines")
        if set(self.valid) != set(PREDICTORS):
            raise ValueError("`valid` does not name what predicts")
        return self


class RunResults(JsonModel):
    """`results.json`: what a fine-tuning run did; its scores are in `scores.csv`.

    Attributes:
        loss: How outputs become a loss (`tasks.base.Loss`).
        split_seeds: `task.split_seed` of each split of the rows; `split`, `split_sizes`, `split_sha256`, `best_seed`,
            `grid_best` and `no_answer_threshold` are of the first one.
        points: Label of the grid point of each split that is reported, and predicts.
        imitates: As `split_imitates` in `tasks.base.DownstreamTask`.
        split_sha256: Hash of the row numbers of every part.
        labels_sha256: As in `tasks.base.DownstreamTask`.
        max_rows, max_valid_rows: Limits on training and validation rows; None: all.
        best_seed: The seed with the best validation score, the first of equals.
        best_epochs: Best epoch of each seed, on one split after the other.
        elapsed_s: Sum over all cells; `tokens_per_s` and `outside_model_share` are their means.
        notes: Caveats; one that not all splits share names its split.
        grid_best, grid: The point that is reported, and all points; None and empty without a grid.
        no_answer_threshold: Median over the seeds of what SQuAD's `f1_threshold` is; absent for other tasks.
        rows_interval: Of the mean prediction's score by the selection metric, over the rows of the scored part; of
            several splits, of their mean, each row drawn within its split. Absent where there are too few rows, and for
            metrics that are not resampled.
        comparison, predictors: Present where a baseline was scored.
        split_intervals: Of each metric of the scored part, over splits; empty for one or two.
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
    imitates: str = ""
    split_seeds: tuple[int, ...] = Field(min_length=1)
    points: tuple[str, ...] = Field(min_length=1)
    split_sizes: dict[str, int]
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
                predictors = predictors.model_copy(update={"baselines": (predictors.baselines[index],)})
            changed = {"split_seeds": (seed,), "points": (self.points[index],), "predictors": predictors}
            found.append(self.model_copy(update=changed))
        return found

    @property
    def split_words(self) -> str:
        """How the rows were split, as pages and pictures say it: `scaffold split`, `random split 0`, `5 random splits`.

        The number is `task.split_seed`, of a split that has one.
        """
        named = {"files": "split by files", "column": "split by a column", "file": "split by a file"}
        if len(self.split_seeds) > 1:
            return f"{len(self.split_seeds)} {self.split} splits"
        number = f" {self.split_seeds[0]}" if self.split in SEEDED_SPLITS else ""
        return named.get(self.split, f"{self.split} split{number}")

    @property
    def predictor(self) -> Predictor:
        """What predicts new rows unless another is asked for."""
        return "model" if self.predictors is None else self.predictors.best

    def scored_as(self, predictor: Predictor) -> str:
        """Return what predicts as `model` in `scores.csv`; a baseline is the best one of the first split."""
        if predictor in ("model", "both"):
            return MODEL if predictor == "model" else BOTH
        assert self.predictors is not None, "only a run with baselines has other predictors"
        return self.predictors.baselines[0]

    @property
    def scored_split(self) -> Literal["test", "valid"]:
        """The split whose scores are reported: `test`, or `valid` where no test labels are public."""
        return "test" if "test" in self.split_sizes else "valid"

    @property
    def test_share(self) -> float:
        """Rows of the scored split for each training row."""
        return self.split_sizes[self.scored_split] / self.split_sizes["train"]


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


def baseline_folder(run: Path, model: str, split_seed: int, seed: int) -> Path:
    """Return the folder with the predictions of a baseline."""
    return run / "baselines" / model / f"split-{split_seed}" / f"seed-{seed}"


@dataclass(frozen=True)
class FinetunedRun:
    """A finished fine-tuning run: its name in tables, its directory, its results."""

    name: str
    run_dir: Path
    results: RunResults

    @cached_property
    def scores(self) -> RunScores:
        """Its scores, read from the directory."""
        return read_scores(self.run_dir)

    @property
    def verdict(self) -> tuple[str, ...]:
        """Sentences of the verdict, whose commands name the directory."""
        folder = shlex.quote(str(self.run_dir))
        return tuple(sentence.replace(" RUN ", f" {folder} ") for sentence in self.results.verdict)

    def average(self, metric: str, *, model: str = MODEL, label: str = "") -> Spread:
        """Return what the mean prediction of the seeds scores on the reported split, over splits of the rows."""
        return self.scores.average(self.results.scored_split, metric, model=model, label=label)

    def seeds(self, metric: str, *, model: str = MODEL) -> Spread:
        """Return what the seeds score alone on the reported split, over seeds and splits of the rows."""
        return self.scores.seeds(self.results.scored_split, metric, model=model)

    def as_json(self) -> dict[str, Any]:
        """Return results and scores for programs."""
        return {**self.results.as_json(), **self.scores.as_json()}
