"""Folder where tokenizers, token shards and downloads are kept: writing and locking its entries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import filelock

from exlm_cli.errors import CheckpointError, DataError
from exlm_cli.files import reason_of, write_atomically
from exlm_cli.progress import Progress, SilentProgress

EntryT = TypeVar("EntryT")


@contextmanager
def explaining_disk_trouble(cache: Path) -> Iterator[None]:
    """Turn a failed write into one line about the cache; inputs that cannot be read raise `DataError` themselves."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = reason_of(cause) if isinstance(cause, OSError) else str(cause)
        raise DataError(
            f"{getattr(cause, 'filename', None) or cache}: the data cache cannot be written: {reason}",
            "free some space, or choose another folder with `EXLM_CACHE_DIR=DIR` (pre-training: also `data.cache_dir`)",
        ) from error


def write_entry(path: Path, content: bytes) -> None:
    """Write a small file atomically, and the folder it is in.

    Raises:
        OSError, CheckpointError: The file system refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def load_or_build(
    cache: Path,
    key: str,
    load: Callable[[Progress], EntryT | None],
    build: Callable[[], EntryT],
    progress: Progress,
) -> EntryT:
    """Return an entry of the cache, locked by its key; build it if there is none, in one process only.

    `load` returns the entry, or None if there is none or (with a message) if it is damaged. `build` writes and returns
    it.
    """
    entry = load(progress)
    if entry is None:
        with locked(cache, key, progress):
            # another process may have built it meanwhile
            entry = load(SilentProgress())
            if entry is None:
                entry = build()
    return entry


@contextmanager
def locked(cache: Path, key: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of one entry, so that one of two processes that need it does the work."""
    folder = cache / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / f"{key}.lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        progress.message("another process prepares the same data; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
