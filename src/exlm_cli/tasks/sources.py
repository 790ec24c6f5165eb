"""Files of a task: those that the recipe names, those in a folder with the official layout, or the Hub's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from exlm_cli.config.tasks import TaskSection
from exlm_cli.data.rows.hub import HubSource
from exlm_cli.errors import DataError
from exlm_cli.paths import expand_path
from exlm_cli.progress import Bar

HUB_PREFIX = "hub:"
LOCAL_HINT = "to read local files instead, give their folder with `--data-dir DIR`"

_ROWS_BETWEEN_UPDATES = 1024
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class OfficialFiles:
    """Where a benchmark's files are.

    Attributes:
        hub_name, hub_config: Name of the data set on the Hub, and of one of its configurations; None: it is not there.
        folders: Its folders in a download; the first is what the benchmark calls it.
        parts: File name without its ending, a glob, and split on the Hub, of `train`, `valid` and others.
        suffixes: Endings that a file may have; the first is the official one.
        optional: Parts that a folder need not have.
    """

    hub_name: str | None
    hub_config: str | None
    folders: tuple[str, ...]
    parts: Mapping[str, tuple[str, str]]
    suffixes: tuple[str, ...]
    optional: tuple[str, ...]


def find_parts(config: TaskSection, official: OfficialFiles) -> Iterator[tuple[str, Path | HubSource]]:
    """Yield name and place of each part of a benchmark; nothing is read.

    They are `task.files` if these are given, else the files in the folder `task.data_dir`, else on the Hub.

    Raises:
        DataError: A file is missing, or several fit.
    """
    given = config.files.model_dump(exclude_none=True)
    if "train" in given:
        yield from ((part, given_file(config, path)) for part, path in given.items())
        return
    for part, (stem, hub_split) in official.parts.items():
        remote = None
        if official.hub_name is not None:
            remote = hub_source(config, official.hub_name, official.hub_config, hub_split)
        if remote is not None:
            yield part, remote
            continue
        folder = existing_folder(config, official.folders)
        found = find_file(folder, stem, official.suffixes)
        if found is not None:
            yield part, found
        elif part not in official.optional:
            others = f"or {', '.join(official.suffixes[1:])}, " if official.suffixes[1:] else ""
            raise DataError(
                f"{folder}: no `{stem}{official.suffixes[0]}` ({others}also with .gz)",
                f"give the folder that holds the files or `{official.folders[0]}/` with `--data-dir DIR`",
            )


def given_file(config: TaskSection, given: str) -> Path:
    """Return the path of one of `task.files`; a relative one starts in `task.data_dir` if that is given.

    Raises:
        DataError: A path begins with `~`, and that home folder does not exist.
    """
    path = expand_path(given)
    return path if config.data_dir is None else expand_path(config.data_dir) / path


def hub_source(config: TaskSection, default: str, name: str | None, split: str) -> HubSource | None:
    """Return the Hub split to read: of `default` without `task.data_dir`, of X with `hub:X`, None with a folder.

    Raises:
        DataError: The text after `hub:` is not the name of a data set.
    """
    given = f"{HUB_PREFIX}{default}" if config.data_dir is None else config.data_dir
    if not given.startswith(HUB_PREFIX):
        return None
    parsed = HubSource.parse(given.removeprefix(HUB_PREFIX))
    return HubSource(parsed.name, parsed.config or name, split)


def existing_folder(config: TaskSection, names: Sequence[str]) -> Path:
    """Return the folder of a task inside `task.data_dir`: the first of `names` that exists, or `data_dir` itself.

    Raises:
        DataError: `data_dir` is not a folder.
    """
    assert config.data_dir is not None
    folder = expand_path(config.data_dir)
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise DataError(f"{folder}: {what}", "give the folder that holds the task's files with `--data-dir DIR`")
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


def find_file(folder: Path, pattern: str, suffixes: Sequence[str]) -> Path | None:
    """Return the only file in a folder whose name is `pattern` (a glob, in any case) and a suffix, compressed or not.

    Raises:
        DataError: More than one file fits.
    """
    wanted = [f"{pattern}{suffix}{end}".casefold() for suffix in suffixes for end in ("", ".gz")]
    named = (path for path in folder.iterdir() if any(fnmatchcase(path.name.casefold(), name) for name in wanted))
    found = sorted(path for path in named if path.is_file())
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise DataError(
            f"{folder}: {names} both fit",
            "keep one of them there, or name each file of the task, like `--set task.files.train=FILE`",
        )
    return found[0] if found else None


def counted(rows: Iterable[_Row], bar: Bar) -> Iterator[_Row]:
    """Yield rows and count them on a progress bar."""
    number = 0
    for number, row in enumerate(rows, start=1):
        yield row
        if number % _ROWS_BETWEEN_UPDATES == 0:
            bar.update(number)
    bar.update(number)
