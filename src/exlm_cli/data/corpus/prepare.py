"""Preparation of a recipe's data: rows -> splits -> tokens -> sequences -> shards, in this order from top to bottom.

The result is cached: `tokenizers/<key>.json` with its fingerprint in `<key>.sha256`, and `shards/<key>/` with `train/`,
`valid/`, `valid-spellings/` if molecules have several, `rejected.csv` and `prepared.json`. Keys are hashes of contents
and options, and entries are renamed into place whole, so none is stale unless RDKit, which judges and writes SMILES,
was updated.
"""

import hashlib
import math
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal, Self, final

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig
from exlm_cli.data.cache import explaining_disk_trouble, load_or_build
from exlm_cli.data.corpus.fingerprint import (
    FingerprintedSource,
    check_unchanged,
    data_fingerprint,
    fingerprint_sources,
    tokenizer_key,
    without_copies,
)
from exlm_cli.data.corpus.inputs import FileSource, first_row, iter_rows, resolve_inputs
from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.data.molecules import read_smiles
from exlm_cli.data.rows.records import LINE_FORMATS, SKIPPED_COLUMNS, SKIPPED_FILE, Row, RowKind, format_of
from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import DataError, TokenizerError
from exlm_cli.files import JsonModel, csv_line, fsync, read_json, refusing, write_atomically, write_json
from exlm_cli.format import format_number_of, shorten
from exlm_cli.paths import cache_root, expand_path
from exlm_cli.progress import Progress

TRAIN, VALID, SPELLINGS = "train", "valid", "valid-spellings"

_SUMMARY = "prepared.json"
# Bundled data is the same whatever the seed of the run, so that runs over seeds share it.
_TRAIN_SEED, _VALID_SEED = 0, 1
_BATCH_ROWS, _BATCH_CHARACTERS = 4096, 1 << 19
_NUM_ENDS = 2
"""[CLS] and [SEP], which every sequence gets when it is used."""
_LARGE_HOLDOUT = 0.2
"""Share of the tokens for validation above which a warning is due."""
_LARGEST_BLOCK_CHARACTERS = 1 << 16
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data, ready to train on.

    Attributes:
        tokenizer: Trained on the data or given by the recipe.
        train, valid: Sequences without [CLS] and [SEP] at their ends; the same where nothing is trained.
        spellings: Where `data.num_spellings` is above 1, a second spelling of each molecule of `valid` that has one;
            `valid` holds canonical SMILES alone.
        fingerprint: Hash of the content of the inputs, the tokenizer and every option that matters.
        num_rejected: Rows skipped because they cannot be used.
    """

    tokenizer: Tokenizer
    train: TokenDataset
    valid: TokenDataset
    fingerprint: str
    num_rejected: int
    was_cached: bool
    spellings: TokenDataset | None = None


class _Summary(JsonModel):
    """Content of `prepared.json`."""

    num_rejected: int


@dataclass(frozen=True)
class _Corpus:
    """Everything that decides the shards of a recipe."""

    recipe: PretrainRecipe
    train: list[FingerprintedSource]
    valid: list[FingerprintedSource]
    tokenizer: Tokenizer
    fingerprint: str


def prepare_data(
    recipe: PretrainRecipe,
    *,
    progress: Progress,
    builds: bool = True,
    is_trained: bool = True,
    tokenizer: Tokenizer | None = None,
) -> PreparedData:
    """Train or load the tokenizer and tokenise a recipe's inputs, or find both in the cache.

    Without `builds` the cache must hold both already. Without `is_trained` only `data.valid` is read, with the
    tokenizer that the recipe gives. A `tokenizer` that is given is taken instead, that of weights to begin with.

    Raises:
        DataError: Inputs missing or unusable, no usable row; the cache cannot be written, or lacks what it must hold.
        TokenizerError: The tokenizer cannot be read, is of the other kind, or its vocabulary is too small.
    """
    data = recipe.data
    if is_trained and not data.train:
        raise DataError("`data.train` names no input", "give files with `data.train=FILE`")
    cache = cache_root(data.cache_dir)
    with explaining_disk_trouble(cache):
        train, valid = (
            fingerprint_sources(resolve_inputs(inputs, kind=data.kind, progress=progress, key=key), cache, progress)
            for key, inputs in (("data.train", data.train if is_trained else ()), ("data.valid", data.valid))
        )
        train = without_copies(train, progress)
        _report_shares(recipe, train, valid, progress)
        tokenizer = tokenizer or _obtain_tokenizer(recipe, train, valid, cache, progress, builds=builds)
        corpus = _Corpus(recipe, train, valid, tokenizer, data_fingerprint(recipe, train, valid, tokenizer))
        return _obtain_shards(corpus, cache, progress, builds=builds)


def _report_shares(
    recipe: PretrainRecipe, train: list[FingerprintedSource], valid: list[FingerprintedSource], progress: Progress
) -> None:
    """Report how much of each file is read."""
    for name, sources in (("training", train), ("validation", valid)):
        if recipe.data.max_rows is None or not sources:
            continue
        share = math.ceil(recipe.data.max_rows / len(sources))
        each = f"each of {len(sources):,} {name} files, the first ones" if len(sources) > 1 else f"the {name} input"
        about = "about" if len(sources) > 1 else "at most the first"
        progress.message(f"`data.max_rows`: {about} {share:,} rows of {each}")


# Tokenizer: given, cached or trained


def _obtain_tokenizer(
    recipe: PretrainRecipe,
    train: list[FingerprintedSource],
    valid: list[FingerprintedSource],
    cache: Path,
    progress: Progress,
    *,
    builds: bool,
) -> Tokenizer:
    if recipe.tokenizer.path is not None:
        path = expand_path(recipe.tokenizer.path)
        return Tokenizer.load(path, recipe.data.kind, recipe.tokenizer.special_tokens)
    path = cache / "tokenizers" / f"{tokenizer_key(recipe, train)}.json"
    hash_path = path.with_suffix(".sha256")

    def load() -> Tokenizer:
        tokenizer = Tokenizer.load(path, recipe.data.kind)
        if not hash_path.is_file() or hash_path.read_bytes() != tokenizer.fingerprint.encode():
            raise TokenizerError(f"{path}: not the tokenizer that was written there", "delete the file")
        return tokenizer

    def build() -> Tokenizer:
        _check_first_rows(train + valid, recipe.data)
        tokenizer = _train_tokenizer(recipe, train, progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        # the hash first: another process takes a tokenizer without one for damaged
        write_atomically(hash_path, tokenizer.fingerprint.encode())
        tokenizer.save(path)
        return tokenizer

    return load_or_build(cache, path, load, build if builds else None, progress, remedy="it is trained again")


def _train_tokenizer(recipe: PretrainRecipe, train: list[FingerprintedSource], progress: Progress) -> Tokenizer:
    data = recipe.data
    with _reading(train, data, _TRAIN_SEED, progress, "training the tokenizer") as rows:
        usable = islice((row for row in rows if row.problem is None), recipe.tokenizer.train_rows)
        texts = (row.text for row in usable) if data.num_spellings == 1 else _all_spellings(usable, data.num_spellings)
        tokenizer = train_tokenizer(texts, recipe, progress)
    check_unchanged(train)
    return tokenizer


def _all_spellings(rows: Iterable[Row], num_spellings: int) -> Iterator[str]:
    """Yield the canonical SMILES and the other spellings of each row that is a molecule."""
    for row in read_smiles(rows, is_canonical=True, num_spellings=num_spellings):
        if row.problem is None:
            yield from (row.text, *row.spellings)


def train_tokenizer(texts: Iterable[str], recipe: PretrainRecipe, progress: Progress) -> Tokenizer:
    """Train the tokenizer that a recipe asks for; texts are read once.

    Raises:
        TokenizerError: `tokenizer.vocab_size` is too small for text.
    """
    train = train_bpe if recipe.data.kind == "text" else train_smiles_vocabulary
    return train(texts, recipe.tokenizer.vocab_size, recipe.tokenizer.min_frequency, progress)


# Shards: cached, or built in a temporary directory and renamed into place


def _obtain_shards(corpus: _Corpus, cache: Path, progress: Progress, *, builds: bool) -> PreparedData:
    directory = cache / "shards" / corpus.fingerprint[:32]
    train_split = TRAIN if corpus.train else VALID

    def load() -> PreparedData:
        vocab_size = corpus.tokenizer.vocab_size
        train, valid = (TokenDataset(directory / split, vocab_size) for split in (train_split, VALID))
        is_spelled = corpus.recipe.data.num_spellings > 1
        summary = read_json(directory / _SUMMARY, _Summary)
        if not (directory / SKIPPED_FILE).is_file():
            raise DataError(f"{directory / SKIPPED_FILE}: missing from the token shards", "delete the directory")
        return PreparedData(
            corpus.tokenizer,
            train,
            valid,
            train.fingerprint,
            summary.num_rejected,
            was_cached=True,
            spellings=TokenDataset(directory / SPELLINGS, vocab_size) if is_spelled else None,
        )

    def build() -> PreparedData:
        _build_shards(directory, corpus, progress)
        return replace(load(), was_cached=False)

    return load_or_build(
        cache, directory, load, build if builds else None, progress, remedy="the data is tokenised again"
    )


def _build_shards(directory: Path, corpus: _Corpus, progress: Progress) -> None:
    _check_first_rows(corpus.train + corpus.valid, corpus.recipe.data)
    # The lock is held, so no running process uses what a killed one left under these names.
    for leftover in directory.parent.glob(f".{directory.name}.writing-*"):
        shutil.rmtree(leftover)
    temporary = directory.with_name(f".{directory.name}.writing-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        write_splits = _write_given_splits if corpus.valid else _write_held_out_splits
        summary = write_splits(corpus, temporary, progress)
        check_unchanged(corpus.train + corpus.valid)
        write_json(temporary / _SUMMARY, summary)
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_first_rows(sources: Sequence[FingerprintedSource], data: DataConfig) -> None:
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


def _write_given_splits(corpus: _Corpus, folder: Path, progress: Progress) -> _Summary:
    data = corpus.recipe.data
    with _SkippedRows(folder / SKIPPED_FILE, data.on_invalid) as skipped:
        for split, sources in ((VALID, corpus.valid), (TRAIN, corpus.train)):
            if not sources:
                continue  # nothing is trained
            writers = _write_sequences(corpus, sources, folder, [split], None, skipped, progress)
            if not writers[split].num_sequences:
                raise _no_usable_row(data, f"`data.{split}`: " if corpus.train else "", sources, skipped)
    return _Summary(num_rejected=skipped.num_rows)


def _write_held_out_splits(corpus: _Corpus, folder: Path, progress: Progress) -> _Summary:
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
    return _Summary(num_rejected=skipped.num_rows)


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
    corpus: _Corpus,
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
    seed = _VALID_SEED if splits == [VALID] else _TRAIN_SEED
    label = "tokenising" if len(splits) > 1 else f"tokenising {splits[0]}"
    num_unknown, num_left_out, num_too_long, last = 0, 0, 0, ""
    also_spelled = [SPELLINGS] if data.num_spellings > 1 and VALID in splits else []
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(folder / split, tokenizer.vocab_size, corpus.fingerprint))
            for split in (*splits, *also_spelled)
        }
        packers = {split: Packer(size, tokenizer.sep_id, newline_ids) for split in splits if _packs(data)}
        rows = stack.enter_context(_reading(sources, data, seed, progress, label))
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


def _reading(
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


# The list of skipped rows, for the user


def list_rejected(data: PreparedData, rejected_csv: Path, progress: Progress) -> None:
    """Write the CSV of skipped rows if there are any; remove the one of an earlier run if there are none.

    It is that of the run that made the shards, under the names that the files had then.

    Raises:
        CheckpointError: It cannot be written.
    """
    with refusing(f"{rejected_csv}: the list of skipped rows cannot be written", is_chosen=True):
        if not data.num_rejected:
            rejected_csv.unlink(missing_ok=True)
            return
        temporary = rejected_csv.with_name(f".{rejected_csv.name}.writing-{os.getpid()}")
        try:
            shutil.copyfile(data.train.directory.parent / SKIPPED_FILE, temporary)
            fsync(temporary)
            temporary.replace(rejected_csv)
        finally:
            temporary.unlink(missing_ok=True)
    progress.message(f"skipped {format_number_of(data.num_rejected, 'row')}, listed in {rejected_csv}")
