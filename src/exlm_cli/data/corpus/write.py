"""Writing of token shards: rows -> splits -> tokens -> sequences -> shards, in this order from top to bottom."""

import hashlib
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Self, final

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig
from exlm_cli.data.corpus.fingerprint import FingerprintedSource
from exlm_cli.data.corpus.inputs import FileSource, first_row, iter_rows
from exlm_cli.data.corpus.shards import ShardWriter
from exlm_cli.data.molecules import read_smiles
from exlm_cli.data.rows.records import LINE_FORMATS, SKIPPED_COLUMNS, SKIPPED_FILE, Row, RowKind, format_of
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError
from exlm_cli.files import csv_line
from exlm_cli.format import format_number_of, shorten
from exlm_cli.progress import Progress

TRAIN, VALID, SPELLINGS = "train", "valid", "valid-spellings"

TRAIN_SEED, _VALID_SEED = 0, 1
"""Bundled data is the same whatever the seed of the run, so that runs over seeds share it."""
_BATCH_ROWS, _BATCH_CHARACTERS = 4096, 1 << 19
_NUM_ENDS = 2
"""[CLS] and [SEP], which every sequence gets when it is used."""
_LARGE_HOLDOUT = 0.2
"""Share of the tokens for validation above which a warning is due."""
_LARGEST_BLOCK_CHARACTERS = 1 << 16
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Corpus:
    """Everything that decides the shards of a recipe."""

    recipe: PretrainRecipe
    train: list[FingerprintedSource]
    valid: list[FingerprintedSource]
    tokenizer: Tokenizer
    fingerprint: str


def write_shards(corpus: Corpus, folder: Path, progress: Progress) -> int:
    """Write `train/`, `valid/` and the like, and the list of skipped rows, into a folder; return how many are skipped.

    Raises:
        DataError: A row cannot be used, or too few can.
    """
    write = _write_given_splits if corpus.valid else _write_held_out_splits
    return write(corpus, folder, progress)


def check_first_rows(sources: Sequence[FingerprintedSource], data: DataConfig) -> None:
    """Read the first row of every file, so that one without the column is refused before the others are read."""
    for known in sources:
        if isinstance(known.source, FileSource):
            row = first_row(known.source, data)
            if row is not None and row.problem is not None and data.on_invalid == "error" and not row.is_null:
                raise _invalid_row(row, row.problem)


# Rows that cannot be used: the first is an error, or all are listed


@final
class _SkippedRows:
    """Rows that cannot be used: the first one raises, or all are counted and written to a CSV."""

    def __init__(self, path: Path, on_invalid: Literal["error", "skip"]) -> None:
        self.path = path
        self.on_invalid = on_invalid
        self.num_rows = 0
        self._first = ""

    def __enter__(self) -> Self:
        self._file = self.path.open("w", encoding="utf-8", errors="backslashreplace", newline="")
        self._file.write(csv_line(SKIPPED_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row, reason: str) -> None:
        """Skip a row.

        Raises:
            DataError: `on_invalid` is `error`, and the row is not null.
        """
        if self.on_invalid == "error" and not row.is_null:
            raise _invalid_row(row, reason)
        self.num_rows += 1
        self._first = self._first or _describe(row, reason)
        self._file.write(csv_line((row.source, row.number, reason, row.text)))

    def describe(self) -> str:
        """Return how many there are and what is wrong with the first, as the end of a sentence; empty for none."""
        if not self.num_rows:
            return ""
        return f"; {format_number_of(self.num_rows, 'row')} skipped, the first: {self._first}"


def _invalid_row(row: Row, reason: str) -> DataError:
    """Return the error for a row that cannot be used."""
    return DataError(_describe(row, reason), "`data.on_invalid=skip` skips such rows and lists them in a CSV")


def _describe(row: Row, reason: str) -> str:
    shown = shorten(" ".join(row.text.split()), _SHOWN_CHARACTERS)
    return f"{row.source}:{row.number}: `{shown}`: {reason}" if shown else f"{row.source}:{row.number}: {reason}"


# Splits: two inputs, or one of which rows are held out


def _write_given_splits(corpus: Corpus, folder: Path, progress: Progress) -> int:
    data = corpus.recipe.data
    with _SkippedRows(folder / SKIPPED_FILE, data.on_invalid) as skipped:
        for split, sources in ((VALID, corpus.valid), (TRAIN, corpus.train)):
            if not sources:
                continue  # nothing is trained
            writers = _write_sequences(corpus, sources, folder, [split], None, skipped, progress)
            if not writers[split].num_sequences:
                raise _no_usable_row(data, f"`data.{split}`: " if corpus.train else "", sources, skipped)
    return skipped.num_rows


def _write_held_out_splits(corpus: Corpus, folder: Path, progress: Progress) -> int:
    data = corpus.recipe.data
    sizes_bytes = [known.source.size_bytes for known in corpus.train if isinstance(known.source, FileSource)]
    total_bytes = sum(sizes_bytes) if len(sizes_bytes) == len(corpus.train) else None

    def write(forced: bytes | None = None) -> tuple[Holdout, _SkippedRows, ShardWriter, ShardWriter]:
        holdout = Holdout(data.kind, data.valid_fraction, total_bytes, data.max_rows, forced)
        with _SkippedRows(folder / SKIPPED_FILE, data.on_invalid) as skipped:
            writers = _write_sequences(corpus, corpus.train, folder, [TRAIN, VALID], holdout, skipped, progress)
        return holdout, skipped, writers[TRAIN], writers[VALID]

    holdout, skipped, train, valid = write()
    if not valid.num_sequences:
        if holdout.smallest is None:
            raise _no_usable_row(data, f"`data.{TRAIN}`: ", corpus.train, skipped)
        # The hashes chose nothing of a small corpus: hold out the smallest hash.
        _, skipped, train, valid = write(forced=holdout.smallest)
    if not train.num_sequences or not valid.num_sequences:
        raise DataError(
            f"{_named(corpus.train)}: too few usable rows to hold some out for validation{skipped.describe()}",
            "give more rows, or rows of their own with `data.valid`",
        )
    share = valid.num_tokens / (train.num_tokens + valid.num_tokens)
    if share > max(_LARGE_HOLDOUT, 2 * data.valid_fraction):
        progress.message(
            f"warning: {share:.0%} of the tokens are held out for validation, where `data.valid_fraction` is "
            f"{data.valid_fraction:g}: a row, or a document, is held out whole"
        )
    return skipped.num_rows


@final
class Holdout:
    """Chooses the validation rows by hash, so that the choice is the same every time.

    SMILES are chosen by their text, so that a duplicate is never on both sides. Text is chosen by blocks (a document,
    or a number of characters or rows of one), so that sentences of one passage stay together; a smaller corpus has
    smaller blocks.
    """

    def __init__(
        self,
        kind: RowKind,
        fraction: float,
        total_bytes: int | None,
        max_rows: int | None = None,
        forced: bytes | None = None,
    ) -> None:
        """Decide the size of blocks.

        Args:
            total_bytes: Size of the whole corpus if it is known; it stands for the number of characters.
            max_rows: Number of rows that are read, if not all are.
            forced: Hash of a unit to hold out as well: `smallest` of a first pass that held nothing out.
        """
        self.kind: RowKind = kind
        self.smallest: bytes | None = None
        self._limit = int(fraction * 2**64).to_bytes(8)
        self._forced = forced
        largest = _LARGEST_BLOCK_CHARACTERS
        self._block_characters = largest if total_bytes is None else min(largest, int(total_bytes * fraction / 8))
        self._block_rows = math.inf if max_rows is None else max_rows * fraction / 8
        self._filled_characters = 0
        self._filled_rows = 0
        self._num_blocks = 0
        self._is_held_out = False

    def takes(self, row: Row) -> bool:
        """Return whether a row is held out; rows must come in order."""
        if self.kind == "smiles":
            return self._draw(row.text)
        is_full = self._filled_characters > self._block_characters or self._filled_rows > self._block_rows
        if row.starts_document or is_full:
            self._num_blocks += 1
            self._filled_characters = self._filled_rows = 0
            self._is_held_out = self._draw(f"block {self._num_blocks}")
        self._filled_characters += len(row.text)
        self._filled_rows += 1
        return self._is_held_out

    def _draw(self, unit: str) -> bool:
        drawn = hashlib.blake2b(unit.encode(), digest_size=8, person=b"exlm hold-out").digest()
        if self.smallest is None or drawn < self.smallest:
            self.smallest = drawn
        return drawn < self._limit or drawn == self._forced


def _no_usable_row(
    data: DataConfig, key: str, sources: Sequence[FingerprintedSource], skipped: _SkippedRows
) -> DataError:
    files = (known.source for known in sources)
    has_columns = not all(isinstance(file, FileSource) and format_of(file.path) in LINE_FORMATS for file in files)
    hint = f"name the column that holds the {data.kind} with `data.column=NAME`, or " if has_columns else ""
    hint += "give other rows"
    return DataError(f"{key}no usable row in {_named(sources)}{skipped.describe()}", hint)


# Rows -> tokens -> sequences -> shards


def _write_sequences(
    corpus: Corpus,
    sources: Sequence[FingerprintedSource],
    folder: Path,
    splits: Sequence[str],
    holdout: Holdout | None,
    skipped: _SkippedRows,
    progress: Progress,
) -> dict[str, ShardWriter]:
    """Tokenise rows, cut or pack them into sequences, write those of each split, and return the finished writers.

    `holdout` chooses among the splits; None: there is one. All spellings of a training molecule follow each other. Of a
    validation molecule the first other one goes to `SPELLINGS`, in which each molecule counts once; only small
    molecules may lack it with fewer spellings. Sequences in which nothing can be masked are left out.

    Raises:
        DataError: Nothing can be masked in any sequence.
    """
    data, tokenizer = corpus.recipe.data, corpus.tokenizer
    size, newline_ids = data.sequence_length - _NUM_ENDS, tokenizer.encode("\n")
    seed = _VALID_SEED if splits == [VALID] else TRAIN_SEED
    label = "tokenising" if len(splits) > 1 else f"tokenising {splits[0]}"
    num_unknown, num_left_out, num_too_long, last = 0, 0, 0, ""
    also_spelled = [SPELLINGS] if data.num_spellings > 1 and VALID in splits else []
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(folder / split, tokenizer.vocab_size, corpus.fingerprint))
            for split in (*splits, *also_spelled)
        }
        packers = {split: Packer(size, tokenizer.sep_id, newline_ids) for split in splits if _packs(data)}
        rows = stack.enter_context(reading(sources, data, seed, progress, label))
        for row, ids, spellings in _tokenise(_usable(rows, data, skipped), data, tokenizer, skipped):
            num_unknown += sum(one.count(tokenizer.unk_id) for one in (ids, *spellings))
            num_too_long += len(row.spellings) - len(spellings)
            split = splits[0] if holdout is None else VALID if holdout.takes(row) else TRAIN
            if packers:
                # rows that were apart in the corpus must not look like neighbours
                sequences = packers[split].add(ids, starts_document=row.starts_document or split != last)
            else:
                sequences = cut(ids, size)
            num_left_out += _write_maskable(sequences, writers[split], tokenizer)
            if spellings:
                others, kept = (SPELLINGS, spellings[:1]) if split == VALID else (split, spellings)
                num_left_out += _write_maskable(kept, writers[others], tokenizer)
            last = split
        for split, packer in packers.items():
            num_left_out += _write_maskable(packer.finish(), writers[split], tokenizer)
    if num_left_out and not any(writer.num_sequences for writer in writers.values()):
        raise DataError(
            f"{_named(sources)}: none of its tokens is in the vocabulary, so that nothing of it can be masked",
            "give other rows, or a tokenizer that covers them with `tokenizer.path=FILE`",
        )
    # with an empty split there is an error, or all rows are read again
    if not all(writers[split].num_sequences for split in splits):
        return writers
    if num_unknown:
        also = f"; {format_number_of(num_left_out, 'sequence')} of nothing else left out" if num_left_out else ""
        progress.message(f"[UNK] replaces {format_number_of(num_unknown, 'token')} outside the vocabulary{also}")
    if num_too_long:
        left_out = format_number_of(num_too_long, "spelling")
        progress.message(f"{left_out} left out, of more tokens than `data.sequence_length` leaves room for")
    return writers


def reading(
    sources: Sequence[FingerprintedSource], data: DataConfig, seed: int, progress: Progress, label: str
) -> closing[Generator[Row]]:
    """Return the rows of sources as a context that closes the files."""
    return closing(iter_rows([known.source for known in sources], data, seed=seed, progress=progress, label=label))


def _write_maskable(sequences: list[list[int]], writer: ShardWriter, tokenizer: Tokenizer) -> int:
    """Write the sequences that have a token to mask, and return the number of the others."""
    kept = [ids for ids in sequences if not tokenizer.special_ids.issuperset(ids)]
    writer.add(kept)
    return len(sequences) - len(kept)


def _packs(data: DataConfig) -> bool:
    """Return whether rows are packed into full sequences."""
    return data.kind == "text" and data.sample_break == "none"


def _usable(rows: Iterable[Row], data: DataConfig, skipped: _SkippedRows) -> Iterator[Row]:
    """Yield rows with text, molecules as `data.canonical_smiles` says; skip what is broken or not a molecule."""
    read = rows
    if data.kind == "smiles":
        read = read_smiles(rows, is_canonical=data.canonical_smiles, num_spellings=data.num_spellings)
    for row in read:
        if row.problem is not None:
            skipped.add(row, row.problem)
        elif row.text:
            yield row


def _tokenise(
    rows: Iterable[Row], data: DataConfig, tokenizer: Tokenizer, skipped: _SkippedRows
) -> Iterator[tuple[Row, list[int], list[list[int]]]]:
    """Yield rows with their token ids and those of their other spellings, tokenised in batches on all cores.

    SMILES that do not fit are skipped, and rows of [UNK] alone that are sequences of their own. Other spellings that do
    not fit are left out.
    """
    room = data.sequence_length - _NUM_ENDS
    packs = _packs(data)
    for batch in _batches(rows):
        encoded = iter(tokenizer.encode_batch([text for row in batch for text in (row.text, *row.spellings)]))
        for row in batch:
            ids, *others = islice(encoded, 1 + len(row.spellings))
            if data.kind == "smiles" and len(ids) > room:
                skipped.add(row, f"{len(ids)} tokens, but `data.sequence_length` leaves room for {room}")
            elif not packs and ids.count(tokenizer.unk_id) == len(ids):
                skipped.add(row, "none of its tokens is in the vocabulary, so that nothing of it can be masked")
            else:
                yield row, ids, [spelling for spelling in others if len(spelling) <= room]


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows in groups of limited number and length."""
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += sum(map(len, (row.text, *row.spellings)))
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Return a row in pieces of at most `size` tokens."""
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@final
class Packer:
    """Makes sequences of exactly `size` tokens each, as RoBERTa's `sample-break-mode none`.

    [SEP] separates documents, a newline the lines of one document.
    """

    def __init__(self, size: int, sep_id: int, newline_ids: Sequence[int]) -> None:
        self.size = size
        self._sep_ids = [sep_id]
        self._newline_ids = list(newline_ids)
        self._pending: list[int] = []
        self._has_begun = False

    def add(self, ids: list[int], *, starts_document: bool) -> list[list[int]]:
        """Append a row and return the sequences that are full now."""
        if self._has_begun:
            self._pending += self._sep_ids if starts_document else self._newline_ids
        self._has_begun = True
        self._pending += ids
        num_whole = len(self._pending) // self.size * self.size
        full = cut(self._pending[:num_whole], self.size)
        del self._pending[:num_whole]
        return full

    def finish(self) -> list[list[int]]:
        """Return the remainder, if it holds at least two tokens."""
        return [self._pending] if len(self._pending) >= 2 else []


def _named(sources: Sequence[FingerprintedSource]) -> str:
    others = f" and {len(sources) - 1:,} more" if len(sources) > 1 else ""
    return f"{sources[0].source}{others}"
