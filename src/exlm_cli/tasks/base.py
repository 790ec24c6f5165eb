"""Interface between downstream tasks and the engine that fine-tunes, scores and predicts. The engine knows no task.

Axes: K seeds, N examples of a split, C outputs, L tokens of an example.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import InputKind, TaskConfig
from exlm_cli.data import IntArray
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.files import write_csv
from exlm_cli.progress import Progress

FloatArray = NDArray[np.float64]
SeedOutputs = Sequence[Sequence[FloatArray]]
"""Outputs of N examples, as in `DownstreamTask.score`, for each of K seeds."""
TableColumns = Mapping[str, Sequence[object]]
"""Cells of a table by column."""

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the start of a formula (OWASP, "CSV Injection")."""

Loss = Literal["binary", "classes", "regression", "span"]
"""How outputs become a loss.

`binary`: a sigmoid for each label, missing labels left out; `classes`: one softmax over C classes; `regression`: mean
squared error, missing values left out; `span`: a softmax over the tokens of an example for its first answer token and
another for its last one.
"""

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SplitIndices = dict[Split, IntArray]
"""Rows of each split, counted from 0, ascending."""

NO_TEST_NOTE = (
    "test: none of its rows can be used, so there are no test scores; `exlm predict RUN FILE` predicts rows without "
    "labels"
)


@dataclass(frozen=True)
class EncodedSplit:
    """Examples as the encoder reads them.

    Attributes:
        token_ids: N sequences of (L,) tokens, [CLS] first and [SEP] last.
        targets: (N, C) for `binary` and `regression`, NaN where missing; (N, 1) class index for `classes`; (N, 2) first
            and last answer token for `span`, both 0 (that is [CLS]) where there is no answer.
        answerable: (N, L) bool for `span`, rows ragged: tokens an answer may begin or end at, [CLS] included; None for
            the other losses.
        notes: What a report says about the encoding, such as how many rows were cut.
    """

    token_ids: tuple[IntArray, ...]
    targets: FloatArray
    answerable: tuple[NDArray[np.bool_], ...] | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class AnswerProbabilities:
    """Yes-or-no questions about the answers of a span task, and the probabilities that are calibrated.

    Attributes:
        names: C yes-or-no questions about an answer, like whether it is right.
        values: (N, C) probabilities before calibration, of the mean over the seeds.
        targets: (N, C) 0 or 1; NaN where unknown.
    """

    names: tuple[str, ...]
    values: FloatArray
    targets: FloatArray


class DownstreamTask(ABC):
    """One data set with its splits, labels and scores.

    Attributes:
        name: Like `moleculenet/bace`.
        input_kind: Kind of checkpoint that fits.
        loss: Loss that the task is trained with.
        output_names: C names: labels, classes or target columns; `("start", "end")` for spans.
        selection_metric: Validation metric that chooses the best epoch.
        is_greater_better: Whether a greater value of it is better; False for errors like RMSE.
        class_weights: (C,) weight of each class, or of each label's positives for `binary`; None: all 1.
        splits: Splits that exist. GLUE and SQuAD have no labelled test set; the paper reports their `valid`.
        split_name: How the rows are split: `official` as published, `files` of the user's, `column`, or `task.split`.
        notes: What a report says about the data: skipped rows, labels without a score, duplicates across splits.
        skipped: All rows that are not used, in order; notes name some of them.
        score_fingerprint: Text that changes with whatever else `score` depends on besides outputs and encoded examples;
            empty if nothing. A run resumes only with the same value.
        training_keys: Key of each training row: a molecule's canonical SMILES, a text, or texts joined by NUL. `exlm
            predict` recognises training rows by it.
    """

    name: str
    input_kind: InputKind = "text"
    loss: Loss
    output_names: tuple[str, ...]
    selection_metric: str
    is_greater_better: bool = True
    class_weights: FloatArray | None = None
    splits: tuple[Split, ...]
    split_name: str = "official"
    notes: tuple[str, ...] = ()
    skipped: tuple[SkippedRow, ...] = ()
    score_fingerprint: str = ""
    training_keys: Sequence[str] = ()

    @property
    @abstractmethod
    def split_indices(self) -> dict[str, IntArray]:
        """Row of the input each example came from, counted from 0, in order."""

    @property
    def split_sizes(self) -> dict[str, int]:
        """Rows of each split, in the order train, valid, test."""
        return {split: len(rows) for split, rows in self.split_indices.items()}

    @abstractmethod
    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise a split; sequences longer than `sequence_length` are cut (spans: into windows)."""

    @abstractmethod
    def score(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Return the metrics of a split by name; NaN where a metric is not defined.

        Args:
            split: An encoded split.
            outputs: For each encoded example, in order: (C,) logits (values for `regression`, in the task's own units),
                or (L, 2) logits for `span`.
        """

    def score_labels(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, dict[str, float]]:
        """Return the metrics of each label or value by its name, where a task has several; arguments as for `score`."""
        del split, outputs
        return {}

    def describe_outputs(self, split: Split, outputs: Sequence[FloatArray]) -> list[str]:
        """Return in words how outputs are degenerate, like one class for every row; arguments as for `score`."""
        del split, outputs
        return []

    def answer_probabilities(self, split: Split, outputs: SeedOutputs) -> AnswerProbabilities | None:
        """Return what a run of loss `span` is calibrated by; None: nothing. `outputs` of each of K seeds, as for
        `score`.
        """
        del split, outputs
        return None

    @abstractmethod
    def write_predictions(self, folder: Path, split: Split, outputs: Sequence[FloatArray]) -> None:
        """Write the predictions of a split into `folder`; arguments as for `score`.

        Unless the loss is `span`, that is `predictions-<split>.csv` by `write_outputs`, with probabilities or values:
        the run is calibrated with it, and its figures are drawn from it.

        Raises:
            CheckpointError: The file system refuses.
        """


@dataclass(frozen=True)
class TrainedTask:
    """Facts for prediction about the task that a model was fine-tuned on, as in `DownstreamTask`.

    `config` is the section of the run's recipe, `no_answer_threshold` of SQuAD the median over the seeds.
    """

    config: TaskConfig
    input_kind: InputKind
    loss: Loss
    output_names: tuple[str, ...]
    no_answer_threshold: float | None = None


@dataclass(frozen=True)
class PredictionSummary:
    """Result of predicting the rows or questions of a file.

    Attributes:
        num_rows: Rows of the input file.
        num_unreadable: Rows among them that the model cannot read.
        metrics: Scores of the seeds' mean where the file has labels; empty where it has none.
        notes: What a report says about them.
        num_in_training: Rows among them that the model was trained on.
        metrics_of_new: `metrics` without these rows; empty if there are none or no others.
    """

    files: tuple[Path, ...]
    num_rows: int
    num_unreadable: int
    metrics: dict[str, float]
    notes: tuple[str, ...]
    num_in_training: int = 0
    metrics_of_new: dict[str, float] = field(default_factory=dict)


class NewRows(ABC):
    """Rows of a file that a fine-tuned model predicts; each task reads and writes them in its own layout.

    Args:
        path: The file, in the layout of the task.
        column: Column of the SMILES or text, for a task that has one; None: the usual one.

    Raises:
        DataError: The file cannot be read.

    Attributes:
        keys: What identifies each of N rows or questions that the model can read, as in `DownstreamTask.training_keys`.
        targets: (N, C) labels of these rows as in `EncodedSplit`; None for spans.
    """

    suffix: ClassVar[str] = ".csv"
    """Ending of the file of predictions."""
    keys: Sequence[str]
    targets: FloatArray | None = None

    @abstractmethod
    def __init__(self, task: TrainedTask, path: Path, column: str | None, progress: Progress) -> None: ...

    @classmethod
    def output_files(cls, out: Path) -> tuple[Path, ...]:
        """Return all files that `write` makes."""
        return (out,)

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise the rows that the model can read."""

    @abstractmethod
    def score(self, outputs: SeedOutputs, is_scored_N: NDArray[np.bool_]) -> dict[str, float]:
        """Return the metrics of the chosen rows; empty where the file has no labels. `outputs` as for `write`."""

    def answer_probabilities(self, outputs: SeedOutputs) -> AnswerProbabilities | None:
        """Return what answers of loss `span` are calibrated by, as the task does; `outputs` as for `write`."""
        del outputs
        return None

    @abstractmethod
    def write(
        self, outputs: SeedOutputs, out: Path, *, added: TableColumns | None = None, escapes_formulas: bool = False
    ) -> PredictionSummary:
        """Write the predictions, and score them where the file has labels.

        Args:
            added: Further columns for the N readable rows, for the table of all rows.
            escapes_formulas: Put an apostrophe before a cell of the table that a spreadsheet would take for a formula.

        Raises:
            CheckpointError: The file system refuses.
        """


def write_table(path: Path, columns: TableColumns, *, escapes_formulas: bool) -> tuple[str, ...]:
    """Write columns as CSV; return a note on cells that a spreadsheet would take for a formula, where there are any.

    Raises:
        CheckpointError: The file system refuses.
    """
    rows = [[str(cell) for cell in row] for row in (list(columns), *zip(*columns.values(), strict=True))]
    num_formulas = sum(map(_is_formula, (cell for row in rows for cell in row)))
    if escapes_formulas:
        rows = [[f"'{cell}" if _is_formula(cell) else cell for cell in row] for row in rows]
    write_csv(path, rows[0], rows[1:])
    if not num_formulas:
        return ()
    what = f"cells that a spreadsheet takes for formulas: {num_formulas:,}"
    if escapes_formulas:
        return (f"{what}; each has an apostrophe before it now",)
    return (f"{what}; `escape_formulas=true` puts an apostrophe before each",)


def _is_formula(cell: str) -> bool:
    if not cell.startswith(_FORMULA_STARTS):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


def write_outputs(
    path: Path,
    rows: Iterable[int],
    names: Sequence[str],
    outputs: Iterable[FloatArray],
    more: TableColumns | None = None,
) -> None:
    """Write a CSV of `row`, the row of the input, and C columns: the (C,) values of N examples with all their digits;
    behind them `more` columns for people.

    Raises:
        CheckpointError: The file system refuses.
    """
    cells = ([int(row), *(repr(float(v)) for v in output)] for row, output in zip(rows, outputs, strict=True))
    if more:
        cells = ([*of_row, *behind] for of_row, behind in zip(cells, zip(*more.values(), strict=True), strict=True))
    write_csv(path, ["row", *names, *(more or ())], cells)
