"""Preparation of a recipe's data: rows -> splits -> tokens -> sequences -> shards, in this order from top to bottom.

The result is cached: `tokenizers/<key>.json` with its fingerprint in `<key>.sha256`, and `shards/<key>/` with `train/`,
`valid/`, `rejected.csv` and `prepared.json`. Keys are hashes of contents and options, and entries are renamed into
place whole, so none is stale unless RDKit, which judges SMILES, was updated.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.config.sections import DataConfig
from exlm_cli.data.corpus.cache import explaining_disk_trouble, load_or_build, write_entry
from exlm_cli.data.corpus.fingerprint import (
    FingerprintedSource,
    check_unchanged,
    data_fingerprint,
    fingerprint_sources,
    tokenizer_key,
    without_copies,
)
from exlm_cli.data.corpus.inputs import FileSource, Source, first_row, iter_rows, resolve_inputs
from exlm_cli.data.corpus.sequences import Holdout, Overlap, Packer, SharedRows, cut
from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.data.corpus.skipped import SkippedRows, copy_skipped, invalid_row
from exlm_cli.data.molecules import read_smiles
from exlm_cli.data.rows.records import LINE_FORMATS, SKIPPED_FILE, Row, format_of
from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import DataError, TokenizerError
from exlm_cli.files import JsonModel, absent_if_none, read_json, refusing
from exlm_cli.format import format_number_of
from exlm_cli.paths import cache_root, expand_path
from exlm_cli.progress import Progress

TRAIN, VALID = "train", "valid"

_SUMMARY = "prepared.json"
# Bundled data is the same whatever the seed of the run, so that runs over seeds share it.
_TRAIN_SEED, _VALID_SEED = 0, 1
_BATCH_ROWS, _BATCH_CHARACTERS = 4096, 1 << 19
_NUM_ENDS = 2
"""[CLS] and [SEP], which every sequence gets when it is used."""
_NOTED_SHARE = 0.01
"""Shared part of the validation text from which a warning is due; 0.1 to 0.2 % of Wikipedia and books is by chance."""


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data, ready to train on.

    Attributes:
        tokenizer: Trained on the data or given by the recipe.
        train, valid: Sequences without [CLS] and [SEP] at their ends; the same where nothing is trained.
        fingerprint: Hash of the content of the inputs, the tokenizer and every option that matters.
        num_rejected: Rows skipped because they cannot be used.
        overlap: Validation rows that are training rows too; None where they are cut from the training inputs.
        renamed: Names of files by those they had in the run that made the shards; empty where they are the same.
    """

    tokenizer: Tokenizer
    train: TokenDataset
    valid: TokenDataset
    fingerprint: str
    num_rejected: int
    was_cached: bool
    overlap: Overlap | None = None
    renamed: dict[str, str] = field(default_factory=dict)


class _Summary(JsonModel):
    """Content of `prepared.json`.

    Attributes:
        names: The sources as the list of skipped rows names them, training before validation.
    """

    num_rejected: int
    overlap: Overlap | None = absent_if_none()
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Corpus:
    """Everything that decides the shards of a recipe."""

    recipe: PretrainRecipe
    train: list[FingerprintedSource]
    valid: list[FingerprintedSource]
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def names(self) -> tuple[str, ...]:
        """The sources as the list of skipped rows names them: in UTF-8, which not all names of files are."""
        return tuple(
            str(known.source).encode(errors="backslashreplace").decode() for known in (*self.train, *self.valid)
        )


def prepare_data(
    recipe: PretrainRecipe,
    *,
    rejected_csv: Path | None,
    progress: Progress,
    builds: bool = True,
    is_trained: bool = True,
) -> PreparedData:
    """Train or load the tokenizer and tokenise a recipe's inputs, or find both in the cache.

    `rejected_csv` gets the list of skipped rows, if there are any. Without `builds` the cache must hold both already.
    Without `is_trained` only `data.valid` is read, with the tokenizer that the recipe gives.

    Raises:
        CheckpointError: `rejected_csv` cannot be written.
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
        tokenizer = _obtain_tokenizer(recipe, train, valid, cache, progress, builds=builds)
        corpus = _Corpus(recipe, train, valid, tokenizer, data_fingerprint(recipe, train, valid, tokenizer))
        prepared = _obtain_shards(corpus, cache, progress, builds=builds)
    if prepared.overlap is not None:
        _warn_of_overlap(prepared.overlap, progress)
    if rejected_csv is not None:
        list_rejected(prepared, rejected_csv, progress)
    return prepared


def _report_shares(
    recipe: PretrainRecipe, train: list[FingerprintedSource], valid: list[FingerprintedSource], progress: Progress
) -> None:
    """Report how much of each file is read."""
    for name, sources in (("training", train), ("validation", valid)):
        if recipe.data.max_rows is not None and len(sources) > 1:
            share = math.ceil(recipe.data.max_rows / len(sources))
            progress.message(f"`data.max_rows`: about {share:,} rows of each of {len(sources):,} {name} files")


def _warn_of_overlap(overlap: Overlap, progress: Progress) -> None:
    if overlap.share >= _NOTED_SHARE:
        progress.message(
            f"warning: validation rows that are training rows too: {overlap.num_shared:,} of {overlap.num_compared:,} "
            f"({overlap.share:.0%} of the text); validation then measures memorisation"
        )


def list_rejected(data: PreparedData, rejected_csv: Path, progress: Progress) -> None:
    """Write the CSV of skipped rows if there are any; remove the one of an earlier run if there are none.

    The cache keeps the list of the run that made the shards; files that have moved since get their names of today.

    Raises:
        CheckpointError: It cannot be written.
    """
    with refusing(f"{rejected_csv}: the list of skipped rows cannot be written", is_chosen=True):
        if not data.num_rejected:
            rejected_csv.unlink(missing_ok=True)
            return
        temporary = rejected_csv.with_name(f".{rejected_csv.name}.writing-{os.getpid()}")
        try:
            copy_skipped(data.train.directory.parent / SKIPPED_FILE, temporary, data.renamed)
            temporary.replace(rejected_csv)
        finally:
            temporary.unlink(missing_ok=True)
    progress.message(f"skipped {format_number_of(data.num_rejected, 'row')}, listed in {rejected_csv}")


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
        return Tokenizer.load(expand_path(recipe.tokenizer.path), recipe.data.kind)
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
        # the hash first: another process takes a tokenizer without one for damaged
        write_entry(hash_path, tokenizer.fingerprint.encode())
        write_entry(path, tokenizer.to_json().encode())
        return tokenizer

    return load_or_build(cache, path, load, build if builds else None, progress, remedy="it is trained again")


def _train_tokenizer(recipe: PretrainRecipe, train: list[FingerprintedSource], progress: Progress) -> Tokenizer:
    label = "training the tokenizer"
    with closing(iter_rows(_sources(train), recipe.data, seed=_TRAIN_SEED, progress=progress, label=label)) as rows:
        texts = (row.text for row in rows if row.problem is None)
        tokenizer = train_tokenizer(islice(texts, recipe.tokenizer.train_rows), recipe, progress)
    check_unchanged(train)
    return tokenizer


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
        summary = read_json(directory / _SUMMARY, _Summary)
        if not (directory / SKIPPED_FILE).is_file():
            raise DataError(f"{directory / SKIPPED_FILE}: missing from the token shards", "delete the directory")
        renamed = {old: new for old, new in zip(summary.names, corpus.names, strict=True) if old != new}
        return PreparedData(
            corpus.tokenizer,
            train,
            valid,
            train.fingerprint,
            summary.num_rejected,
            was_cached=True,
            overlap=summary.overlap,
            renamed=renamed,
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
        write_entry(temporary / _SUMMARY, summary.model_dump_json().encode())
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_LARGE_HOLDOUT = 0.2
"""Share of the tokens for validation above which a warning is due."""

# Splits: two inputs, or one of which rows are held out.


def _write_given_splits(corpus: _Corpus, folder: Path, progress: Progress) -> _Summary:
    data, shared = corpus.recipe.data, SharedRows()
    splits = (
        (VALID, corpus.valid, _VALID_SEED, shared.add_valid),
        (TRAIN, corpus.train, _TRAIN_SEED, shared.add_train),
    )
    with SkippedRows(folder / SKIPPED_FILE, data.on_invalid) as skipped:
        for split, sources, seed, add in splits:
            if not sources:
                continue
            label = f"tokenising {split}"
            with closing(iter_rows(_sources(sources), data, seed=seed, progress=progress, label=label)) as rows:
                choose = partial(_choose_only, add)
                writers = _write_sequences(corpus, rows, folder, [split], choose, skipped, progress)
            if not writers[0].num_sequences:
                key = f"`data.{split}`: " if corpus.train else ""
                raise _no_usable_row(data, key, sources, skipped)
    overlap = shared.overlap if corpus.train else None
    return _Summary(num_rejected=skipped.num_rows, overlap=overlap, names=corpus.names)


def _choose_only(add: Callable[[str], None], row: Row) -> int:
    """Return 0, the index of the only split, once `add` has been given the text."""
    add(row.text)
    return 0


def _write_held_out_splits(corpus: _Corpus, folder: Path, progress: Progress) -> _Summary:
    data = corpus.recipe.data
    sizes_bytes = [known.source.size_bytes for known in corpus.train if isinstance(known.source, FileSource)]
    total_bytes = sum(sizes_bytes) if len(sizes_bytes) == len(corpus.train) else None
    forced: bytes | None = None
    while True:
        holdout = Holdout(data.kind, data.valid_fraction, total_bytes, data.max_rows, forced)
        with (
            SkippedRows(folder / SKIPPED_FILE, data.on_invalid) as skipped,
            closing(
                iter_rows(_sources(corpus.train), data, seed=_TRAIN_SEED, progress=progress, label="tokenising")
            ) as rows,
        ):
            train, valid = _write_sequences(corpus, rows, folder, [TRAIN, VALID], holdout.takes, skipped, progress)
        if valid.num_sequences or forced is not None:
            break
        if holdout.smallest is None:
            raise _no_usable_row(data, f"`data.{TRAIN}`: ", corpus.train, skipped)
        # The hashes chose nothing of a small corpus: hold out the smallest hash.
        forced = holdout.smallest
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
    return _Summary(num_rejected=skipped.num_rows, names=corpus.names)


# Rows -> tokens -> sequences -> shards


def _write_sequences(
    corpus: _Corpus,
    rows: Iterable[Row],
    folder: Path,
    splits: Sequence[str],
    choose: Callable[[Row], int],
    skipped: SkippedRows,
    progress: Progress,
) -> list[ShardWriter]:
    """Tokenise rows, cut or pack them into sequences, write those of each split, and return the finished writers.

    `choose` returns the index of a row's split; it is called in order, for usable rows only. Sequences in which nothing
    can be masked are left out.

    Raises:
        DataError: Nothing can be masked in any sequence.
    """
    data, tokenizer = corpus.recipe.data, corpus.tokenizer
    num_unknown, num_left_out, last = 0, 0, None
    with ExitStack() as stack:
        writers = [
            stack.enter_context(ShardWriter(folder / split, tokenizer.vocab_size, corpus.fingerprint))
            for split in splits
        ]
        size, newline_ids = data.sequence_length - _NUM_ENDS, tokenizer.encode("\n")
        packs = _packs(data)
        packers = [Packer(size, tokenizer.sep_id, newline_ids) for _ in splits] if packs else []
        for row, ids in _tokenise(_usable(rows, data, skipped), data, tokenizer, skipped):
            num_unknown += ids.count(tokenizer.unk_id)
            index = int(choose(row))
            # rows that were apart in the corpus must not look like neighbours
            starts_document = row.starts_document or index != last
            packed = packers[index].add(ids, starts_document=starts_document) if packs else cut(ids, size)
            num_left_out += _write_maskable(packed, writers[index], tokenizer)
            last = index
        for writer, packer in zip(writers, packers, strict=packs):
            num_left_out += _write_maskable(packer.finish(), writer, tokenizer)
    if num_left_out and not any(writer.num_sequences for writer in writers):
        sources = corpus.valid if VALID in splits and corpus.valid else corpus.train
        raise DataError(
            f"{_named(sources)}: none of its tokens is in the vocabulary, so that nothing of it can be masked",
            "give other rows, or a tokenizer that covers them with `tokenizer.path=FILE`",
        )
    # with an empty split there is an error, or all rows are read again
    if num_unknown and all(writer.num_sequences for writer in writers):
        also = f"; {format_number_of(num_left_out, 'sequence')} of nothing else left out" if num_left_out else ""
        progress.message(f"[UNK] replaces {format_number_of(num_unknown, 'token')} outside the vocabulary{also}")
    return writers


def _packs(data: DataConfig) -> bool:
    """Return whether rows are packed into full sequences."""
    return data.kind == "text" and data.sample_break == "none"


def _write_maskable(sequences: list[list[int]], writer: ShardWriter, tokenizer: Tokenizer) -> int:
    """Write the sequences that have a token to mask, and return the number of the others."""
    kept = [ids for ids in sequences if not tokenizer.special_ids.issuperset(ids)]
    writer.add(kept)
    return len(sequences) - len(kept)


def _usable(rows: Iterable[Row], data: DataConfig, skipped: SkippedRows) -> Iterator[Row]:
    """Yield rows with text, molecules as `data.canonical_smiles` says; skip what is broken or not a molecule."""
    read = read_smiles(rows, is_canonical=data.canonical_smiles) if data.kind == "smiles" else rows
    for row in read:
        if row.problem is not None:
            skipped.add(row, row.problem)
        elif row.text:
            yield row


def _tokenise(
    rows: Iterable[Row], data: DataConfig, tokenizer: Tokenizer, skipped: SkippedRows
) -> Iterator[tuple[Row, list[int]]]:
    """Yield rows with their token ids, tokenised in batches on all cores.

    SMILES that do not fit are skipped, and rows of [UNK] alone that are sequences of their own.
    """
    room = data.sequence_length - _NUM_ENDS
    packs = _packs(data)
    for batch in _batches(rows):
        for row, ids in zip(batch, tokenizer.encode_batch([row.text for row in batch]), strict=True):
            if data.kind == "smiles" and len(ids) > room:
                skipped.add(row, f"{len(ids)} tokens, but `data.sequence_length` leaves room for {room}")
            elif not packs and ids.count(tokenizer.unk_id) == len(ids):
                skipped.add(row, "none of its tokens is in the vocabulary, so that nothing of it can be masked")
            else:
                yield row, ids


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield rows in groups of limited number and length."""
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.text)
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _no_usable_row(
    data: DataConfig, key: str, sources: Sequence[FingerprintedSource], skipped: SkippedRows
) -> DataError:
    files = (known.source for known in sources)
    has_columns = not all(isinstance(file, FileSource) and format_of(file.path) in LINE_FORMATS for file in files)
    hint = f"name the column that holds the {data.kind} with `data.column=NAME`, or " if has_columns else ""
    hint += "give other rows"
    return DataError(f"{key}no usable row in {_named(sources)}{skipped.describe()}", hint)


def _check_first_rows(sources: Sequence[FingerprintedSource], data: DataConfig) -> None:
    """Read the first row of every file, so that one without the column is refused before the others are read."""
    for known in sources:
        if isinstance(known.source, FileSource):
            row = first_row(known.source, data)
            if row is not None and row.problem is not None and data.on_invalid == "error":
                raise invalid_row(row, row.problem)


def _sources(known: Sequence[FingerprintedSource]) -> list[Source]:
    return [fingerprinted.source for fingerprinted in known]


def _named(sources: Sequence[FingerprintedSource]) -> str:
    others = f" and {len(sources) - 1:,} more" if len(sources) > 1 else ""
    return f"{sources[0].source}{others}"
