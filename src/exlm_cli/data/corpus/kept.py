"""State of a tokenising that a later process goes on with: how far the rows had come, and what its files hold."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from exlm_cli.data.corpus.shards import Written
from exlm_cli.errors import CheckpointError
from exlm_cli.files import JsonModel, read_json, write_json


@dataclass
class Listed:
    """The rows that are skipped so far: how many, and what is wrong with the first."""

    num_rows: int = 0
    first: str = ""


@dataclass
class HeldOut:
    """How far the choice of validation rows has come.

    Attributes:
        smallest: The smallest hash that was drawn.
        filled_characters, filled_rows: Size of the block at hand so far.
        num_blocks: Its number.
        is_held_out: Whether it is for validation.
    """

    smallest: int | None = None
    filled_characters: int = 0
    filled_rows: int = 0
    num_blocks: int = 0
    is_held_out: bool = False


@dataclass
class Tally:
    """Counts of a pass over the rows, and the split of its last row."""

    num_unknown: int = 0
    num_left_out: int = 0
    num_too_long: int = 0
    last_split: str = ""


@dataclass(frozen=True)
class RowsRead:
    """Rows of a pass that are done.

    Attributes:
        num_rows: How many.
        ends: Number of rows up to the end of each source that is read to its end.
    """

    num_rows: int = 0
    ends: list[int] = field(default_factory=list)


class Kept(JsonModel):
    """Where a tokenising stands between two batches of rows; without arguments, where a pass over the rows begins.

    Attributes:
        forced: Hash that is held out as well.
        pending: By split, ids that fill no sequence yet; none before the first row.
        files: Sizes of all files in bytes, by their path in the folder.
    """

    rows: RowsRead = Field(default_factory=RowsRead)
    forced: int | None = None
    holdout: HeldOut | None = None
    tally: Tally = Field(default_factory=Tally)
    skipped: Listed = Field(default_factory=Listed)
    written: dict[str, Written] = Field(default_factory=dict)
    pending: dict[str, list[int] | None] = Field(default_factory=dict)
    files: dict[str, int] = Field(default_factory=dict)


def keep(folder: Path, kept: Kept) -> None:
    """Record where a tokenising stands; what its files hold is on disk.

    Raises:
        CheckpointError: The record cannot be written.
    """
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    write_json(_record(folder), kept.model_copy(update={"files": files}))


def take_up(folder: Path) -> Kept | None:
    """Cut the files of an interrupted tokenising to what was recorded, and return that.

    None where there is none, or the files hold less; then the folder is made anew.
    """
    try:
        kept = read_json(_record(folder), Kept)
        is_whole = all((folder / name).stat().st_size >= size for name, size in kept.files.items())
    except (CheckpointError, OSError):
        is_whole = False
    if not is_whole:
        discard(folder)
        folder.mkdir(parents=True)
        return None
    for name, size in kept.files.items():
        os.truncate(folder / name, size)
    return kept


def is_kept(folder: Path) -> bool:
    """Return whether there is something to go on with."""
    return _record(folder).is_file()


def forget(folder: Path) -> None:
    """Remove the record: the files are whole, or are written anew."""
    _record(folder).unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete the folder and the record."""
    forget(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _record(folder: Path) -> Path:
    """Return the path of the record: beside the folder, which becomes the cache entry as it is."""
    return folder.with_name(f"{folder.name}.json")
