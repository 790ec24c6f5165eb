"""From a recipe's inputs to a tokenizer and memory-mapped shards, once: a second run finds them in the cache."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import filelock

from exlm_cli.config.recipes import PretrainRecipe
from exlm_cli.data.identity import file_state, identify, replace_file
from exlm_cli.data.readers import Row
from exlm_cli.data.sequences import Holdout, RejectedRows
from exlm_cli.data.shards import ShardWriter, TokenDataset
from exlm_cli.data.smiles import train_smiles_vocabulary
from exlm_cli.data.sources import FileSource, Source, iter_rows, resolve_inputs
from exlm_cli.data.text import train_bpe
from exlm_cli.data.tokenise import SplitSink, tokenise_rows
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import DataError, TokenizerError
from exlm_cli.progress import Progress

# Raise it when the same input would give other shards.
_SCHEME = 1
# Bundled data is the same whatever the seed of the run, so that runs over seeds share it.
_TRAIN_SEED, _VALID_SEED = 0, 1
_TRAIN, _VALID, _REJECTED, _SUMMARY = "train", "valid", "rejected.csv", "prepared.json"


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


def cache_root(configured: str | None) -> Path:
    """Return the folder of token shards: `data.cache_dir`, $EXLM_CACHE_DIR, $XDG_CACHE_HOME/exlm or ~/.cache/exlm."""
    if configured is not None:
        return Path(configured).expanduser()
    if own := os.environ.get("EXLM_CACHE_DIR"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "exlm"
    return Path.home() / ".cache" / "exlm"


def prepare_data(recipe: PretrainRecipe, *, rejected_csv: Path | None, progress: Progress) -> PreparedData:
    """Train or take the tokenizer and tokenise a recipe's inputs, or find both in the cache.

    Args:
        recipe: Its `data` and `tokenizer` sections.
        rejected_csv: Where to list rejected rows, if there are any.
        progress: Gets bars and messages.

    Raises:
        DataError: Inputs missing or unusable, no usable row, or the cache cannot be written.
        TokenizerError: The tokenizer cannot be read, or is of the other kind.
    """
    if not recipe.data.train:
        raise DataError("`data.train` names no input", """give files with `--set data.train='["my.txt"]'`""")
    cache = cache_root(recipe.data.cache_dir)
    with _explaining_disk_trouble(cache):
        inputs = _find_inputs(recipe, cache, progress)
        tokenizer = _obtain_tokenizer(recipe, inputs, cache, progress)
        fingerprint = _fingerprint(recipe, inputs, tokenizer)
        directory = cache / "shards" / fingerprint[:32]
        with _locked(cache, fingerprint, progress):
            was_cached = _is_whole(directory, progress)
            if not was_cached:
                _build(directory, recipe, inputs, tokenizer, fingerprint, progress)
            prepared = _open(directory, tokenizer, fingerprint, was_cached)
            if prepared.num_rejected and rejected_csv is not None:
                shutil.copyfile(directory / _REJECTED, rejected_csv)
                progress.message(f"skipped {prepared.num_rejected:,} rows; they are listed in {rejected_csv}")
        return prepared


@contextmanager
def _explaining_disk_trouble(cache: Path) -> Iterator[None]:
    """Inputs that cannot be read raise `DataError` themselves, so an `OSError` here comes from the cache."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or cache}: the data cache cannot be written: {error.strerror or error}",
            "choose another folder with `--set data.cache_dir=DIR`, or free some space",
        ) from error


@dataclass(frozen=True)
class _Inputs:
    """What `data.train` and `data.valid` name, and what it is by content."""

    train: list[Source]
    valid: list[Source]
    train_identity: list[str]
    valid_identity: list[str]


def _find_inputs(recipe: PretrainRecipe, cache: Path, progress: Progress) -> _Inputs:
    data = recipe.data
    train = resolve_inputs(data.train, kind=data.kind, progress=progress)
    valid = resolve_inputs(data.valid, kind=data.kind, progress=progress)
    return _Inputs(train, valid, identify(train, cache, progress), identify(valid, cache, progress))


def _rows(sources: list[Source], recipe: PretrainRecipe, seed: int, progress: Progress, label: str) -> Generator[Row]:
    data = recipe.data
    return iter_rows(
        sources,
        kind=data.kind,
        column=data.column,
        max_rows=data.max_rows,
        bundled_rows=data.bundled_rows,
        seed=seed,
        progress=progress,
        label=label,
    )


def _obtain_tokenizer(recipe: PretrainRecipe, inputs: _Inputs, cache: Path, progress: Progress) -> Tokenizer:
    """Take the recipe's tokenizer, or the cached one, or train it."""
    data, config = recipe.data, recipe.tokenizer
    wanted = "bpe" if data.kind == "text" else "smiles"
    if config.path is not None:
        tokenizer = Tokenizer.load(Path(config.path).expanduser())
        if tokenizer.kind != wanted:
            raise TokenizerError(
                f"{config.path}: a {tokenizer.kind} tokenizer, but `data.kind` is {data.kind}",
                f"give a {wanted} tokenizer, or leave `tokenizer.path` out to train one",
            )
        return tokenizer
    options = config.model_dump(mode="json") | data.model_dump(include={"kind", "column", "max_rows", "bundled_rows"})
    key = _hash([_SCHEME, inputs.train_identity, options])
    path = cache / "tokenizers" / f"{key[:32]}.json"
    with _locked(cache, key, progress):
        if path.is_file():
            try:
                return Tokenizer.load(path)
            except TokenizerError as error:
                progress.message(f"{error.message}; it is trained again")
        tokenizer = _train_tokenizer(recipe, inputs.train, progress)
        replace_file(path, tokenizer.to_json().encode())
    return tokenizer


def _train_tokenizer(recipe: PretrainRecipe, sources: list[Source], progress: Progress) -> Tokenizer:
    config = recipe.tokenizer
    train = train_bpe if recipe.data.kind == "text" else train_smiles_vocabulary
    with closing(_rows(sources, recipe, _TRAIN_SEED, progress, "training the tokenizer")) as rows:
        texts = (row.text for row in rows if row.problem is None)
        return train(islice(texts, config.train_rows), config.vocab_size, config.min_frequency, progress)


def _fingerprint(recipe: PretrainRecipe, inputs: _Inputs, tokenizer: Tokenizer) -> str:
    left_out = {"train", "valid", "cache_dir"}
    if inputs.valid:
        left_out.add("valid_fraction")
    options = recipe.data.model_dump(mode="json", exclude=left_out)
    return _hash([_SCHEME, inputs.train_identity, inputs.valid_identity, tokenizer.fingerprint, options])


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _locked(cache: Path, key: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of one tokenizer or shard directory, so that of two processes one does the work."""
    folder = cache / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{key[:32]}.lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        progress.message("another process prepares the same data; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(directory: Path, progress: Progress) -> bool:
    """Return whether shards are there and whole; says so where they are not."""
    if not directory.exists():
        return False
    try:
        for split in (_TRAIN, _VALID):
            TokenDataset(directory / split)
        _num_rejected(directory)
    except DataError as error:
        progress.message(f"{error.message}; the data is tokenised again")
        return False
    return True


def _open(directory: Path, tokenizer: Tokenizer, fingerprint: str, was_cached: bool) -> PreparedData:
    train, valid = (TokenDataset(directory / split) for split in (_TRAIN, _VALID))
    return PreparedData(tokenizer, train, valid, fingerprint, _num_rejected(directory), was_cached)


def _num_rejected(directory: Path) -> int:
    path = directory / _SUMMARY
    try:
        num_rejected = int(json.loads(path.read_text())["num_rejected"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read", "delete the directory and run `exlm tokenize`") from error
    if not (directory / _REJECTED).is_file():
        raise DataError(f"{directory / _REJECTED}: missing from the token shards")
    return num_rejected


@dataclass(frozen=True)
class _Job:
    """What every step of tokenising needs."""

    folder: Path
    recipe: PretrainRecipe
    inputs: _Inputs
    tokenizer: Tokenizer
    fingerprint: str
    progress: Progress

    def writer(self, split: str) -> ShardWriter:
        return ShardWriter(self.folder / split, vocab_size=self.tokenizer.vocab_size, fingerprint=self.fingerprint)

    def sink(self, writer: ShardWriter) -> SplitSink:
        return SplitSink(writer, self.recipe.data, self.tokenizer)

    def rejected(self) -> RejectedRows:
        return RejectedRows(self.folder / _REJECTED, self.recipe.data.on_invalid)


def _build(
    directory: Path, recipe: PretrainRecipe, inputs: _Inputs, tokenizer: Tokenizer, fingerprint: str, progress: Progress
) -> None:
    """Tokenise into a temporary directory and rename it into place."""
    # The lock is held, so what a killed process left under these names is nobody's.
    for leftover in directory.parent.glob(f".{directory.name}.writing-*"):
        shutil.rmtree(leftover)
    temporary = directory.with_name(f".{directory.name}.writing-{os.getpid()}")
    temporary.mkdir(parents=True)
    job = _Job(temporary, recipe, inputs, tokenizer, fingerprint, progress)
    states = {s.path: file_state(s.path) for s in (*inputs.train, *inputs.valid) if isinstance(s, FileSource)}
    try:
        num_rejected = _write_given(job) if inputs.valid else _write_held_out(job)
        for path, state in states.items():
            if file_state(path) != state:
                raise DataError(f"{path}: it changed while it was being read", "run again when it is complete")
        (temporary / _SUMMARY).write_text(json.dumps({"num_rejected": num_rejected}))
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_given(job: _Job) -> int:
    """Write both splits from inputs of their own; return how many rows were rejected."""
    splits = ((_TRAIN, job.inputs.train, _TRAIN_SEED), (_VALID, job.inputs.valid, _VALID_SEED))
    with job.rejected() as rejected:
        for split, sources, seed in splits:
            with job.writer(split) as writer:
                sink = job.sink(writer)
                _tokenise(job, sources, seed, f"tokenising {split}", [sink], partial(_always, sink), rejected)
            if not writer.num_sequences:
                raise _no_usable_row(split, sources, rejected)
    return rejected.num_rows


def _write_held_out(job: _Job) -> int:
    """Write both splits from `data.train`; return how many rows were rejected."""
    data, sources = job.recipe.data, job.inputs.train
    sizes_bytes = [source.size_bytes for source in sources if isinstance(source, FileSource)]
    total_bytes = sum(sizes_bytes) if len(sizes_bytes) == len(sources) else None
    forced: bytes | None = None
    while True:
        holdout = Holdout(data.kind, data.valid_fraction, total_bytes, forced)
        with job.rejected() as rejected, job.writer(_TRAIN) as train, job.writer(_VALID) as valid:
            sinks = [job.sink(train), job.sink(valid)]
            choose_sink = partial(_by_holdout, sinks, holdout)
            _tokenise(job, sources, _TRAIN_SEED, "tokenising", sinks, choose_sink, rejected)
        if valid.num_sequences or forced is not None:
            break
        if holdout.smallest is None:
            raise _no_usable_row(_TRAIN, sources, rejected)
        # A small corpus, of which the hashes took nothing: take what came nearest.
        forced = holdout.smallest
    if not train.num_sequences or not valid.num_sequences:
        raise DataError(
            f"{_named(sources)}: too few rows to hold some out for validation", "give more rows, or set `data.valid`"
        )
    return rejected.num_rows


def _tokenise(
    job: _Job,
    sources: list[Source],
    seed: int,
    label: str,
    sinks: list[SplitSink],
    choose_sink: Callable[[Row], SplitSink],
    rejected: RejectedRows,
) -> None:
    with closing(_rows(sources, job.recipe, seed, job.progress, label)) as rows:
        tokenise_rows(rows, job.tokenizer, job.recipe.data, sinks, choose_sink, rejected)


def _always(sink: SplitSink, _: Row) -> SplitSink:
    return sink


def _by_holdout(sinks: list[SplitSink], holdout: Holdout, row: Row) -> SplitSink:
    return sinks[holdout.takes(row)]


def _no_usable_row(split: str, sources: list[Source], rejected: RejectedRows) -> DataError:
    return DataError(f"`data.{split}`: no usable row in {_named(sources)}; {rejected.num_rows:,} were rejected")


def _named(sources: list[Source]) -> str:
    others = f" and {len(sources) - 1:,} more" if len(sources) > 1 else ""
    return f"{sources[0]}{others}"
