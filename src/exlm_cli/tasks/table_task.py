"""One text or molecule a row, and labels or values in columns: the task behind MoleculeNet and behind any CSV.

Axes: R rows of the table, N of a split, C outputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.records import SkippedRow
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.format import format_percent
from exlm_cli.tasks.base import EncodedSplit, FloatArray, Loss, Split
from exlm_cli.tasks.metrics import describe_unscorable, score_binary, score_classes, score_regression
from exlm_cli.tasks.pairs import encode_pairs
from exlm_cli.tasks.scaffold import SPLITS

InputKind = Literal["text", "smiles"]

NO_TEST_NOTE = (
    "test: none of its rows can be used, so there are no test scores; `exlm predict RUN FILE` "
    "predicts rows without labels"
)

_MOST_NAMED = 5


def to_probabilities(loss: Loss, outputs_NC: FloatArray) -> FloatArray:
    """Return probabilities of logits: one for each label (`binary`), or over the classes; values stay values."""
    from scipy import special

    if loss == "binary":
        return np.asarray(special.expit(outputs_NC))
    return np.asarray(special.softmax(outputs_NC, axis=1)) if loss == "classes" else outputs_NC


def score_rows(loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray) -> dict[str, float]:
    """Return the metrics of probabilities or values; means over the labels or columns in which each is defined.

    Args:
        loss: Of the task.
        predicted_NC: As `to_probabilities` makes them.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
    """
    match loss:
        case "binary":
            return score_binary(predicted_NC, targets_NC)
        case "classes":
            return score_classes(predicted_NC, targets_NC[:, 0])
        case _:
            return score_regression(predicted_NC, targets_NC)


def name_some(names: Iterable[object], *, most: int = _MOST_NAMED) -> str:
    """Return `1, 2, 3 and 4 more`."""
    listed = [str(name) for name in names]
    rest = f" and {len(listed) - most:,} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest


@final
class TableTask:
    """A `DownstreamTask` over the rows of a table."""

    def __init__(
        self,
        name: str,
        input_kind: InputKind,
        loss: Loss,
        output_names: Sequence[str],
        texts: Sequence[str],
        targets_RC: FloatArray,
        indices: Mapping[Split, IntArray],
        *,
        split_name: str,
        is_balanced: bool = False,
        notes: Sequence[str] = (),
        left_out: Sequence[SkippedRow] = (),
    ) -> None:
        """Hold the table.

        Args:
            name: Like `moleculenet/bace`.
            input_kind: What a row's text is.
            loss: `binary`, `classes` or `regression`.
            output_names: C labels, classes or columns.
            texts: R texts or SMILES.
            targets_RC: (R, C), NaN where missing; (R, 1) class index for `classes`.
            indices: Rows of each split; a test split without rows is left out, and a note says so.
            split_name: How the rows were split.
            is_balanced: Let rarer classes weigh more.
            notes: What a report has to say of the data.
            left_out: Rows that are not used.

        Raises:
            DataError: The training or validation split is empty.
        """
        for split in ("train", "valid"):
            if not len(indices.get(split, ())):
                raise DataError(
                    f"{name}: the split leaves no rows in `{split}`",
                    "give more rows, another `task.split` (`random` fills all three), or a `task.split_file`",
                )
        self.name, self.input_kind, self.loss, self.split_name = name, input_kind, loss, split_name
        self.output_names = tuple(output_names)
        self.splits: tuple[Split, ...] = tuple(split for split in SPLITS if len(indices.get(split, ())))
        self._texts, self._targets_RC = texts, targets_RC
        self._indices = {split: indices[split] for split in self.splits}
        has_empty_test = "test" in indices and "test" not in self.splits
        self._notes = [*notes, *([NO_TEST_NOTE] if has_empty_test else []), *self._describe_targets()]
        self.left_out = tuple(left_out)
        self._num_cut: dict[Split, int] = {}
        self.class_weights = self._balanced_weights() if is_balanced and loss != "regression" else None
        self.selection_metric, self.is_greater_better = self._choose_metric()

    @property
    def split_sizes(self) -> dict[str, int]:
        """Rows of each split."""
        return {split: len(rows) for split, rows in self._indices.items()}

    @property
    def split_indices(self) -> dict[str, IntArray]:
        """Rows of the table, counted from 0, ascending."""
        return {str(split): rows for split, rows in self._indices.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a report has to say; once a split is encoded, also how many rows were cut."""
        cut = [f"{split}: cut {number:,} rows to fit" for split, number in self._num_cut.items() if number]
        return (*self._notes, *cut)

    @property
    def score_fingerprint(self) -> str:
        """Nothing: scores are those of the encoded targets."""
        return ""

    def texts(self, split: Split) -> list[str]:
        """The N texts or SMILES of a split."""
        return [self._texts[row] for row in self._indices[split]]

    def targets(self, split: Split) -> FloatArray:
        """(N, C) targets of a split, NaN where missing; (N, 1) class index for `classes`."""
        return self._targets_RC[self._indices[split]]

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise a split as [CLS] text [SEP]; what is too long loses its end."""
        rows = [(text,) for text in self.texts(split)]
        token_ids, self._num_cut[split] = encode_pairs(rows, tokenizer, sequence_length)
        return EncodedSplit(token_ids, self.targets(split))

    def score(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Return the metrics of a split; means over the labels or columns in which each is defined."""
        outputs_NC = np.stack([np.asarray(output, dtype=np.float64) for output in outputs])
        predicted_NC = to_probabilities(self.loss, outputs_NC)
        return score_rows(self.loss, predicted_NC, self.targets(split))

    def _describe_targets(self) -> list[str]:
        notes = []
        used = np.concatenate([self.targets(split) for split in self.splits])
        share = float(np.isnan(used).mean())
        if share > 0:
            notes.append(f"{format_percent(share)} of the labels are missing; they are left out of loss and scores")
        for split in self.splits:
            unscorable = self._unscorable(split)
            if unscorable:
                listed = name_some(f"`{name}` {reason}" for name, reason in unscorable.items())
                notes.append(f"{split}: not scored, for lack of both classes: {listed}")
        return notes

    def _unscorable(self, split: Split) -> dict[str, str]:
        if self.loss == "regression":
            return {}
        targets_NC = self.targets(split)
        if self.loss == "binary":
            return describe_unscorable(targets_NC, self.output_names)
        present = np.unique(targets_NC).astype(int)
        if len(present) > 1:
            return {}
        return {"class": f"is {self.output_names[present[0]]} in every row"} if len(present) else {}

    def _choose_metric(self) -> tuple[str, bool]:
        """Return the metric that chooses the best epoch, and whether more of it is better."""
        if self.loss == "regression":
            return "rmse", False
        has_auc = self.loss == "binary" or len(self.output_names) == 2
        num_labels = len(self.output_names) if self.loss == "binary" else 1
        if has_auc and len(self._unscorable("valid")) < num_labels:
            return "roc_auc", True
        if has_auc:
            self._notes.append("valid has no label with both classes: accuracy, not ROC-AUC, chooses the best epoch")
        return "accuracy", True

    def _balanced_weights(self) -> FloatArray:
        """Weights that let every class of the training rows count alike: n / (C * n_c), or negatives per positive."""
        targets_NC = self.targets("train")
        if self.loss == "classes":
            counts = np.bincount(targets_NC[:, 0].astype(int), minlength=len(self.output_names))
            return np.where(counts > 0, counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1.0)
        positives: NDArray[np.int64] = np.count_nonzero(targets_NC == 1, axis=0)
        negatives: NDArray[np.int64] = np.count_nonzero(targets_NC == 0, axis=0)
        has_both = (positives > 0) & (negatives > 0)
        return np.where(has_both, negatives / np.maximum(positives, 1), 1.0)
