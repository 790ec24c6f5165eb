"""Files of a task: those that the recipe names, those in a folder with the official layout, or the Hub's."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from exlm_cli.config.tasks import TaskSection
from exlm_cli.data.rows.hub import HubSource
from exlm_cli.data.rows.records import COMPRESSIONS
from exlm_cli.errors import DataError
from exlm_cli.paths import expand_path
from exlm_cli.progress import Bar

HUB_PREFIX = "hub:"
LOCAL_HINT = "to read local files instead, give their folder with `task.data_dir=DIR`"

_ROWS_BETWEEN_UPDATES = 1024
_Row = TypeVar("_Row")


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
        raise DataError(f"{folder}: {what}", "give the folder that holds the task's files with `task.data_dir=DIR`")
    return next((folder / name for name in names if (folder / name).is_dir()), folder)


def find_file(folder: Path, pattern: str, suffixes: Sequence[str]) -> Path | None:
    """Return the only file in a folder whose name is `pattern` (a glob) and a suffix, compressed or not.

    Raises:
        DataError: More than one file fits.
    """
    endings = [suffix + compression for suffix in suffixes for compression in ("", *COMPRESSIONS)]
    found = sorted({path for ending in endings for path in folder.glob(pattern + ending) if path.is_file()})
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise DataError(
            f"{folder}: {names} both fit",
            "keep one of them there, or name each file of the task, like `task.files.train=FILE`",
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
