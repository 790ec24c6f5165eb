"""Files: atomic writes, typed JSON, CSV, and folders for results.

What the operating system refuses is a `CheckpointError` with its reason and a remedy; a file that cannot be written
stays as it was.
"""

import contextlib
import csv
import difflib
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from exlm_cli.errors import CheckpointError
from exlm_cli.format import shorten

ALTERED_HINT = "another version of exlm made this run, or something altered the file; restore it or start a new run"
READ_HINT = "check the path and the disk, and that you may read it"
_SHOWN_CHARACTERS = 60
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""NUL in a JSON string: no file name may hold one."""
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def refusing(what: str, *, is_chosen: bool = False) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that begins with `what`; `is_chosen`: `--out DIR` sets the folder."""
    try:
        yield
    except OSError as error:
        remedies = ["rename the file or folder that has that name"] if error.errno in _IN_THE_WAY else []
        remedies += ["free some space"] if error.errno in _NO_SPACE else []
        remedies += ["choose a folder that you may write to with `--out DIR`"] if is_chosen else []
        remedies = remedies or ["check the disk and your permissions in that folder"]
        raise CheckpointError(f"{what}: {reason_of(error)}", " or ".join(remedies)) from error


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Delete a new folder again if the work that fills it fails, so that no incomplete run is left."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def nearest_file(path: Path, *holding: str) -> str | None:
    """Return the hint that names the entry of a missing file's folder whose name is most similar; None without one.

    Args:
        path: The file or folder that is missing.
        holding: Files that the folder must have.
    """
    with contextlib.suppress(OSError):
        names = sorted(each.name for each in path.parent.iterdir() if all((each / name).is_file() for name in holding))
        if close := difflib.get_close_matches(path.name, names, n=1):
            return f"did you mean {path.parent / close[0]}?"
    return None


def make_folder(folder: Path) -> None:
    """Make a folder for results, and its parents, unless it exists."""
    with refusing(f"{folder}: the folder cannot be made", is_chosen=True):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def folder_for_results(folder: Path, *files: Path) -> Iterator[None]:
    """Make a folder before the work that fills it, and delete it again if the work fails and nothing is in it.

    The work writes `files` at its end; whether they can be written is checked before it begins.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    make_folder(folder)
    try:
        for path in files:
            with refusing(f"{path}: the file could not be written", is_chosen=True):
                _refuse_folder(path)
                _beside(path).touch()
                _beside(path).unlink()
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # another process may have written into it
            for path in made:
                path.rmdir()
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; it is on disk when this returns."""
    write_together({path: data})


def write_together(files: Mapping[Path, bytes]) -> None:
    """Write files whole, and replace none before all are written; they are on disk when this returns."""
    written: dict[Path, Path] = {}
    try:
        for path, data in files.items():
            with refusing(f"{path}: the file could not be written"):
                _refuse_folder(path)  # a later file that cannot be replaced must not leave an earlier one new
                written[path] = _beside(path)
                # not `tempfile`, whose mode is 0600 whatever the umask is
                with written[path].open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        for path, temporary in written.items():
            with refusing(f"{path}: the file could not be written"):
                temporary.replace(path)
                fsync(path.parent)
    except BaseException:
        for temporary in written.values():
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise


class JsonModel(BaseModel):
    """Content of a JSON file that exlm writes: frozen, exact types, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def as_json(self) -> dict[str, Any]:
        """Return the content as JSON values under the keys of the file; numbers that are not finite become None."""
        content: dict[str, Any] = finite_or_none(self.model_dump(mode="json"))
        return content


def absent_if_none() -> Any:
    """Return a field of a `JsonModel` whose key is left out of the file where the value is None."""
    return Field(default=None, exclude_if=lambda value: value is None)


JsonModelT = TypeVar("JsonModelT", bound=JsonModel)


def read_json(path: Path, model: type[JsonModelT], *, hint: str = ALTERED_HINT) -> JsonModelT:
    """Return the content of a JSON file as a checked model.

    Raises:
        CheckpointError: The file cannot be read, is not JSON, lacks a key, or has an unknown key or a wrong value.
    """
    content = read_whole(path, hint=hint)
    if _ESCAPED_NUL.search(content):
        raise CheckpointError(f"{path}: a text in it has a NUL character", hint)
    try:
        read = model.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {describe_json_error(error)}", hint) from None
    if read.as_json() != read.model_dump(mode="json"):
        raise CheckpointError(f"{path}: a number in it is too large for a float", hint)
    return read


def read_whole(path: Path, *, hint: str) -> bytes:
    """Return the bytes of a file of a run."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: the file could not be read: {reason_of(error)}", hint) from error


def write_json(path: Path, content: JsonModel | Mapping[str, object]) -> None:
    """Write a model, or a mapping with keys from the user's data, as JSON, atomically; inf and nan become null."""
    write_atomically(path, json_bytes(content))


def json_bytes(content: JsonModel | Mapping[str, object]) -> bytes:
    """Return what `write_json` writes."""
    values = content.as_json() if isinstance(content, JsonModel) else finite_or_none(dict(content))
    return f"{json.dumps(values, indent=1, allow_nan=False)}\n".encode()


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table as CSV with Unix line ends, atomically; what UTF-8 cannot hold is escaped."""
    write_atomically(path, csv_bytes(header, rows))


def csv_bytes(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    """Return what `write_csv` writes."""
    return "".join(map(csv_line, [header, *rows])).encode(errors="backslashreplace")


def csv_line(cells: Sequence[object]) -> str:
    """Return a row as a line of CSV, with a line feed at its end."""
    line = io.StringIO()
    # `csv` quotes a cell only for characters of its own line end; readers take a lone carriage return for a line end
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def describe_json_error(error: ValidationError) -> str:
    """Return the first finding of a validation error in one clause."""
    finding = error.errors()[0]
    key = ".".join(map(str, finding["loc"]))
    said = finding["msg"].removeprefix("Value error, ")
    match finding["type"]:
        case "json_invalid":
            return f"not readable as JSON: {said}"
        case "missing":
            return f"`{key}` is missing"
        case "extra_forbidden":
            return f"unknown key `{key}`; a run of another version of exlm cannot be read"
        case "value_error":
            return f"`{key}`: {said}" if key else said
    shown = shorten(repr(finding["input"]), _SHOWN_CHARACTERS)
    return f"`{key or 'the file'}` is {shown}: {said[0].lower()}{said[1:]}"


def fsync(path: Path) -> None:
    """Wait until a file, or the list of files in a folder where the file system can, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def hash_json(content: object) -> str:
    """Return the SHA-256 of JSON values; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def finite_or_none(value: Any) -> Any:
    """Return a value with None in place of inf and nan, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def reason_of(error: OSError) -> str:
    """Return the reason that the file system gives."""
    return error.strerror or str(error)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def _beside(path: Path) -> Path:
    """Return the temporary path under which a file is written."""
    return path.with_name(f".{path.name}.writing-{os.getpid()}")
