"""Files and folders that results go to: written whole or not at all, what the file system refuses told in one line."""

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exlm_cli.errors import CheckpointError

_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def removed_on_failure(folder: Path, *, is_new: bool = True) -> Iterator[None]:
    """Remove a new folder again when what should fill it fails, so that no half-made run is left."""
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def make_folder(folder: Path, *, option: str = "--out") -> None:
    """Make a folder for results, with those it lies in, where it is not there yet; `option` chooses another one.

    Raises:
        CheckpointError: The file system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no such folder can be made: {reason_of(error)}", advice_on(error, option)
        ) from error


@contextlib.contextmanager
def folder_for_results(folder: Path, *files: Path, option: str = "--out") -> Iterator[None]:
    """Make a folder before the work that fills it, and take back what was made of it where that fails.

    Args:
        folder: Where results go.
        files: Those that are written at the end of the work; that they can be is found out before it.
        option: Chooses another folder; for the hint.

    Raises:
        CheckpointError: The file system refuses.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder, option=option)
    with removed_on_failure(made[-1] if made else folder, is_new=bool(made)):
        for path in files:
            _refuse_unwritable(path, option)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it is either the old one or the whole new one, on disk when this returns.

    Raises:
        CheckpointError: The file system refuses; the old file is untouched.
    """
    temporary = _beside(path)
    try:
        # the kernel applies the umask to 0666; `tempfile` would give 0600 whatever it is
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(f"{path}: the file could not be written: {reason_of(error)}", advice_on(error)) from error


def fsync(path: Path) -> None:
    """Wait until a file, or which files a folder has, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finite_or_none(value: Any) -> Any:
    """Replace inf and nan, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reason_of(error: OSError) -> str:
    """Return what the file system said."""
    return error.strerror or str(error)


def advice_on(error: OSError, option: str | None = None) -> str:
    """Return what can be done where the file system refuses; `option` is the one that chooses another place."""
    remedies = ["move away what has that name"] if error.errno in _IN_THE_WAY else []
    remedies += ["free some space"] if error.errno in _NO_SPACE else []
    remedies += [f"choose a folder that you may write to with `{option}`"] if option is not None else []
    return " or ".join(remedies)


def _refuse_unwritable(path: Path, option: str) -> None:
    temporary = _beside(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{path}: the file could not be written: {reason_of(error)}", advice_on(error, option)
        ) from error


def _beside(path: Path) -> Path:
    """Return the name under which a file is written before it takes its own."""
    return path.with_name(f".{path.name}.writing-{os.getpid()}")
