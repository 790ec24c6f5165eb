"""What inputs are, by content: a changed file is another input, whatever its size and dates say."""

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.data.bundled import grammar_words, molecules
from exlm_cli.data.corpus.cache import replace_file
from exlm_cli.data.corpus.inputs import BundledSource, FileSource, Source
from exlm_cli.data.rows.hub import HubSource, find_revision
from exlm_cli.data.rows.records import format_of
from exlm_cli.errors import DataError
from exlm_cli.format import format_bytes
from exlm_cli.progress import Progress

# A file that changed this recently could change again within one tick of the file system's clock.
_SETTLED_NS = 2_000_000_000
_HUGE_BYTES = 1 << 28


@dataclass(frozen=True)
class Identified:
    """A source and what it held when it was looked at.

    Attributes:
        source: What was looked at.
        content: Changes whenever the content does.
        state: What the file system said before the content was read; empty for what is no file.
    """

    source: Source
    content: str
    state: tuple[int, ...] = ()


def identify(sources: Sequence[Source], cache: Path, progress: Progress) -> list[Identified]:
    """Look at sources and tell them by their content.

    The sha256 of a file is remembered under its path, size, inode, modification and change times. Only the kernel sets
    the last, so a file rewritten in place with the same size and its old date is still read anew.

    Args:
        sources: From `resolve_inputs`.
        cache: Folder for remembered digests.
        progress: Told when a large file is read through.

    Raises:
        DataError: A file cannot be read, or the Hub cannot be asked.
    """
    return [_identify_one(source, cache, progress) for source in sources]


def unchanged(sources: Sequence[Identified]) -> None:
    """Check that no file has changed since it was identified.

    Raises:
        DataError: One has.
    """
    for identified in sources:
        if isinstance(identified.source, FileSource) and _state(identified.source.path) != identified.state:
            raise DataError(f"{identified.source}: it changed while it was being read", "run again when it is complete")


def _identify_one(source: Source, cache: Path, progress: Progress) -> Identified:
    match source:
        case FileSource(path=path):
            state = _state(path)
            sha256 = _file_sha256(path, state, cache / "digests", progress)
            return Identified(source, f"file {format_of(path)} {sha256}", state)
        case HubSource():
            return Identified(source, f"{source} {find_revision(source, cache, progress)}")
        case BundledSource(name="grammar" | "feelings"):
            return Identified(source, f"{source} {_sha256(repr(grammar_words.FAMILIES))}")
        case BundledSource():
            import rdkit

            pieces = repr((molecules.CORES, molecules.SUBSTITUENTS))
            return Identified(source, f"{source} {_sha256(pieces)} rdkit {rdkit.__version__}")


def _state(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


def _file_sha256(path: Path, state: tuple[int, ...], digests: Path, progress: Progress) -> str:
    remembered = digests / f"{_sha256(str(path.resolve()))}.json"
    try:
        known = json.loads(remembered.read_text())
        if known["state"] == list(state):
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not remembered, or not readably: read the file
    size_bytes, _, changed_ns, *_ = state
    if size_bytes > _HUGE_BYTES:
        progress.message(f"{path}: reading {format_bytes(size_bytes)} to tell whether it has changed")
    begun_ns = time.time_ns()
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if begun_ns - changed_ns > _SETTLED_NS and _state(path) == state:
        # a cache that others filled and that may only be read still serves
        with contextlib.suppress(OSError):
            replace_file(remembered, json.dumps({"state": state, "sha256": sha256}).encode())
    return sha256


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
