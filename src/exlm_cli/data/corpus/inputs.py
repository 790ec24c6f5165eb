"""Inputs of a recipe: files, directories, globs, Hub names and bundled data, and their rows one after the other.

Rows are streamed: no input is ever held whole.
"""

import glob
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from exlm_cli.config.sections import DataConfig
from exlm_cli.data.bundled.grammar import sample_sentences
from exlm_cli.data.bundled.molecules import generate_molecules
from exlm_cli.data.rows.decode import open_file, open_raw
from exlm_cli.data.rows.hub import HubSource, iter_hub_records
from exlm_cli.data.rows.records import (
    FORMATS,
    KNOWN_EXTENSIONS,
    ColumnChoice,
    Row,
    RowKind,
    as_row,
    conversion_hint,
    format_of,
    iter_file_rows,
)
from exlm_cli.errors import DataError
from exlm_cli.files import READ_HINT, nearest_file, reason_of
from exlm_cli.format import format_number_of, name_some
from exlm_cli.paths import expand_path
from exlm_cli.progress import Progress

BUNDLED: dict[str, RowKind] = {"grammar": "text", "feelings": "text", "molecules": "smiles"}

_GLOB_CHARACTERS = frozenset("*?[")
_ROWS_BETWEEN_UPDATES = 1024


@dataclass(frozen=True)
class FileSource:
    """One local file of a known format."""

    path: Path
    size_bytes: int

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class BundledSource:
    """Data that the package generates."""

    name: str

    def __str__(self) -> str:
        return f"bundled:{self.name}"


Source = FileSource | HubSource | BundledSource


# Which files, data sets and bundled data


def resolve_inputs(
    inputs: Sequence[str], *, kind: RowKind, progress: Progress, key: str = "data.train"
) -> list[Source]:
    """Return the sources that the inputs of a recipe name, in order; directories and globs are sorted.

    `key` is the recipe key of the inputs, for hints.

    Raises:
        DataError: An input is missing, empty, of an unknown format or of the other kind.
    """
    sources: list[Source] = []
    for given in inputs:
        scheme, _, name = given.partition(":")
        if scheme == "hub":
            sources.append(HubSource.parse(name))
        elif scheme == "bundled":
            sources.append(_bundled(name, kind))
        else:
            try:
                sources.extend(_local_files(given, progress, key))
            except OSError as error:
                raise DataError(f"{error.filename or given}: cannot be read: {reason_of(error)}", READ_HINT) from error
    return sources


def _bundled(name: str, kind: RowKind) -> BundledSource:
    if name not in BUNDLED:
        raise DataError(
            f"`bundled:{name}` is not bundled; there are {', '.join(f'`bundled:{n}`' for n in BUNDLED)}",
            "choose one, or give a file of your own with `--set data.train=FILE`",
        )
    if BUNDLED[name] != kind:
        raise DataError(
            f"`bundled:{name}` is {BUNDLED[name]}, but `data.kind` is {kind}",
            f"choose a recipe for {BUNDLED[name]}, or other data with `--set data.train=FILE`",
        )
    return BundledSource(name)


def _local_files(given: str, progress: Progress, key: str) -> list[FileSource]:
    if not given.strip():
        raise DataError("an input is empty; accepted: a file, a directory, a glob or hub:NAME", "`.` is this directory")
    path = expand_path(given)
    if path.is_dir():
        return _files_under(path, progress, set())
    if path.exists() or path.is_symlink():
        return [_file(path)]
    if not _GLOB_CHARACTERS.isdisjoint(given):
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 (any root)
        if not found:
            raise DataError(f"`{given}`: the pattern matches no file", f"the current directory is {Path.cwd()}")
        files: list[FileSource] = []
        seen: set[Path] = set()
        for match in _without_empty(found, given, progress):
            parent = match.parent.resolve()
            entry = match.resolve() if match.is_dir() else parent / match.name
            # `**` matches a folder and then those in it
            if seen.isdisjoint((parent, entry)):
                files += _files_under(match, progress, seen) if match.is_dir() else [_file(match)]
                seen.add(entry)
        return files
    hint = f"several inputs are given as `--set {key}=[{given}]`" if "," in given else _nearest(path)
    raise DataError(f"{given}: no such file or directory", hint)


def _nearest(path: Path) -> str:
    """Return a hint that names the entry of the folder whose name is most similar."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either; the current directory is {Path.cwd()}"
    return nearest_file(path) or f"the current directory is {Path.cwd()}"


def _files_under(folder: Path, progress: Progress, seen: set[Path]) -> list[FileSource]:
    """Return the files of a folder and its subfolders that can be read, sorted, without hidden ones.

    Links are followed. A folder whose real path is in `seen` is passed over; each one is added to it.
    """
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = Path(parent).resolve()
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        _refuse_arrow(Path(parent), names)
        found += (Path(parent, name) for name in names if not name.startswith("."))
    found.sort()
    known = [path for path in found if format_of(path) is not None]
    if not known:
        raise DataError(
            f"{folder}: no file in it that can be read, of {len(found)}; known are {KNOWN_EXTENSIONS}",
            next(
                filter(None, (conversion_hint(path, FORMATS) for path in found)),
                "choose another folder, or rename the files by their content, such as .txt for one row a line",
            ),
        )
    if len(known) < len(found):
        skipped = next(path for path in found if format_of(path) is None)
        others = format_number_of(len(found) - len(known), "file")
        progress.message(f"{folder}: skipped {others} of another kind, such as {skipped.name}")
    return [_file(path) for path in _without_empty(known, folder, progress)]


def _without_empty(paths: list[Path], given: str | Path, progress: Progress) -> list[Path]:
    """Return the files that are not empty, as the parts are of a table that many processes write; if there are any."""
    empty = [path for path in paths if path.is_file() and _unpacks_to_nothing(path)]
    if not empty or len(empty) == len(paths):
        return paths
    progress.message(
        f"{given}: skipped {format_number_of(len(empty), 'empty file')}: {name_some(p.name for p in empty)}"
    )
    return [path for path in paths if path not in empty]


def _unpacks_to_nothing(path: Path) -> bool:
    if not path.stat().st_size:
        return True
    with open_file(path) as file:
        return not file.peek(1)


def _raise(error: OSError) -> None:
    raise error


def _refuse_arrow(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder in which `datasets` keeps a data set: what can be read there, JSON, is not its rows."""
    arrow = sorted(name for name in names if name.endswith(".arrow"))
    if arrow and "dataset_info.json" in names:
        saved = folder if "state.json" in names else folder / arrow[0]
        raise DataError(f"{folder}: the rows are in {arrow[0]}, which cannot be read", conversion_hint(saved, FORMATS))


def _file(path: Path) -> FileSource:
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path}: a link to {path.readlink()}, which does not exist", "correct the link or remove it")
    if not path.is_file():
        raise DataError(f"{path}: not a regular file", "write the rows to a file first")
    if format_of(path) is None:
        raise DataError(
            f"{path}: unknown extension `{path.suffix}`; known are {KNOWN_EXTENSIONS}",
            conversion_hint(path, FORMATS) or "rename it by its content, such as .txt for one row a line",
        )
    if _unpacks_to_nothing(path):
        raise DataError(f"{path}: the file is empty", "leave it out, or write it again")
    return FileSource(path, path.stat().st_size)


# Their rows


def iter_rows(
    sources: Sequence[Source],
    data: DataConfig,
    *,
    seed: int = 0,
    progress: Progress,
    label: str = "reading",
    num_done: int = 0,
    ends: list[int] | None = None,
) -> Generator[Row]:
    """Yield the rows of all sources in order, under a progress bar that shows how far reading has come.

    `data.max_rows` is shared evenly: each source gives at most an equal share of what the sources before it have left.
    The bar counts bytes on disk if all sources are files that are read whole, else rows. Bundled sources use `seed`.

    Args:
        num_done: Rows at the beginning that are passed over.
        ends: Gets the number of rows up to the end of each source. Those sources whose end it has are not opened.

    Raises:
        DataError: A source cannot be read, or has no rows.
    """
    max_rows = data.max_rows
    sizes_bytes = [source.size_bytes for source in sources if isinstance(source, FileSource)]
    counts_bytes = max_rows is None and len(sizes_bytes) == len(sources)
    only_bundled = all(isinstance(source, BundledSource) for source in sources)
    total = sum(sizes_bytes) if counts_bytes else None  # the number of rows is unknown until the end
    if only_bundled:
        total = min(data.bundled_rows * len(sources), max_rows or sys.maxsize)
    started_s = time.monotonic()
    ends = [] if ends is None else ends
    num_rows = ends[-1] if ends else 0
    finished_bytes = sum(source.size_bytes for source in sources[: len(ends)] if isinstance(source, FileSource))
    with progress.bar(label, total, done=finished_bytes if counts_bytes else num_done) as bar:

        def show(position_bytes: int) -> None:
            rate = max(0, num_rows - num_done) / max(1e-9, time.monotonic() - started_s)
            fields = {"rows": f"{num_rows:,}"} if counts_bytes else {}
            bar.update(position_bytes if counts_bytes else num_rows, **fields, rate=f"{rate:,.0f} rows/s")

        for place, source in enumerate(sources[len(ends) :], start=len(ends)):
            if num_rows == max_rows:
                break
            num_before = num_rows
            limit = None if max_rows is None else num_rows + math.ceil((max_rows - num_rows) / (len(sources) - place))
            with _opened(source, data, seed) as (rows, position_bytes):
                for row in rows if limit is None else islice(rows, limit - num_rows):
                    if num_rows >= num_done:
                        yield row
                    num_rows += 1
                    if num_rows % _ROWS_BETWEEN_UPDATES == 0:
                        show(finished_bytes + position_bytes())
            if num_rows == num_before:
                raise DataError(f"{source}: no rows in it", "leave it out, or give a file that has rows")
            if isinstance(source, FileSource):
                finished_bytes += source.size_bytes
            ends.append(num_rows)
            show(finished_bytes)


def first_row(source: FileSource, data: DataConfig) -> Row | None:
    """Return the first row of a file, or None where it has none.

    Raises:
        DataError: The file cannot be read, or lacks the column.
    """
    with _opened(source, data, seed=0) as (rows, _):
        return next(rows, None)


@contextmanager
def _opened(source: Source, data: DataConfig, seed: int) -> Iterator[tuple[Iterator[Row], Callable[[], int]]]:
    """Open one source: its rows, and a function that returns how many bytes of it have been read."""
    column = ColumnChoice(data.kind, data.column)
    match source:
        case FileSource(path=path):
            with open_raw(path) as raw:
                yield iter_file_rows(path, raw, column), raw.tell
        case HubSource():
            yield (as_row(record) for record in iter_hub_records(source, only=column)), lambda: 0
        case BundledSource(name=name):
            texts: Iterable[str]
            if name == "molecules":
                texts = _molecules(data.bundled_rows, seed)
            else:
                texts = sample_sentences(data.bundled_rows, seed, "feelings" if name == "feelings" else "grammar")
            yield (Row(str(source), number, text) for number, text in enumerate(texts, start=1)), lambda: 0


@lru_cache(maxsize=1)
def _molecules(num: int, seed: int) -> tuple[str, ...]:
    """Return bundled molecules, cached: they are read twice, by tokenizer training and tokenising, and take seconds."""
    return tuple(generate_molecules(num, seed))
