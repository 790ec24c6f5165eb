"""Tasks with one text, pair of texts or molecule per row: encoding, labels and scores, and prediction of a table.

`TableTask` is the task of MoleculeNet and of any CSV; GLUE's tasks (`glue.py`) are `RowTask`s too.

A pair is written as in BERT, [CLS] a [SEP] b [SEP]. RoBERTa in fairseq, and so the official ExLM code, writes two
separators between the texts (`<s> a </s></s> b </s>`). Here pre-training puts a single [SEP] between documents and
never shows two in a row, so checkpoints know one. There are no segment embeddings, as in RoBERTa.

Axes: K seeds, R rows of a table, N examples of a split, C outputs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.tasks import CsvTaskConfig, RowTaskConfig
from exlm_cli.data import IntArray
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.format import name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import (
    NO_TEST_NOTE,
    SPLITS,
    DownstreamTask,
    EncodedSplit,
    FloatArray,
    Loss,
    NewRows,
    PredictionSummary,
    SeedOutputs,
    Split,
    TableColumns,
    TrainedTask,
    write_outputs,
    write_table,
)
from exlm_cli.tasks.labels import Labels, read_known_targets, with_decimal_points
from exlm_cli.tasks.splits import RowSplit
from exlm_cli.tasks.table_rows import TableRows, describe_repeats, read_input_rows


@dataclass(frozen=True)
class Examples:
    """Rows of one split.

    Attributes:
        texts: One or two texts, or one SMILES, of each of N rows.
        targets: (N, C), NaN where missing; (N, 1) class index for `classes`.
        rows: (N,) row of the input, counted from 0.
    """

    texts: Sequence[tuple[str, ...]]
    targets: FloatArray
    rows: IntArray


class RowTask(DownstreamTask):
    """Examples by split, tokenised as they are."""

    def __init__(self, name: str, loss: Loss, output_names: Sequence[str], examples: Mapping[Split, Examples]) -> None:
        self.name, self.loss, self.output_names = name, loss, tuple(output_names)
        self.examples = examples
        self.splits = tuple(split for split in SPLITS if split in examples)
        self.training_keys = [join_texts(texts) for texts in examples["train"].texts] if "train" in examples else ()

    @property
    def split_indices(self) -> dict[str, IntArray]:
        """Rows of the input, counted from 0."""
        return {split: self.examples[split].rows for split in self.splits}

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise a split as [CLS] a [SEP] or [CLS] a [SEP] b [SEP]; the longer text of a long row loses its end."""
        examples = self.examples[split]
        return encode_texts(examples.texts, tokenizer, sequence_length, examples.targets)

    def score(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, float]:
        """Return the metrics of a split; means over the labels or columns in which each is defined."""
        scale = metrics.target_scale(self.examples["train"].targets)[1] if self.loss == "regression" else None
        return metrics.score_rows(self.loss, self._predicted(outputs), self.examples[split].targets, scale)

    def score_labels(self, split: Split, outputs: Sequence[FloatArray]) -> dict[str, dict[str, float]]:
        """Return the metrics of each label or value by its name; nothing for classes or a single one."""
        if self.loss == "classes" or len(self.output_names) == 1:
            return {}
        columns = metrics.score_columns(self.loss, self._predicted(outputs), self.examples[split].targets)
        return dict(zip(self.output_names, columns, strict=True))

    def describe_outputs(self, split: Split, outputs: Sequence[FloatArray]) -> list[str]:
        """Return in words which outputs are the same in every row."""
        return metrics.describe_constant(
            self.loss, self._predicted(outputs), self.examples[split].targets, self.output_names
        )

    def _predicted(self, outputs: Sequence[FloatArray]) -> FloatArray:
        return metrics.to_probabilities(
            self.loss, np.stack([np.asarray(output, dtype=np.float64) for output in outputs])
        )

    def write_predictions(self, folder: Path, split: Split, outputs: Sequence[FloatArray]) -> None:
        """Write `predictions-<split>.csv`: probabilities of labels or classes, or values, by row of the input.

        Behind them are the truth, `<name>_true` or `true_class`, and the text or SMILES that the model read.
        """
        examples = self.examples[split]
        predicted = (metrics.to_probabilities(self.loss, output[None])[0] for output in outputs)
        if self.loss == "classes":
            classes = examples.targets[:, 0]
            truth = {"true_class": ["" if math.isnan(c) else self.output_names[int(c)] for c in classes]}
        else:
            truth = name_columns(self.output_names, "true", examples.targets)
        texts = zip(*examples.texts, strict=True)
        names = ("input",) if len(examples.texts[0]) == 1 else ("input_a", "input_b")
        more = {**truth, **dict(zip(names, texts, strict=True))}
        write_outputs(folder / f"predictions-{split}.csv", examples.rows, self.output_names, predicted, more)


class TableTask(RowTask):
    """Rows of one table, with labels, classes or values in its columns.

    Args:
        split: Rows of each split; a test split without rows is left out, with a note.

    Raises:
        DataError: The training or validation split is empty.
    """

    def __init__(
        self, config: RowTaskConfig, usable: TableRows, labels: Labels, split: RowSplit, notes: Sequence[str] = ()
    ) -> None:
        indices = split.indices
        for needed in ("train", "valid"):
            if not len(indices.get(needed, ())):
                hint = "give more rows, another `task.split` (`random` fills all three), or a `task.split_file`"
                if split.name in ("files", "column", "file"):
                    hint = "training and validation need rows that can be used"
                raise DataError(f"{config.name}: the split leaves no rows in `{needed}`", hint)
        inputs = usable.model_inputs(canonical=config.has_canonical_smiles)
        examples = {
            part: Examples([(inputs[row],) for row in rows], labels.targets[rows], rows)
            for part, rows in indices.items()
            if len(rows)
        }
        super().__init__(config.name, labels.loss, labels.names, examples)
        keys = usable.keys
        self.training_keys = [keys[row] for row in indices["train"]]
        self.input_kind, self.split_name, self.skipped = config.input_kind, split.name, usable.skipped
        if config.class_weights == "balanced" and labels.loss != "regression":
            self.class_weights = self._balanced_weights()
        found = [*labels.notes, *usable.notes, *split.notes, *notes, *describe_repeats(usable, indices, labels.targets)]
        if "test" in indices and "test" not in examples:
            found.append(NO_TEST_NOTE)
        self.selection_metric, self.is_greater_better, metric_notes = self._choose_metric()
        self.notes = (*found, *self._describe_targets(), *metric_notes)

    def _describe_targets(self) -> list[str]:
        notes = []
        used = np.concatenate([self.examples[split].targets for split in self.splits])
        share = float(np.isnan(used).mean())
        if share > 0:
            notes.append(f"{100 * share:.1f} % of the labels are missing; they are left out of loss and scores")
        for split in self.splits:
            unscorable = self._unscorable(split)
            if unscorable:
                listed = name_some(f"`{name}` {reason}" for name, reason in unscorable.items())
                notes.append(f"{split}: not scored, for lack of both classes: {listed}")
        return notes

    def _unscorable(self, split: Split) -> dict[str, str]:
        targets_NC = self.examples[split].targets
        if self.loss == "binary":
            return metrics.describe_unscorable(targets_NC, self.output_names)
        present = np.unique(targets_NC)
        if self.loss == "regression" or len(present) > 1:
            return {}
        return {"class": f"is {self.output_names[int(present[0])]} in every row"}

    def _choose_metric(self) -> tuple[str, bool, list[str]]:
        """Return the metric that chooses the best epoch, whether more of it is better, and notes."""
        if self.loss == "regression":
            return ("rmse" if len(self.output_names) == 1 else "standardised_rmse"), False, []
        has_auc = self.loss == "binary" or len(self.output_names) == 2
        num_labels = len(self.output_names) if self.loss == "binary" else 1
        if has_auc and len(self._unscorable("valid")) < num_labels:
            return "roc_auc", True, []
        note = "valid has no label with both classes: accuracy, not ROC-AUC, chooses the best epoch"
        return "accuracy", True, [note] if has_auc else []

    def _balanced_weights(self) -> FloatArray:
        """Return n / (C * n_c) for classes, negatives per positive for labels, over the training rows."""
        targets_NC = self.examples["train"].targets
        if self.loss == "classes":
            counts = np.bincount(targets_NC[:, 0].astype(int), minlength=len(self.output_names))
            return np.where(counts > 0, counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1.0)
        positives, negatives = (np.asarray(np.count_nonzero(targets_NC == label, axis=0)) for label in (1, 0))
        has_both = (positives > 0) & (negatives > 0)
        return np.where(has_both, negatives / np.maximum(positives, 1), 1.0)


class NewTableRows(NewRows):
    """A table to predict: every row comes back in its place, with the table's own columns.

    It is a CSV or TSV, also .gz and .xz, or lines of text or SMILES (.txt, .smi). Without `column`, the column of the
    task is read, else the one with a usual name. Labels are read where the table has them.
    """

    targets: FloatArray

    def __init__(self, task: TrainedTask, path: Path, column: str | None, progress: Progress) -> None:
        config = task.config
        self._task = task
        self._rows = read_input_rows(path, task.input_kind, progress, column=column, usual_column=config.input_column)
        self._label_columns = task.output_names
        if task.loss == "classes" and isinstance(config, CsvTaskConfig):
            self._label_columns = config.label_columns
        keys, table = self._rows.keys, self._rows.table
        if isinstance(config, CsvTaskConfig) and config.decimal_comma:
            table = with_decimal_points(table, self._label_columns)
        self.keys = [keys[row] for row in self._rows.rows]
        self.targets = read_known_targets(table, self._label_columns, task.loss, task.output_names)[self._rows.rows]
        self._missing_labels = [name for name in self._label_columns if name not in table.columns]

    def encode(self, tokenizer: Tokenizer, sequence_length: int) -> EncodedSplit:
        """Tokenise the readable rows as [CLS] text [SEP]."""
        canonical = self._task.config.has_canonical_smiles
        return encode_input_rows(self._rows, tokenizer, sequence_length, canonical_smiles=canonical)

    def score(self, outputs: SeedOutputs, is_scored_N: NDArray[np.bool_]) -> dict[str, float]:
        """Return the metrics of the chosen rows, where one of them has a label."""
        targets_NC = self.targets[is_scored_N]
        if np.isnan(targets_NC).all():
            return {}
        loss = self._task.loss
        mean_NC = metrics.probabilities_by_seed(loss, outputs, len(self._task.output_names)).mean(axis=0)
        return metrics.score_rows(loss, mean_NC[is_scored_N], targets_NC)

    def write(
        self, outputs: SeedOutputs, out: Path, *, added: TableColumns | None = None, escapes_formulas: bool = False
    ) -> PredictionSummary:
        """Write one CSV row for each row of the table, in its order.

        Columns: `line` of the table; its own columns; those of `prediction_columns`; `added`; `problem` of a row that
        cannot be read. A column of the table with such a name is left out.
        """
        table, readable, problems = self._rows.table, self._rows.rows, self._rows.problems
        by_seed_KNC = metrics.probabilities_by_seed(self._task.loss, outputs, len(self._task.output_names))
        of_readable = prediction_columns(self._task.loss, self._task.output_names, by_seed_KNC) | dict(added or {})
        predicted = {name: [""] * len(table) for name in of_readable}
        for name, cells in of_readable.items():
            for row, cell in zip(readable.tolist(), cells, strict=True):
                predicted[name][row] = str(cell)
        own = {name: cells for name, cells in table.columns.items() if name not in ("line", *predicted, "problem")}
        columns: TableColumns = {"line": table.lines, **own, **predicted, "problem": problems}
        notes = [*self._rows.notes, *write_table(out, columns, escapes_formulas=escapes_formulas)]
        scores = self.score(outputs, np.ones(len(readable), dtype=np.bool_))
        if scores and self._missing_labels:
            notes.append(f"scored without the labels that the table lacks: {', '.join(self._missing_labels)}")
        replaced = [f"`{name}`" for name in table.columns if name not in own]
        if replaced:
            notes.append(f"predictions replace the table's own columns {', '.join(replaced)}")
        return PredictionSummary((out,), len(table), len(table) - len(readable), scores, tuple(notes))


def prediction_columns(loss: Loss, names: Sequence[str], by_seed_KNC: FloatArray) -> dict[str, list[str]]:
    """Return the cells of N predictions of K seeds by column.

    `<name>_probability` of each label or class, or `<name>_predicted` value, means over the seeds; `predicted_class` if
    there are classes; over several seeds `<name>_seed_spread`, their standard deviation (n - 1).
    """
    mean_NC = by_seed_KNC.mean(axis=0)
    columns = name_columns(names, "predicted" if loss == "regression" else "probability", mean_NC)
    if loss == "classes":
        columns["predicted_class"] = [names[index] for index in mean_NC.argmax(axis=1)]
    if len(by_seed_KNC) > 1:
        columns |= name_columns(names, "seed_spread", by_seed_KNC.std(axis=0, ddof=1))
    return columns


def name_columns(names: Sequence[str], what: str, values_NC: FloatArray) -> dict[str, list[str]]:
    """Return cells of `<name>_<what>` for C names, empty for NaN."""
    return {
        f"{name}_{what}": ["" if math.isnan(value) else f"{value:.6g}" for value in column]
        for name, column in zip(names, values_NC.T, strict=True)
    }


def join_texts(texts: Sequence[str]) -> str:
    """Return what identifies a row of one or two texts."""
    return "\0".join(texts)


def encode_input_rows(
    rows: TableRows, tokenizer: Tokenizer, sequence_length: int, *, canonical_smiles: bool
) -> EncodedSplit:
    """Tokenise the rows that are used as [CLS] text [SEP]; targets are zeros."""
    inputs = rows.model_inputs(canonical=canonical_smiles)
    return encode_texts([(inputs[row],) for row in rows.rows], tokenizer, sequence_length)


def encode_texts(
    rows: Sequence[tuple[str, ...]], tokenizer: Tokenizer, sequence_length: int, targets: FloatArray | None = None
) -> EncodedSplit:
    """Tokenise rows of one or two texts; a note says if rows had to be cut.

    Args:
        rows: N rows, each with as many texts as the first one.
        sequence_length: Maximum tokens of a sequence, [CLS] and [SEP] included; at least 5.
        targets: As in `EncodedSplit`; None: zeros.
    """
    targets = np.zeros((len(rows), 1)) if targets is None else targets
    encoded = [tokenizer.encode_batch(texts) for texts in zip(*rows, strict=True)]
    budget = sequence_length - 1 - len(encoded)
    sequences = []
    num_cut = 0
    for pieces in zip(*encoded, strict=True):
        kept = longest_first([len(piece) for piece in pieces], budget)
        num_cut += sum(kept) < sum(map(len, pieces))
        ids = [tokenizer.cls_id]
        for piece, length in zip(pieces, kept, strict=True):
            ids += [*piece[:length], tokenizer.sep_id]
        sequences.append(np.array(ids, dtype=np.int64))
    note = f"cut {num_cut:,} of {len(rows):,} rows to {sequence_length} tokens (`task.sequence_length`)"
    return EncodedSplit(tuple(sequences), targets, notes=(note,) if num_cut else ())


def longest_first(lengths: Sequence[int], budget: int) -> list[int]:
    """Return the tokens to keep of one or two texts: the longer text loses tokens from its end, one at a time.

    If both are equally long, the second loses one, as in BERT.
    """
    if len(lengths) == 1:
        return [min(lengths[0], budget)]
    first, second = lengths
    kept_second = min(second, max(budget - first, budget // 2))
    return [min(first, budget - kept_second), kept_second]
