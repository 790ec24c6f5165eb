"""Interface between downstream tasks and the engine that fine-tunes, scores and predicts. The engine knows no task.

Axes: K seeds, N examples of a split, C outputs, L tokens of an example.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import InputKind, TaskConfig
from exlm_cli.data import IntArray
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.files import csv_bytes
from exlm_cli.progress import Progress

FloatArray = NDArray[np.float64]
SeedOutputs = FloatArray | Sequence[Sequence[FloatArray]]
"""What K seeds predict for N examples: (K, N, C) probabilities, or values in the task's own units, float64; for spans
the (L, 2) logits of each example, for each seed."""
TableColumns = Mapping[str, Sequence[object]]
"""Cells of a table by column."""

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
class EncodedRows:
    """Rows as the encoder reads them: texts, pairs, molecules, or windows of questions.

    Attributes:
        token_ids: N sequences of (L,) tokens, [CLS] first and [SEP] last.
        targets: (N, C) for `binary` and `regression`, NaN where missing; (N, 1) class index for `classes`; (N, 2) first
            and last answer token for `span`, both 0 (that is [CLS]) where there is no answer.
        answerable: (N, L) bool for `span`, rows ragged: tokens an answer may begin or end at, [CLS] included; None for
            the other losses.
        notes: What a report says about the encoding, such as how many rows were cut.
        bounds: (N, C, 2) between which each value lies, the value twice where it is known, infinite where nothing is;
            None: no value is censored. The targets of censored values are NaN.
        weights: (N,) what each row weighs in the loss, on average 1 over the training rows; None: all the same.
        descriptors: (N, F) numbers that the head reads beside the encoder's state, NaN where missing; None: none. A
            task gives those of `task.descriptor_columns`, to which the engine adds `task.descriptors`.
        is_pairs: Whether examples are pairs of texts, [CLS] a [SEP] b [SEP].
    """

    token_ids: tuple[IntArray, ...]
    targets: FloatArray
    answerable: tuple[NDArray[np.bool_], ...] | None = None
    notes: tuple[str, ...] = ()
    descriptors: FloatArray | None = None
    is_pairs: bool = False
    bounds: FloatArray | None = None
    weights: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


class EncodedSplit(EncodedRows, ABC):
    """Encoded examples that score and write the outputs of models for them; pickled where workers train.

    Scores and files use the mean of `outputs` over the seeds.
    """

    @property
    def is_labelled(self) -> bool:
        """Whether there are labels to score outputs with: not every target is NaN.

        Examples of loss `span` override this: their targets are never NaN.
        """
        return not np.isnan(self.targets).all()

    @property
    def scored_targets(self) -> FloatArray:
        """(N, C) targets of the rows that the task's main metrics are over."""
        return self.targets

    @abstractmethod
    def score(self, outputs: SeedOutputs, is_scored_N: NDArray[np.bool_] | None = None) -> dict[str, float]:
        """Return metrics by name over all rows or questions, or those in `is_scored_N`; NaN where not defined."""

    def score_labels(self, outputs: SeedOutputs) -> dict[str, dict[str, float]]:
        """Return the metrics of each label or value by its name, where a task has several."""
        del outputs
        return {}

    def describe_outputs(self, outputs: SeedOutputs) -> list[str]:
        """Return in words how outputs are degenerate, like one class for every row."""
        del outputs
        return []

    @abstractmethod
    def prediction_columns(self, outputs: SeedOutputs) -> dict[str, list[str]]:
        """Return the cells of a table with a line for each row or question, by column."""

    def official_files(self, outputs: SeedOutputs) -> tuple[bytes, ...]:
        """Return the content of files for a benchmark's own script, in the order of `Layout.output_files`."""
        del outputs
        return ()

    def write_answers(self, folder: Path, split: Split, outputs: SeedOutputs) -> None:
        """Write, for spans, what the benchmark's own script reads; of other rows the engine keeps the predictions.

        Raises:
            CheckpointError: A file cannot be written.
        """
        del folder, split, outputs


class DownstreamTask(ABC):
    """One data set with its splits and labels.

    Attributes:
        name: Like `moleculenet/bace`.
        input_kind: Kind of checkpoint that fits.
        loss: Loss that the task is trained with.
        output_names: C names: labels, classes or target columns; `("start", "end")` for spans.
        selection_metric: Validation metric that chooses the best epoch.
        is_greater_better: Whether a greater `selection_metric` is better; False for errors like RMSE.
        class_weights: (C,) weight of each class, or of each label's positives for `binary`; None: all 1.
        splits: Splits that exist. GLUE and SQuAD have no labelled test set; the paper reports their `valid`.
        split_name: How the rows are split: `official`, `files`, `column`, `held out: ...`, or a value of `task.split`.
        split_imitates: Which new rows the test rows are like; empty where nobody knows.
        notes: What a report says about the data: skipped rows, labels without a score, duplicates across splits.
        skipped: All rows that are not used, in order; notes name some of them.
        labels_sha256: Hash of the rows and labels of a user's own table, however it is split; empty for other tasks.
        score_fingerprint: Text that changes with anything that `score` depends on besides outputs and encoded examples;
            empty if there is nothing. A run resumes only with the same text.
        training_keys: Key of each training row: a molecule's canonical SMILES, a text, or texts joined by NUL. `exlm
            predict` recognises training rows by it.
        validation_keys, test_keys: Key of each validation row and of each test row.
        resplit: Returns the task of the same rows, which are not read again, on the split of another `task.split_seed`;
            raises `DataError` where a split is empty. None: there is one split.
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
    split_imitates: str = ""
    notes: tuple[str, ...] = ()
    skipped: tuple[SkippedRow, ...] = ()
    labels_sha256: str = ""
    score_fingerprint: str = ""
    training_keys: Sequence[str] = ()
    validation_keys: Sequence[str] = ()
    test_keys: Sequence[str] = ()
    resplit: Callable[[int], "DownstreamTask"] | None = None

    @property
    @abstractmethod
    def split_indices(self) -> SplitIndices:
        """Rows of the input in each split, for SQuAD its questions, counted from 0, in the order of the examples."""

    @property
    def split_sizes(self) -> dict[str, int]:
        """Number of rows of each split, in the order train, valid, test."""
        return {split: len(rows) for split, rows in self.split_indices.items()}

    @abstractmethod
    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise a split; sequences longer than `sequence_length` are cut (spans: into windows)."""


@dataclass(frozen=True)
class TrainedTask:
    """What prediction needs to know about the task that a model was fine-tuned on; fields as in `DownstreamTask`.

    `config` is the `task` section of the run's recipe. `no_answer_threshold` (SQuAD) is the median over the seeds.
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
        notes: What a report says about the rows and their predictions.
        predictor: What predicted: `model`, `baseline` or `both`; empty for vectors.
        num_in_training: Rows that the model was trained on.
        num_in_validation: Other rows that chose its best epoch and fitted its calibration.
        metrics_of_new: `metrics` of the remaining rows; empty if there are none, or if these are all rows.
        labels: Scores of each label or value by its name, where there are several.
    """

    files: tuple[Path, ...]
    num_rows: int
    num_unreadable: int
    metrics: dict[str, float]
    notes: tuple[str, ...]
    predictor: str = ""
    num_in_training: int = 0
    num_in_validation: int = 0
    metrics_of_new: dict[str, float] = field(default_factory=dict)
    labels: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class NewRows:
    """R rows or questions that a fine-tuned model predicts, N of which it can read.

    Attributes:
        encode: Tokenises the N readable ones, like `DownstreamTask.encode`; unknown targets are NaN.
        keys: What identifies each of the N, as in `DownstreamTask.training_keys`.
        columns: Columns of the file, R cells each, written before the predictions; empty for rows in memory.
        readable: (N,) rows that can be read, counted from 0, ascending.
        problems: (R) why a row cannot be read, empty where it can; None: all can.
        num_skipped: Further rows of the file, which are in no table.
        notes: What a report says about the rows.
    """

    encode: Callable[[Tokenizer, int], EncodedSplit]
    keys: Sequence[str]
    columns: TableColumns
    readable: IntArray
    problems: tuple[str, ...] | None = None
    num_skipped: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of rows of the file or list, including those that are in no table."""
        rows = self.readable if self.problems is None else self.problems
        return len(next(iter(self.columns.values()), rows)) + self.num_skipped

    def as_csv(self, predicted: Mapping[str, Sequence[str]]) -> tuple[bytes, tuple[str, ...]]:
        """Return all rows as CSV, with the file's columns, predictions of the readable rows, and problems; and notes.

        Args:
            predicted: Cells of the N readable rows by column. A column of the file with such a name is left out.
        """
        columns, notes = self.joined(predicted)
        return csv_bytes(list(columns), zip(*columns.values(), strict=True)), notes

    def joined(self, predicted: Mapping[str, Sequence[str]]) -> tuple[dict[str, Sequence[object]], tuple[str, ...]]:
        """Return all rows as columns, as `as_csv` writes them, and notes."""
        num_rows = self.num_rows - self.num_skipped
        added: dict[str, Sequence[str]] = {}
        for name, cells in predicted.items():
            by_row = dict(zip(self.readable.tolist(), cells, strict=True))
            added[name] = [by_row.get(row, "") for row in range(num_rows)]
        if self.problems is not None:
            added["problem"] = self.problems
        own = {name: cells for name, cells in self.columns.items() if name not in added}
        replaced = [f"`{name}`" for name in self.columns if name not in own]
        return {**own, **added}, (
            f"predictions replace the table's own columns {', '.join(replaced)}",
        ) if replaced else ()


@dataclass(frozen=True)
class Layout:
    """How the files to predict are read, and how the files of predictions are named.

    Attributes:
        read: Reads a file to predict, given its path and the column of the SMILES or text, or both of pairs; empty: the
            usual ones. Raises `DataError` if the file cannot be read.
        suffix: Ending of the file of predictions.
        endings: Endings of further files beside it. The last of all files is the table of rows.
    """

    read: Callable[[TrainedTask, Path, tuple[str, ...], Progress], NewRows]
    suffix: str = ".csv"
    endings: tuple[str, ...] = ()

    def output_files(self, out: Path) -> tuple[Path, ...]:
        """Return the files of a prediction, `out` first."""
        return out, *(out.with_name(f"{out.stem}{ending}") for ending in self.endings)
