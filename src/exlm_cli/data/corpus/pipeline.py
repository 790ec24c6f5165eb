"""From a recipe's inputs to a tokenizer and memory-mapped shards, once: a second run finds them in the cache.

The cache holds `tokenizers/<key>.json` and `shards/<key>/` with `train/`, `valid/`, `rejected.csv` and `prepared.json`.
Keys are hashes of contents and options, entries are renamed into place whole and never change, so nothing in it is
ever stale.
"""

import hashlib
import json
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.bpe import train_bpe
from exlm_cli.data.corpus.cache import explaining_disk_trouble, locked, replace_file
from exlm_cli.data.corpus.fingerprint import Identified, identify, unchanged
from exlm_cli.data.corpus.inputs import resolve_inputs
from exlm_cli.data.corpus.shards import TokenDataset
from exlm_cli.data.corpus.splits import TRAIN, TRAIN_SEED, VALID, Splits, recipe_rows
from exlm_cli.data.rows.records import SKIPPED_FILE
from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError, TokenizerError
from exlm_cli.files import cache_root, expand_path
from exlm_cli.progress import Progress, SilentProgress

# Raise it when the same input would give other shards.
_SCHEME = 1
_SUMMARY = "prepared.json"


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data, ready to train on.

    Attributes:
        tokenizer: Trained or taken.
        train, valid: Sequences without [CLS] and [SEP] at their ends.
        fingerprint: Of the content of the inputs, the tokenizer and every option that matters.
        num_rejected: Rows left out because they cannot be used.
        was_cached: Whether the shards were there already.
    """

    tokenizer: Tokenizer
    train: TokenDataset
    valid: TokenDataset
    fingerprint: str
    num_rejected: int
    was_cached: bool


def prepare_data(recipe: PretrainRecipe, *, rejected_csv: Path | None, progress: Progress) -> PreparedData:
    """Train or take the tokenizer and tokenise a recipe's inputs, or find both in the cache.

    Args:
        recipe: Its `data` and `tokenizer` sections.
        rejected_csv: Where to list rejected rows, if there are any.
        progress: Gets bars and messages.

    Raises:
        DataError: Inputs missing or unusable, no usable row, or the cache cannot be written.
        TokenizerError: The tokenizer cannot be read, is of the other kind, or its vocabulary is too small.
    """
    data = recipe.data
    if not data.train:
        raise DataError("`data.train` names no input", "give files with `data.train=FILE`")
    cache = cache_root(data.cache_dir)
    with explaining_disk_trouble(cache):
        train = identify(resolve_inputs(data.train, kind=data.kind, progress=progress), cache, progress)
        valid = identify(resolve_inputs(data.valid, kind=data.kind, progress=progress), cache, progress)
        tokenizer = _obtain_tokenizer(recipe, train, cache, progress)
        fingerprint = _fingerprint(recipe, train, valid, tokenizer)
        directory = cache / "shards" / fingerprint[:32]
        prepared = _load(directory, tokenizer, was_cached=True, progress=progress)
        if prepared is None:
            with locked(cache, directory.name, progress):
                # another process may have made it meanwhile
                prepared = _load(directory, tokenizer, was_cached=True, progress=SilentProgress())
                if prepared is None:
                    _build(directory, Splits(recipe, tokenizer, train, valid, fingerprint, progress))
                    prepared = _load(directory, tokenizer, was_cached=False, progress=progress)
        assert prepared is not None
    if rejected_csv is not None:
        list_rejected(prepared, rejected_csv, progress)
    return prepared


def list_rejected(data: PreparedData, rejected_csv: Path, progress: Progress) -> None:
    """Write the CSV of rejected rows if there are any; one of before is removed.

    Raises:
        DataError: It cannot be written.
    """
    try:
        if not data.num_rejected:
            rejected_csv.unlink(missing_ok=True)
            return
        shutil.copyfile(data.train.directory.parent / SKIPPED_FILE, rejected_csv)
    except OSError as error:
        raise DataError(f"{rejected_csv}: the rejected rows cannot be listed there: {error.strerror}") from error
    progress.message(f"skipped {data.num_rejected:,} rows; they are listed in {rejected_csv}")


def _obtain_tokenizer(recipe: PretrainRecipe, train: list[Identified], cache: Path, progress: Progress) -> Tokenizer:
    """Take the recipe's tokenizer, or the cached one, or train it."""
    data, config = recipe.data, recipe.tokenizer
    if config.path is not None:
        return _load_given_tokenizer(config.path, data.kind)
    options = config.model_dump(mode="json") | data.model_dump(include={"kind", "column", "max_rows", "bundled_rows"})
    path = cache / "tokenizers" / f"{_hash([_SCHEME, _contents(train), options])[:32]}.json"
    tokenizer = _load_cached_tokenizer(path, progress)
    if tokenizer is None:
        with locked(cache, path.stem, progress):
            tokenizer = _load_cached_tokenizer(path, SilentProgress())
            if tokenizer is None:
                tokenizer = _train_tokenizer(recipe, train, progress)
                replace_file(path, tokenizer.to_json().encode())
    return tokenizer


def _load_given_tokenizer(given: str, kind: str) -> Tokenizer:
    tokenizer = Tokenizer.load(expand_path(given))
    wanted = "bpe" if kind == "text" else "smiles"
    if tokenizer.kind != wanted:
        raise TokenizerError(
            f"{given}: a {tokenizer.kind} tokenizer, but `data.kind` is {kind}",
            f"give a {wanted} tokenizer, or leave `tokenizer.path` out to train one",
        )
    return tokenizer


def _load_cached_tokenizer(path: Path, progress: Progress) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        return Tokenizer.load(path)
    except TokenizerError as error:
        progress.message(f"{error.message}; it is trained again")
        return None


def _train_tokenizer(recipe: PretrainRecipe, train: list[Identified], progress: Progress) -> Tokenizer:
    config = recipe.tokenizer
    train_on = train_bpe if recipe.data.kind == "text" else train_smiles_vocabulary
    with closing(recipe_rows(recipe, train, TRAIN_SEED, progress, "training the tokenizer")) as rows:
        texts = (row.text for row in rows if row.problem is None)
        tokenizer = train_on(islice(texts, config.train_rows), config.vocab_size, config.min_frequency, progress)
    unchanged(train)
    return tokenizer


def _fingerprint(recipe: PretrainRecipe, train: list[Identified], valid: list[Identified], tokenizer: Tokenizer) -> str:
    """Hash contents and options, not names: data that was moved is the same data."""
    left_out = {"train", "valid", "cache_dir"}
    if valid:
        left_out.add("valid_fraction")
    options = recipe.data.model_dump(mode="json", exclude=left_out)
    if recipe.data.kind == "text" and recipe.data.max_rows is not None and not valid:
        options["holdout"] = "rows"  # shards of versions that went by the size of the whole file are others
    return _hash([_SCHEME, _contents(train), _contents(valid), tokenizer.fingerprint, options])


def _contents(sources: list[Identified]) -> list[str]:
    return [source.content for source in sources]


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _load(directory: Path, tokenizer: Tokenizer, *, was_cached: bool, progress: Progress) -> PreparedData | None:
    """Open shards; None where there are none, or none that are whole, which is said."""
    if not directory.exists():
        return None
    try:
        train, valid = (TokenDataset(directory / split) for split in (TRAIN, VALID))
        num_rejected = _num_rejected(directory)
    except DataError as error:
        progress.message(f"{error.message}; the data is tokenised again")
        return None
    return PreparedData(tokenizer, train, valid, train.fingerprint, num_rejected, was_cached)


def _num_rejected(directory: Path) -> int:
    path = directory / _SUMMARY
    try:
        num_rejected = int(json.loads(path.read_text())["num_rejected"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: missing from the token shards, or altered") from error
    if not (directory / SKIPPED_FILE).is_file():
        raise DataError(f"{directory / SKIPPED_FILE}: missing from the token shards")
    return num_rejected


def _build(directory: Path, splits: Splits) -> None:
    """Tokenise into a temporary directory and rename it into place."""
    # The lock is held, so what a killed process left under these names is nobody's.
    for leftover in directory.parent.glob(f".{directory.name}.writing-*"):
        shutil.rmtree(leftover)
    temporary = directory.with_name(f".{directory.name}.writing-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        num_rejected = splits.write(temporary)
        unchanged(splits.train + splits.valid)
        replace_file(temporary / _SUMMARY, json.dumps({"num_rejected": num_rejected}).encode())
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
