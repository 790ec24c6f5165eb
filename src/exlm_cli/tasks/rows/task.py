"""Tasks with one text, pair of texts or molecule per row: splits, their tokens, and the scores of outputs for them.

All are one class, `RowTask`: of a table (`tasks/user_table.py`) or of a benchmark's files (`tasks/glue.py`).

A pair is written as in BERT, [CLS] a [SEP] b [SEP], or as the tokenizer's own post-processor does. RoBERTa in fairseq,
and so the official ExLM code, writes two separators between the texts (`<s> a </s></s> b </s>`). Here pre-training puts
a single [SEP] between documents and never shows two in a row, so checkpoints know one. Only the encoder of a BERT has
segment embeddings; it finds the second text by the first [SEP].

Axes: K seeds, N rows of a split, C outputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data import IntArray
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.format import format_number_of, name_some
from exlm_cli.tasks import metrics
from exlm_cli.tasks.base import (
    SPLITS,
    DownstreamTask,
    EncodedRows,
    EncodedSplit,
    FloatArray,
    Loss,
    NewRows,
    SeedOutputs,
    Split,
    SplitIndices,
    TableColumns,
)
from exlm_cli.tasks.rows.table import InputRows

LOG10 = "log10 "
"""What the names of values begin with that are logarithms."""
_MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ScoredRows(EncodedSplit):
    """Rows of a split or of a file to predict.

    Attributes:
        loss, names: `loss` and `output_names` of the task.
        texts: One or two texts, or one SMILES, of each of N rows.
        rows: (N,) row of the input, counted from 0.
        places: Place of each row in its file for people, like `line 7`; none where nobody knows.
        scale: (C,) standard deviations of the training targets, as in `metrics.score_rows`.
        is_log10: Whether the values are logarithms, which predictions undo.
    """

    loss: Loss
    names: tuple[str, ...]
    texts: Sequence[tuple[str, ...]]
    rows: IntArray
    places: Sequence[str] = ()
    scale: FloatArray | None = None
    is_log10: bool = False

    def score(self, outputs: SeedOutputs, is_scored_N: NDArray[np.bool_] | None = None) -> dict[str, float]:
        """Return the metrics, means over the labels or columns in which each is defined.

        Of values with bounds, `rmse` and `mae` count the wrong side of a bound; the other metrics leave bounds out.
        """
        chosen = slice(None) if is_scored_N is None else is_scored_N
        mean_NC = _mean(outputs)[chosen]
        scores = self._metrics(mean_NC, self.targets[chosen])
        if self.bounds is None:
            return scores
        columns = metrics.score_bounds(mean_NC, self.bounds[chosen])
        if len(columns) == 1:
            return scores | columns[0]
        if self.scale is None:
            return scores
        scaled = (column["rmse"] / scale for column, scale in zip(columns, self.scale, strict=True))
        return scores | {"standardised_rmse": metrics.mean_of_defined(scaled)}

    def _metrics(self, mean_NC: FloatArray, targets_NC: FloatArray) -> dict[str, float]:
        return metrics.score_rows(self.loss, mean_NC, targets_NC, self.scale)

    def score_labels(self, outputs: SeedOutputs) -> dict[str, dict[str, float]]:
        """Return the metrics of each label or value by its name; nothing for classes or a single one."""
        scores = metrics.score_labels(self.loss, _mean(outputs), self.targets, self.names)
        if self.bounds is None:
            return scores
        beside = metrics.score_bounds(_mean(outputs), self.bounds)
        return {name: of_label | more for (name, of_label), more in zip(scores.items(), beside, strict=False)}

    def describe_outputs(self, outputs: SeedOutputs) -> list[str]:
        """Return in words which outputs are the same in every row."""
        return metrics.describe_constant(self.loss, _mean(outputs), self.targets, self.names)

    def prediction_columns(self, outputs: SeedOutputs) -> dict[str, list[str]]:
        """Return `<name>_probability` of each label or class, or `<name>_predicted` value; `predicted_class` if there
        are classes; over several seeds `<name>_seed_spread`, their standard deviation (n - 1). Of logarithms the values
        themselves come too, `<name>` without `log10`.
        """
        mean_NC = _mean(outputs)
        columns = name_columns(self.names, "predicted" if self.loss == "regression" else "probability", mean_NC)
        if self.is_log10:
            columns |= name_columns(without_log10(self.names), "predicted", 10**mean_NC)
        if self.loss == "classes":
            columns["predicted_class"] = [self.names[index] for index in mean_NC.argmax(axis=1)]
        if len(outputs) > 1:
            columns |= name_columns(self.names, "seed_spread", np.std(outputs, axis=0, ddof=1))
        return columns


def _mean(outputs: SeedOutputs) -> FloatArray:
    return np.asarray(np.mean(outputs, axis=0))


def truth_columns(
    loss: Loss, names: Sequence[str], targets_NC: FloatArray, bounds_NC2: FloatArray | None
) -> dict[str, list[str]]:
    """Return `true_class`, or `<name>_true` of each label or value, with `>` or `<` before a bound."""
    if loss == "classes":
        return {"true_class": [names[int(index)] if index >= 0 else "" for index in targets_NC[:, 0]]}
    columns = name_columns(names, "true", targets_NC)
    if bounds_NC2 is not None:
        for column, of_column in zip(columns.values(), np.moveaxis(bounds_NC2, 1, 0), strict=True):
            for row, (low, high) in enumerate(of_column):
                if not column[row] and math.isfinite(low) != math.isfinite(high):
                    column[row] = f">{low:.10g}" if math.isfinite(low) else f"<{high:.10g}"
    return columns


def without_log10(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of values whose logarithms have `names`."""
    return tuple(name.removeprefix(LOG10) for name in names)


def name_columns(names: Sequence[str], what: str, values_NC: FloatArray) -> dict[str, list[str]]:
    """Return cells of `<name>_<what>` for C names, with ten digits, empty for NaN."""
    return {
        f"{name}_{what}": ["" if math.isnan(value) else f"{value:.10g}" for value in column]
        for name, column in zip(names, values_NC.T, strict=True)
    }


@dataclass(frozen=True)
class TokenStore:
    """Tokens of rows, so that a row is tokenised once however many splits it is in.

    Attributes:
        by_model: Tokens of a row and whether it had to be cut, by tokenizer and length, then by its texts.
    """

    by_model: dict[tuple[Tokenizer, int], dict[tuple[str, ...], tuple[IntArray, bool]]] = field(default_factory=dict)


@dataclass(frozen=True)
class LabelledRows:
    """Rows of one split, or to predict.

    Attributes:
        texts: One or two texts, or one SMILES, of each of N rows.
        targets: (N, C), NaN where missing; (N, 1) class index for `classes`.
        rows: (N,) row of the input, counted from 0.
        place_of: Returns the place of a row of the input as notes name it.
        scored: Makes what scores the rows once they are encoded, given the values of `ScoredRows`.
        tokens: Shared by the splits of a table.
        numbers: (N, n) numbers of `task.descriptor_columns`, NaN where missing; None: there are none.
        own_keys: What identifies each row; None: its texts.
        bounds, weights: As in `EncodedRows`.
        is_log10: As in `ScoredRows`.
    """

    texts: Sequence[tuple[str, ...]]
    targets: FloatArray
    rows: IntArray
    place_of: Callable[[int], str] = lambda row: f"row {row + 1:,}"
    scored: Callable[..., ScoredRows] = ScoredRows
    tokens: TokenStore = field(default_factory=TokenStore)
    numbers: FloatArray | None = None
    own_keys: Sequence[str] | None = None
    bounds: FloatArray | None = None
    weights: FloatArray | None = None
    is_log10: bool = False

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """(N, C) whether there is a target or a bound."""
        has_target_NC = ~np.isnan(self.targets)
        return has_target_NC if self.bounds is None else has_target_NC | np.isfinite(self.bounds).any(axis=2)

    @property
    def keys(self) -> Sequence[str]:
        """What identifies each row: of a pair both texts, joined by NUL."""
        return ["\0".join(texts) for texts in self.texts] if self.own_keys is None else self.own_keys

    def describe_bounds(self, part: str) -> str:
        """Return a note on how many rows of a scored part have bounds, and what counts them; empty where none has."""
        num = 0 if self.bounds is None else int((self.is_known & np.isnan(self.targets)).any(axis=1).sum())
        if not num or part == "train":
            return ""
        where = f"{part}: " if part else ""
        return (
            f"{where}{num:,} of {format_number_of(len(self.targets), 'row')} have bounds: rmse and mae count their "
            "wrong side alone; other scores, intervals and pictures leave them out"
        )


def labelled_rows(
    table: InputRows, rows: IntArray, targets: FloatArray, *, canonical_smiles: bool, **more: Any
) -> LabelledRows:
    """Return some rows of a table as the model reads them.

    Args:
        targets: Theirs; `more` are further fields of `LabelledRows`.
    """
    texts, keys = table.texts(canonical=canonical_smiles), table.keys
    own = {"place_of": table.table.short_place, "own_keys": [keys[row] for row in rows], **more}
    return LabelledRows([texts[row] for row in rows], targets, rows, **own)


class RowTask(DownstreamTask):
    """Rows of each split, tokenised as they are."""

    def __init__(
        self, name: str, loss: Loss, output_names: Sequence[str], examples: Mapping[Split, LabelledRows]
    ) -> None:
        self.name, self.loss, self.output_names = name, loss, tuple(output_names)
        self.examples = examples
        self.splits = tuple(split for split in SPLITS if split in examples)
        self.training_keys, self.validation_keys, self.test_keys = (
            examples[split].keys if split in examples else () for split in SPLITS
        )

    @property
    def split_indices(self) -> SplitIndices:
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
    encoded = replace(
        _encode(examples, tokenizer, sequence_length),
        descriptors=examples.numbers,
        bounds=examples.bounds,
        weights=examples.weights,
    )
    fields = {"loss": loss, "names": names, "texts": examples.texts, "rows": examples.rows, "scale": scale}
    places = [examples.place_of(row) for row in examples.rows.tolist()]
    return examples.scored(**vars(encoded), **fields, places=places, is_log10=examples.is_log10)


def rows_to_predict(
    rows: LabelledRows, loss: Loss, names: tuple[str, ...], columns: TableColumns, **more: Any
) -> NewRows:
    """Return rows as those to predict; `columns` and `more` are further fields of `NewRows`."""
    encode = partial(encode_labelled_rows, rows, loss=loss, names=names)
    return NewRows(encode, rows.keys, columns, rows.rows, **more)


def encode_input_rows(
    rows: InputRows, tokenizer: Tokenizer, sequence_length: int, *, canonical_smiles: bool
) -> EncodedRows:
    """Tokenise the used rows, each as [CLS] text [SEP]; targets are zeros."""
    used = rows.rows
    labelled = labelled_rows(rows, used, np.zeros((len(used), 1)), canonical_smiles=canonical_smiles)
    return _encode(labelled, tokenizer, sequence_length)


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
    is_pairs = bool(rows) and len(rows[0]) == 2
    token_ids = tuple(known[row][0] for row in rows)
    return EncodedRows(token_ids, targets, notes=(note,) if num_cut else (), is_pairs=is_pairs)


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
