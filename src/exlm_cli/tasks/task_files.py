"""Where the files of a task with an official layout are: as the recipe names them, in a folder, or on the Hub."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from exlm_cli.config.spelling import how_to_set
from exlm_cli.config.tasks import TaskSection
from exlm_cli.data.masking import IntArray
from exlm_cli.data.rows.hub import HubSource
from exlm_cli.data.rows.records import COMPRESSIONS
from exlm_cli.errors import DataError
from exlm_cli.files import expand_path
from exlm_cli.progress import Bar

HUB_PREFIX = "hub:"
LOCAL_HINT = (
    f"to read local files instead, give their folder with {how_to_set('task.data_dir', 'DIR', '--data-dir DIR')}"
)

_ROWS_BETWEEN_UPDATES = 1024
_Row = TypeVar("_Row")


def given_file(config: TaskSection, given: str) -> Path:
    """Return the path of one of `task.files`; a relative one starts in `task.data_dir`, where that is given.

    Raises:
        DataError: One of them begins with `~` and there is no such home folder.
    """
    path = expand_path(given)
    return path if config.data_dir is None else expand_path(config.data_dir) / path


def hub_source(config: TaskSection, default: str, name: str | None, split: str) -> HubSource | None:
    """Return the Hub split to read where `task.data_dir` is none (then it is of `default`) or `hub:OWNER/NAME`.

    Raises:
        DataError: What stands behind `hub:` is no name.
    """
    given = f"{HUB_PREFIX}{default}" if config.data_dir is None else config.data_dir
    if not given.startswith(HUB_PREFIX):
        return None
    parsed = HubSource.parse(given.removeprefix(HUB_PREFIX))
    return HubSource(parsed.name, parsed.config or name, split)


def existing_folder(config: TaskSection, names: Sequence[str]) -> Path:
    """Return the folder of a task inside `task.data_dir`: the first of `names` that is there, or `data_dir` itself.

    Raises:
        DataError: `data_dir` is no folder.
    """
    assert config.data_dir is not None
    folder = expand_path(config.data_dir)
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "no such folder"
        raise DataError(
            f"{folder}: {what}",
            f"{how_to_set('task.data_dir', 'DIR', '--data-dir DIR')} names the folder that holds the task's files",
        )
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
            f"{folder}: both {names} could be meant", f"name one with {how_to_set('task.files.train', 'FILE')}"
        )
    return found[0] if found else None


def counted(rows: Iterable[_Row], bar: Bar) -> Iterator[_Row]:
    """Yield rows, and count them on a bar."""
    for number, row in enumerate(rows, start=1):
        yield row
        if number % _ROWS_BETWEEN_UPDATES == 0:
            bar.update(number)


def choose_rows(num_rows: int, config: TaskSection) -> IntArray:
    """Return the training rows to use, in order: all, or `task.max_rows` of them drawn with `task.split_seed`."""
    if config.max_rows is None or config.max_rows >= num_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(config.split_seed).choice(num_rows, config.max_rows, replace=False))
