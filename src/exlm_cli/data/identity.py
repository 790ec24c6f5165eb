"""What inputs are, by content: a changed file is another input, whatever its size and dates say."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from exlm_cli.data import grammar_words, molecules
from exlm_cli.data.hub import HubSource, revision_of
from exlm_cli.data.readers import format_of
from exlm_cli.data.sources import BundledSource, FileSource, Source
from exlm_cli.errors import DataError
from exlm_cli.progress import Progress

# A file that changed this recently could change again within one tick of the file system's clock.
_SETTLED_NS = 2_000_000_000
_HUGE_BYTES = 1 << 28


def identify(sources: Sequence[Source], cache: Path, progress: Progress) -> list[str]:
    """Return one text per source that changes whenever its content does.

    The sha256 of a file is remembered under its path, size, inode, modification and change times. Only the kernel sets
    the last, so a file rewritten in place with the same size and its old date is still read anew.

    Args:
        sources: From `resolve_inputs`.
        cache: Folder for remembered digests.
        progress: Told when a large file is read through.

    Raises:
        DataError: A file cannot be read, or the Hub cannot be asked.
    """
    return [_identity(source, cache / "digests", progress) for source in sources]


def _identity(source: Source, digests: Path, progress: Progress) -> str:
    match source:
        case FileSource(path=path):
            return f"file {format_of(path)} {_file_sha256(path, digests, progress)}"
        case HubSource():
            return f"{source} {revision_of(source)}"
        case BundledSource(name="grammar"):
            return f"{source} {_sha256(repr(grammar_words.FAMILIES))}"
        case BundledSource():
            import rdkit

            return f"{source} {_sha256(repr((molecules.CORES, molecules.SUBSTITUENTS)))} rdkit {rdkit.__version__}"


def file_state(path: Path) -> list[int]:
    """Return what the file system says about a file: it changes whenever the content does.

    Raises:
        DataError: The file is gone.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _file_sha256(path: Path, digests: Path, progress: Progress) -> str:
    state = file_state(path)
    remembered = digests / f"{_sha256(str(path.resolve()))}.json"
    try:
        known = json.loads(remembered.read_text())
        if known["state"] == state:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not remembered, or not readably: read the file
    if state[0] > _HUGE_BYTES:
        progress.message(f"{path}: reading {state[0] / 1e6:,.0f} MB to tell whether it has changed")
    begun_ns = time.time_ns()
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if begun_ns - state[2] > _SETTLED_NS and file_state(path) == state:
        replace_file(remembered, json.dumps({"state": state, "sha256": sha256}).encode())
    return sha256


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file of the cache so that it is the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
