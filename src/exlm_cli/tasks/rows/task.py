"""Tasks with one text, pair of texts or molecule per row: splits, their encoding and scores, and tables to predict.

All are one class, `RowTask`. `table_task` makes one of a table, for MoleculeNet and any CSV; `tasks/glue.py` one of a
benchmark's files, whose rows have metrics of their own.

A pair is written as in BERT, [CLS] a [SEP] b [SEP], or as the tokenizer's own post-processor does. RoBERTa in fairseq,
and so the official ExLM code, writes two separators between the texts (`<s> a </s></s> b </s>`). Here pre-training puts
a single [SEP] between documents and never shows two in a row, so checkpoints know one. Only the encoder of a BERT has
segment embeddings; it finds the second text by the first [SEP].

Axes: K seeds, R rows of a table, N examples of a split, C outputs.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from exlm_cli.config.tasks import MISSING_VALUES, CsvTaskConfig, RowTaskConfig
from exlm_cli.data import IntArray
from exlm_cli.data.rows.records import LINE_FORMATS, format_of
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.format import name_some
from exlm_cli.progress import Progress
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import (
    NO_TEST_NOTE,
    SPLITS,
    DownstreamTask,
    EncodedRows,
    FloatArray,
    Loss,
    NewRows,
    Split,
    TableColumns,
    TrainedTask,
)
from exlm_cli.tasks.rows.encoded import ScoredRows
from exlm_cli.tasks.rows.inputs import InputRows, describe_repeats, read_input_rows
from exlm_cli.tasks.rows.labels import LabelKind, Labels, read_known_targets, read_numbers, with_decimal_points
from exlm_cli.tasks.rows.splits import RowSplit, split_rows

_MAX_NAMED = 3


@dataclass(frozen=True)
class TokenStore:
    """Tokens of rows, so that a row is tokenised once however many splits it is in.

    Attributes:
        by_model: Tokens of a row and whether it had to be cut, by tokenizer and length, then by its texts.
    """

    by_model: dict[tuple[Tokenizer, int], dict[tuple[str, ...], tuple[IntArray, bool]]] = field(default_factory=dict)


@dataclass(frozen=True)
class LabelledRows:
    """Rows of one split.

    Attributes:
        texts: One or two texts, or one SMILES, of each of N rows.
        targets: (N, C), NaN where missing; (N, 1) class index for `classes`.
        rows: (N,) row of the input, counted from 0.
        place_of: Returns the place of a row of the input as notes name it.
        scored: Makes what scores the rows once they are encoded, given the values of `ScoredRows`.
        tokens: Shared by the splits of a table.
        numbers: (N, n) numbers of `task.descriptor_columns`, NaN where missing; None: there are none.
    """

    texts: Sequence[tuple[str, ...]]
    targets: FloatArray
    rows: IntArray
    place_of: Callable[[int], str] = lambda row: f"row {row + 1:,}"
    scored: Callable[..., ScoredRows] = ScoredRows
    tokens: TokenStore = field(default_factory=TokenStore)
    numbers: FloatArray | None = None


class RowTask(DownstreamTask):
    """Rows of each split, tokenised as they are."""

    def __init__(
        self, name: str, loss: Loss, output_names: Sequence[str], examples: Mapping[Split, LabelledRows]
    ) -> None:
        self.name, self.loss, self.output_names = name, loss, tuple(output_names)
        self.examples = examples
        self.splits = tuple(split for split in SPLITS if split in examples)
        self.training_keys, self.validation_keys, self.test_keys = (
            [join_texts(texts) for texts in examples[split].texts] if split in examples else () for split in SPLITS
        )

    @property
    def split_indices(self) -> dict[str, IntArray]:
        """Rows of the input, counted from 0."""
        return {split: self.examples[split].rows for split in self.splits}

    @property
    def target_scale(self) -> FloatArray | None:
        """(C,) standard deviations of the training targets of a regression; None otherwise."""
        has_scale = self.loss == "regression" and "train" in self.examples
        return metrics.target_scale(self.examples["train"].targets)[1] if has_scale else None

    def encode(self, split: Split, tokenizer: Tokenizer, sequence_length: int) -> ScoredRows:
        """Tokenise a split as [CLS] a [SEP] or [CLS] a [SEP] b [SEP]; the longer text of a long row loses its end."""
        return encode_labelled_rows(
            self.examples[split],
            tokenizer,
            sequence_length,
            loss=self.loss,
            names=self.output_names,
            scale=self.target_scale,
        )


def table_task(
    config: RowTaskConfig,
    usable: InputRows,
    labels: Labels,
    split: RowSplit,
    notes: Sequence[str] = (),
    tokens: TokenStore | None = None,
    numbers: FloatArray | None = None,
) -> RowTask:
    """Return the task of one table, with labels, classes or values in its columns.

    Args:
        split: Rows of each split; a test split without rows is left out, with a note.
        tokens: Of the task of the same table on another split; None: there is none.
        numbers: (R, n) numbers of `task.descriptor_columns`; None: there are none.

    Raises:
        DataError: The training or validation split is empty.
    """
    indices = split.indices
    for needed in ("train", "valid"):
        if not len(indices.get(needed, ())):
            hint = "give more rows, another `task.split` (`random` fills all three), or a `task.split_file`"
            if split.name in ("files", "column", "file"):
                hint = "training and validation need rows that can be used"
            raise DataError(f"{config.name}: the split leaves no rows in `{needed}`", hint)
    inputs, keys = usable.model_inputs(canonical=config.has_canonical_smiles), usable.keys
    tokens, place_of = tokens or TokenStore(), usable.table.short_place
    examples = {
        part: LabelledRows(
            [(inputs[row],) for row in rows],
            labels.targets[rows],
            rows,
            place_of,
            tokens=tokens,
            numbers=None if numbers is None else numbers[rows],
        )
        for part, rows in indices.items()
        if len(rows)
    }
    task = RowTask(config.name, labels.loss, labels.names, examples)
    if config.name == "csv":
        used = np.sort(np.concatenate([split.indices[part] for part in examples]))
        task.labels_sha256 = hashlib.sha256(used.tobytes() + labels.targets[used].tobytes()).hexdigest()
    task.training_keys, task.validation_keys, task.test_keys = (
        [keys[row] for row in indices.get(part, ())] for part in SPLITS
    )
    task.input_kind, task.split_name, task.skipped = config.input_kind, split.name, usable.skipped
    if config.class_weights == "balanced" and labels.loss != "regression":
        task.class_weights = _balanced_weights(task)
    found = [*labels.notes, *usable.notes, *split.notes, *notes, *describe_repeats(usable, indices, labels.targets)]
    if "test" in indices and "test" not in examples:
        found.append(NO_TEST_NOTE)
    if "test" not in examples:
        found.append("the scores are those of `valid`, on which the best epoch is chosen too: they are optimistic")
    task.selection_metric, task.is_greater_better, metric_notes = _choose_metric(task)
    task.notes = (*found, *_describe_targets(task), *metric_notes)

    def resplit(split_seed: int) -> RowTask:
        changed = config.model_copy(update={"split_seed": split_seed})
        resplit_rows = split_rows(changed, usable, labels.classes)
        return table_task(changed, usable, labels, resplit_rows, tokens=tokens, numbers=numbers)

    task.resplit = resplit
    return task


def _describe_targets(task: RowTask) -> list[str]:
    notes = []
    used = np.concatenate([task.examples[split].targets for split in task.splits])
    share = float(np.isnan(used).mean())
    if share > 0:
        notes.append(f"{100 * share:.1f} % of the labels are missing; they are left out of loss and scores")
    for split in task.splits:
        unscorable = _unscorable(task, split)
        if unscorable and task.loss == "classes" and len(task.output_names) > 2:
            effect = "there is nothing to learn" if split == "train" else "its scores are meaningless"
            notes.append(f"{split}: `class` {unscorable['class']}, so {effect}")
        elif unscorable:
            listed = name_some(f"`{name}` {reason}" for name, reason in unscorable.items())
            notes.append(f"{split}: without both classes there is no ROC-AUC: {listed}")
    return notes


def _unscorable(task: RowTask, split: Split) -> dict[str, str]:
    targets_NC = task.examples[split].targets
    if task.loss == "binary":
        return metrics.describe_unscorable(targets_NC, task.output_names)
    present = np.unique(targets_NC)
    if task.loss == "regression" or len(present) > 1:
        return {}
    return {"class": f"is {task.output_names[int(present[0])]} in every row"}


def _choose_metric(task: RowTask) -> tuple[str, bool, list[str]]:
    """Return the metric that chooses the best epoch, whether more of it is better, and notes."""
    if task.loss == "regression":
        return ("rmse" if len(task.output_names) == 1 else "standardised_rmse"), False, []
    has_auc = task.loss == "binary" or len(task.output_names) == 2
    num_labels = len(task.output_names) if task.loss == "binary" else 1
    if has_auc and len(_unscorable(task, "valid")) < num_labels:
        return "roc_auc", True, []
    note = "valid has no label with both classes: accuracy, not ROC-AUC, chooses the best epoch"
    return "accuracy", True, [note] if has_auc else []


def _balanced_weights(task: RowTask) -> FloatArray:
    """Return n / (C * n_c) for classes, negatives per positive for labels, over the training rows."""
    targets_NC = task.examples["train"].targets
    if task.loss == "classes":
        counts = np.bincount(targets_NC[:, 0].astype(int), minlength=len(task.output_names))
        return np.where(counts > 0, counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1.0)
    positives, negatives = (np.asarray(np.count_nonzero(targets_NC == label, axis=0)) for label in (1, 0))
    has_both = (positives > 0) & (negatives > 0)
    return np.where(has_both, negatives / np.maximum(positives, 1), 1.0)


def read_new_table(task: TrainedTask, path: Path, column: str | None, progress: Progress) -> NewRows:
    """Read a table to predict: every row comes back in its place, with the table's own columns.

    It is a CSV or TSV, also .gz and .xz, or lines of text or SMILES (.txt, .smi). Without `column`, the column of the
    task is read, else the one with a usual name. Labels are read where the table has them.

    Raises:
        DataError: The table or its column cannot be read, or a cell is not a label of the task.
    """
    config = task.config
    found = read_input_rows(
        path,
        task.input_kind,
        progress,
        column=column,
        usual_column=config.input_column,
        reads_parents=config.reads_parents,
    )
    label_columns, table = task.output_names, found.table
    kind: LabelKind = "auto"
    missing_words: tuple[str, ...] = MISSING_VALUES
    if isinstance(config, CsvTaskConfig):
        kind, missing_words = config.label_kind, config.missing_values
        label_columns = config.label_columns if task.loss == "classes" else label_columns
        table = with_decimal_points(table, label_columns) if config.decimal_comma else table
    if format_of(path) in LINE_FORMATS:
        table = replace(table, columns={})  # a list has no labels, also where its names stand under `name`
    known = read_known_targets(table, label_columns, task.loss, task.output_names, kind, missing_words)
    targets = known[found.rows]
    notes, missing = found.notes, [name for name in label_columns if name not in table.columns]
    if missing and not np.isnan(targets).all():
        notes = (*notes, f"scored without the labels that the table lacks: {', '.join(missing)}")
    if "line" in table.columns:
        notes = (*notes, "lines of the file replace the table's own column `line`")
    columns = {"line": found.table.lines} | {name: c for name, c in found.table.columns.items() if name != "line"}
    numbers = read_numbers(found.table, config)[found.rows] if config.number_columns else None
    return new_rows(found, task, targets, columns, notes, numbers)


def new_rows(
    found: InputRows,
    task: TrainedTask,
    targets: FloatArray,
    columns: TableColumns,
    notes: tuple[str, ...],
    numbers: FloatArray | None = None,
) -> NewRows:
    """Return rows of a table or list as rows to predict.

    Args:
        targets: (N, C) known targets of the readable rows, NaN where unknown.
        columns, notes: As in `NewRows`.
        numbers: As in `LabelledRows`.
    """
    inputs, keys = found.model_inputs(canonical=task.config.has_canonical_smiles), found.keys
    texts = [(inputs[row],) for row in found.rows]
    examples = LabelledRows(texts, targets, found.rows, found.table.short_place, numbers=numbers)
    encode = partial(encode_labelled_rows, examples, loss=task.loss, names=task.output_names)
    return NewRows(encode, [keys[row] for row in found.rows], columns, found.rows, found.problems, notes=notes)


def encode_labelled_rows(
    examples: LabelledRows,
    tokenizer: Tokenizer,
    sequence_length: int,
    *,
    loss: Loss,
    names: tuple[str, ...],
    scale: FloatArray | None = None,
) -> ScoredRows:
    """Tokenise rows, as `encode_texts` does; other arguments are those of `ScoredRows`."""
    encoded = replace(_encode(examples, tokenizer, sequence_length), descriptors=examples.numbers)
    fields = {"loss": loss, "names": names, "texts": examples.texts, "rows": examples.rows, "scale": scale}
    places = [examples.place_of(row) for row in examples.rows.tolist()]
    return examples.scored(**vars(encoded), **fields, places=places)


def join_texts(texts: Sequence[str]) -> str:
    """Return what identifies a row of one or two texts."""
    return "\0".join(texts)


def encode_input_rows(
    rows: InputRows, tokenizer: Tokenizer, sequence_length: int, *, canonical_smiles: bool
) -> EncodedRows:
    """Tokenise the used rows, each as [CLS] text [SEP]; targets are zeros."""
    inputs, used = rows.model_inputs(canonical=canonical_smiles), rows.rows
    texts, targets = [(inputs[row],) for row in used], np.zeros((len(used), 1))
    return _encode(LabelledRows(texts, targets, used, rows.table.short_place), tokenizer, sequence_length)


def _encode(examples: LabelledRows, tokenizer: Tokenizer, sequence_length: int) -> EncodedRows:
    """Tokenise rows, as `encode_texts` does; a note names the first ones with tokens outside the vocabulary."""
    encoded = encode_texts(examples.texts, tokenizer, sequence_length, examples.targets, examples.tokens)
    unknown = [index for index, ids in enumerate(encoded.token_ids) if tokenizer.unk_id in ids]
    if not unknown:
        return encoded
    first = []
    for index in unknown[:_MAX_NAMED]:
        tokens = name_some(_unknown_tokens(examples.texts[index], tokenizer))
        first.append(f"{tokens} ({examples.place_of(int(examples.rows[index]))})")
    what = "rows with tokens outside the vocabulary, which the model reads as [UNK]"
    note = f"{what}: {len(unknown):,} of {len(encoded):,}; the first: {'; '.join(first)}"
    return replace(encoded, notes=(*encoded.notes, note))


def _unknown_tokens(texts: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of a row that are outside the vocabulary, each once, in order."""
    found: dict[str, None] = {}
    for text in texts:
        encoding = tokenizer.encode_with_offsets(text)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == tokenizer.unk_id:
                found[f"`{text[start:end]}`"] = None
    return list(found)


def encode_texts(
    rows: Sequence[tuple[str, ...]],
    tokenizer: Tokenizer,
    sequence_length: int,
    targets: FloatArray | None = None,
    tokens: TokenStore | None = None,
) -> EncodedRows:
    """Tokenise rows of one or two texts; a note says if rows had to be cut.

    Args:
        rows: N rows, each with as many texts as the first one.
        sequence_length: Maximum tokens of a sequence, [CLS] and [SEP] included; at least 5.
        targets: As in `EncodedRows`; None: zeros.
        tokens: Those of rows that were tokenised before, which grow; None: none were.
    """
    targets = np.zeros((len(rows), 1)) if targets is None else targets
    known = (tokens or TokenStore()).by_model.setdefault((tokenizer, sequence_length), {})
    new = [row for row in dict.fromkeys(rows) if row not in known]
    known |= zip(new, _tokenise(new, tokenizer, sequence_length), strict=True)
    num_cut = sum(known[row][1] for row in rows)
    note = f"cut {num_cut:,} of {len(rows):,} rows to {sequence_length} tokens (`sequence_length`)"
    return EncodedRows(tuple(known[row][0] for row in rows), targets, notes=(note,) if num_cut else ())


def _tokenise(
    rows: Sequence[tuple[str, ...]], tokenizer: Tokenizer, sequence_length: int
) -> Iterator[tuple[IntArray, bool]]:
    """Yield the tokens of each row, and whether it had to be cut."""
    encoded = [tokenizer.encode_batch(texts) for texts in zip(*rows, strict=True)]
    between = tokenizer.pair_ids
    budget = sequence_length - 2 - len(between) * (len(encoded) - 1)
    for pieces in zip(*encoded, strict=True):
        kept = longest_first([len(piece) for piece in pieces], budget)
        first, *second = (piece[:length] for piece, length in zip(pieces, kept, strict=True))
        ids = [tokenizer.cls_id, *first, *chain(*((*between, *piece) for piece in second)), tokenizer.sep_id]
        yield np.array(ids, dtype=np.int64), sum(kept) < sum(map(len, pieces))


def longest_first(lengths: Sequence[int], budget: int) -> list[int]:
    """Return how many tokens of one or two texts to keep, as `longest_first` of Hugging Face tokenizers does.

    Of a pair above the budget, the shorter text keeps at most half of the budget, rounded down, and the longer one gets
    the rest. If both are equally long, the first counts as the shorter.

    That library's own truncation also builds every pair of the pieces that it cuts off: two texts of 8,000 tokens cut
    to 128 take it 2 GB.
    """
    if sum(lengths) <= budget:
        return list(lengths)
    if len(lengths) == 1:
        return [budget]
    first, second = lengths
    kept_shorter = min(first, second, budget // 2)
    return [kept_shorter, budget - kept_shorter] if first <= second else [budget - kept_shorter, kept_shorter]
