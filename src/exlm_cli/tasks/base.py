"""What fine-tuning needs of a task. A task knows its data and its scores; the engine knows no task.

Axes: N examples of a split, C outputs, L tokens of an example.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.tokenizer import Tokenizer

FloatArray = NDArray[np.float64]

Loss = Literal["binary", "classes", "regression", "span"]
"""How outputs become a loss.

`binary`: a sigmoid for each label, missing labels left out; `classes`: one softmax over C classes; `regression`: mean
squared error, missing values left out; `span`: a softmax over the tokens of an example for its first answer token and
another for its last one.
"""

Split = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class EncodedSplit:
    """The examples of one split as the encoder sees them.

    Attributes:
        token_ids: N sequences of (L,) tokens, [CLS] first and [SEP] last.
        targets: (N, C) for `binary` and `regression`, NaN where missing; (N, 1) class index for `classes`; (N, 2) first
            and last answer token for `span`, both 0 (that is [CLS]) where there is no answer.
        answerable: (N, L) bool for `span`, rows ragged: tokens an answer may begin or end at, [CLS] included; None for
            the other losses.
    """

    token_ids: tuple[IntArray, ...]
    targets: FloatArray
    answerable: tuple[NDArray[np.bool_], ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


class DownstreamTask(Protocol):
    """One data set with its splits, labels and scores."""

    @property
    def name(self) -> str:
        """Like `moleculenet/bace`."""

    @property
    def input_kind(self) -> Literal["text", "smiles"]:
        """Which kind of checkpoint fits."""

    @property
    def loss(self) -> Loss:
        """How it is trained."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """C names: labels, classes or target columns; `("start", "end")` for spans."""

    @property
    def selection_metric(self) -> str:
        """The validation metric that chooses the best epoch; greater is better where `is_greater_better`."""

    @property
    def is_greater_better(self) -> bool:
        """False for errors like RMSE."""

    @property
    def class_weights(self) -> FloatArray | None:
        """(C,) weight of each class, or of each label's positives for `binary`; None: all 1."""

    @property
    def splits(self) -> tuple[Split, ...]:
        """Those that exist; GLUE and SQuAD have no labelled test set, their `valid` is what the paper reports."""

    @property
    def split_name(self) -> str:
        """How the rows are split: `official` as published, `files` of the user's, by a `column`, or `task.split`."""

    @property
    def split_sizes(self) -> dict[str, int]:
        """Rows of each split, in the order train, valid, test."""

    @property
    def split_indices(self) -> dict[str, IntArray]:
        """Row of the input each example came from, counted from 0, in order."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report has to say: rows left out and why, labels that cannot be scored, duplicates across splits."""

    @property
    def left_out(self) -> tuple[SkippedRow, ...]:
        """All rows that are not used, in order; notes name some of them."""

    @property
    def score_fingerprint(self) -> str:
        """Of what `score` depends on besides the outputs and the encoded examples; empty where there is nothing else.

        A run is only resumed with the same one.
        """

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise a split; sequences longer than `sequence_length` are cut and counted (spans: windows)."""

    def score(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Return the metrics of a split by name.

        Args:
            split: Which.
            outputs: For each encoded example, in order: (C,) logits (values for `regression`, in the task's own units),
                or (L, 2) logits for `span`. A metric that is not defined (one class only) is NaN.
        """
