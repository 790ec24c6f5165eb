"""Preparation of a recipe's data: its tokenizer and token shards, found in the cache or made.

The result is cached: `tokenizers/<key>.json` with its fingerprint in `<key>.sha256`, and `shards/<key>/` with `train/`,
`valid/`, `valid-spellings/` if molecules have several, `rejected.csv` and `prepared.json`. Keys are hashes of contents
and options, and entries are renamed into place whole, so none is stale unless RDKit, which judges and writes SMILES,
was updated.
"""

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.cache import explaining_disk_trouble, load_or_build
from exlm_cli.data.corpus.fingerprint import (
    Corpus,
    FingerprintedSource,
    check_unchanged,
    data_fingerprint,
    fingerprint_sources,
    tokenizer_key,
    without_copies,
)
from exlm_cli.data.corpus.inputs import resolve_inputs
from exlm_cli.data.corpus.kept import discard, forget, is_kept
from exlm_cli.data.corpus.shards import SPELLINGS, TRAIN, VALID, TokenDataset
from exlm_cli.data.corpus.write import TRAIN_SEED, check_first_rows, reading, write_shards
from exlm_cli.data.rows.records import SKIPPED_FILE, Row
from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.spellings import read_smiles
from exlm_cli.data.tokenizer import Tokenizer, train_bpe
from exlm_cli.errors import DataError, HubError, TokenizerError
from exlm_cli.files import JsonModel, fsync, read_json, refusing, write_atomically, write_json
from exlm_cli.format import format_number_of
from exlm_cli.paths import cache_root, expand_path
from exlm_cli.progress import Progress

_SUMMARY = "prepared.json"


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
        raise DataError("`data.train` names no input", "give files with `--set data.train=FILE`")
    cache = cache_root(data.cache_dir)
    with explaining_disk_trouble(cache):
        train, valid = (
            fingerprint_sources(resolve_inputs(inputs, kind=data.kind, progress=progress, key=key), cache, progress)
            for key, inputs in (("data.train", data.train if is_trained else ()), ("data.valid", data.valid))
        )
        train = without_copies(train, progress)
        _report_shares(recipe, train, valid, progress)
        tokenizer = tokenizer or _obtain_tokenizer(recipe, train, valid, cache, progress, builds=builds)
        corpus = Corpus(recipe, train, valid, tokenizer, data_fingerprint(recipe, train, valid, tokenizer))
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
        check_first_rows(train + valid, recipe.data)
        tokenizer = _train_tokenizer(recipe, train, progress)
        path.parent.mkdir(parents=True, exist_ok=True)
        # the hash first: another process takes a tokenizer without one for damaged
        write_atomically(hash_path, tokenizer.fingerprint.encode())
        tokenizer.save(path)
        return tokenizer

    return load_or_build(cache, path, load, build if builds else None, progress, remedy="it is trained again")


def _train_tokenizer(recipe: PretrainRecipe, train: list[FingerprintedSource], progress: Progress) -> Tokenizer:
    data = recipe.data
    with reading(train, data, TRAIN_SEED, progress, "training the tokenizer") as rows:
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


# Shards: cached, or written beside the cache's entry and renamed into place


def _obtain_shards(corpus: Corpus, cache: Path, progress: Progress, *, builds: bool) -> PreparedData:
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


def _build_shards(directory: Path, corpus: Corpus, progress: Progress) -> None:
    check_first_rows(corpus.train + corpus.valid, corpus.recipe.data)
    unfinished = directory.with_name(f".{directory.name}.writing")  # the lock is held: no other process uses it
    try:
        num_rejected = write_shards(corpus, unfinished, progress)
        check_unchanged(corpus.train + corpus.valid)
        write_json(unfinished / _SUMMARY, _Summary(num_rejected=num_rejected))
        if directory.exists():
            shutil.rmtree(directory)
        unfinished.rename(directory)
    except BaseException as error:
        # rows that cannot be used would stop the work again; the Hub, the disk or the user may let it go on
        if not is_kept(unfinished) or (isinstance(error, DataError) and not isinstance(error, HubError)):
            discard(unfinished)
        raise
    forget(unfinished)


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
