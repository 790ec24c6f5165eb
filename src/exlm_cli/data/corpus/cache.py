"""The folder where tokenizers and token shards are kept: how its files are written and locked."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from exlm_cli.errors import DataError
from exlm_cli.progress import Progress


@contextmanager
def explaining_disk_trouble(cache: Path) -> Iterator[None]:
    """Turn an `OSError` into one line about the cache; inputs that cannot be read raise `DataError` themselves."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or cache}: the data cache cannot be written: {error.strerror or error}",
            "free some space, or choose another folder with `EXLM_CACHE_DIR=DIR` (pre-training: also `data.cache_dir`)",
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file so that it is the old one or the new one, folder included."""
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


@contextmanager
def locked(cache: Path, key: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of one entry, so that of two processes that need it one does the work."""
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
