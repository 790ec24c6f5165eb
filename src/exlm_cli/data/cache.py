"""Cache folder of tokenizers, token shards and downloads: one process makes an entry, the others load it."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import filelock

from exlm_cli.errors import CheckpointError, DataError, TokenizerError
from exlm_cli.files import reason_of, write_atomically
from exlm_cli.progress import Progress

EntryT = TypeVar("EntryT")
_DAMAGED = (CheckpointError, DataError, TokenizerError)


@contextmanager
def explaining_disk_trouble(cache: Path) -> Iterator[None]:
    """Turn disk trouble into one line about the cache; inputs that cannot be read raise `DataError` themselves."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = reason_of(cause) if isinstance(cause, OSError) else str(cause)
        space = "free some space, or " if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else ""
        raise DataError(
            f"{getattr(cause, 'filename', None) or cache}: the data cache cannot be read or written: {reason}",
            f"{space}choose another folder with `EXLM_CACHE_DIR=DIR` (pre-training: also `data.cache_dir`)",
        ) from error


def remember(path: Path, content: bytes) -> None:
    """Write a small file that only saves work later: a cache that cannot be written is no error."""
    with suppress(OSError, CheckpointError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def load_or_build(
    cache: Path,
    path: Path,
    load: Callable[[], EntryT],
    build: Callable[[], EntryT] | None,
    progress: Progress,
    *,
    remedy: str,
) -> EntryT:
    """Return the cache entry at `path`; build it, in one process only, if it is missing or damaged.

    `load` raises a `DataError`, `TokenizerError` or `CheckpointError` if the entry is damaged; a message then gives the
    error and the `remedy`. `build` writes the entry and returns it; None: the entry must exist.

    Raises:
        DataError: The entry must exist and does not; without `build` also whatever `load` raises.
    """
    if build is None:
        if not path.exists():
            raise DataError(
                f"{path} is missing: this rank and rank 0 read different data, or have different caches",
                "all nodes must see the same data and one cache, which `EXLM_CACHE_DIR=DIR` or `data.cache_dir` moves",
            )
        return load()
    if path.exists():
        try:
            return load()
        except _DAMAGED as error:
            progress.message(f"{error.message}; {remedy}")
    with locked(cache, path.stem, progress):
        # another process may have built it meanwhile
        with suppress(*_DAMAGED):
            if path.exists():
                return load()
        return build()


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
