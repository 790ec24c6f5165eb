"""Fingerprints of inputs by their content, and the cache keys of tokenizers and shards that follow from them.

A changed file is another input, whatever its size and dates; a moved file is the same input.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.data.bundled import grammar, molecules
from exlm_cli.data.cache import remember
from exlm_cli.data.corpus.inputs import BundledSource, FileSource, Source
from exlm_cli.data.rows.hub import HubSource, find_revision
from exlm_cli.data.rows.records import format_of
from exlm_cli.data.tokenizer import Tokenizer
from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.files import READ_HINT, JsonModel, hash_json, read_json, reason_of
from exlm_cli.progress import Progress

# Increase it when the same input would give other shards.
_SCHEME = 7
_HUGE_BYTES = 1 << 28


@dataclass(frozen=True)
class FingerprintedSource:
    """A source and its content at one moment.

    Attributes:
        source: Where the rows are.
        content: Text that changes whenever the content does.
        state: Size, times, inode and device of a file before its content was read; empty for other sources.
    """

    source: Source
    content: str
    state: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """Everything that decides the shards of a recipe."""

    recipe: PretrainRecipe
    train: list[FingerprintedSource]
    valid: list[FingerprintedSource]
    tokenizer: Tokenizer
    fingerprint: str


# What sources hold


def fingerprint_sources(sources: Sequence[Source], cache: Path, progress: Progress) -> list[FingerprintedSource]:
    """Return sources with fingerprints of their content.

    The SHA-256 of a file is cached by path, and reused while size, times, inode and device stay the same. Only the
    kernel sets the change time, so a file rewritten in place with its old size and date is still read again.

    Raises:
        DataError: A file cannot be read, the Hub has no such data set, or it does not answer.
    """
    return [_fingerprint_source(source, cache, progress) for source in sources]


def _fingerprint_source(source: Source, cache: Path, progress: Progress) -> FingerprintedSource:
    match source:
        case FileSource(path=path):
            state = _state(path)
            sha256 = _file_sha256(path, state, cache / "digests", progress)
            return FingerprintedSource(source, f"file {format_of(path)} {sha256}", state)
        case HubSource():
            revision = find_revision(source, cache, progress)
            return FingerprintedSource(replace(source, revision=revision), f"{source} {revision}")
        case BundledSource(name="grammar" | "feelings"):
            return FingerprintedSource(source, f"{source} {_sha256(repr(grammar.FAMILIES))}")
        case BundledSource():
            import rdkit

            pieces = repr((molecules.CORES, molecules.SUBSTITUENTS))
            return FingerprintedSource(source, f"{source} {_sha256(pieces)} rdkit {rdkit.__version__}")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}", READ_HINT) from error
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


class _Digest(JsonModel):
    """Remembered SHA-256 of a file in a certain state."""

    state: tuple[int, ...]
    sha256: str


def _file_sha256(path: Path, state: tuple[int, ...], digests: Path, progress: Progress) -> str:
    remembered = digests / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"
    with contextlib.suppress(CheckpointError):  # none remembered, or damaged: read the file
        known = read_json(remembered, _Digest)
        if known.state == state:
            return known.sha256
    size_bytes = state[0]
    if size_bytes > _HUGE_BYTES:
        progress.message(f"{path}: reading {size_bytes / 1e6:,.0f} MB to find out whether it has changed")
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}", READ_HINT) from error
    remember(remembered, _Digest(state=state, sha256=sha256).model_dump_json().encode())
    return sha256


def check_unchanged(sources: Sequence[FingerprintedSource]) -> None:
    """Check that no file has changed since its fingerprint was taken.

    Raises:
        DataError: A file has changed, or can no longer be read.
    """
    for known in sources:
        if isinstance(known.source, FileSource) and _state(known.source.path) != known.state:
            raise DataError(f"{known.source}: it changed while it was being read", "run again when it is complete")


# Which files hold the same


def without_copies(sources: Sequence[FingerprintedSource], progress: Progress) -> list[FingerprintedSource]:
    """Leave out files with the content of one before them: a row held out of one would be trained on in the other."""
    kept: dict[str, FingerprintedSource] = {}
    for known in sources:
        original = kept.setdefault(known.content, known)
        if original is not known:
            progress.message(f"{known.source} has the content of {original.source}: it is left out")
    return list(kept.values())


# Which cached result fits


def tokenizer_key(recipe: PretrainRecipe, train: Sequence[FingerprintedSource]) -> str:
    """Return the cache key of the tokenizer that a recipe trains on its training inputs."""
    options = recipe.tokenizer.model_dump(mode="json")
    options |= recipe.data.model_dump(include={"kind", "column", "max_rows", "bundled_rows"} | _spelled(recipe))
    return hash_json([_SCHEME, _contents(train), options])[:32]


def data_fingerprint(
    recipe: PretrainRecipe,
    train: Sequence[FingerprintedSource],
    valid: Sequence[FingerprintedSource],
    tokenizer: Tokenizer,
) -> str:
    """Return the fingerprint of a recipe's shards: contents, tokenizer and options, without names of files."""
    unused = {"train", "valid", "cache_dir"} | ({"valid_fraction"} if valid else set())
    unused |= {"canonical_smiles"} if recipe.data.kind == "text" else set()
    unused |= {"num_spellings"} - _spelled(recipe)
    options = recipe.data.model_dump(mode="json", exclude=unused)
    return hash_json([_SCHEME, _contents(train), _contents(valid), tokenizer.fingerprint, options])


def _spelled(recipe: PretrainRecipe) -> set[str]:
    """Return the option that decides the spellings of molecules, where there are several."""
    return {"num_spellings"} if recipe.data.num_spellings > 1 else set()


def _contents(sources: Sequence[FingerprintedSource]) -> list[str]:
    return [source.content for source in sources]
