"""The rows of the study; processes that work at once write them one after the other."""

import contextlib
import fcntl
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import torch

from rows import append_row, surroundings

NAME, FILLINGS = "worth", "worth_fillings"
WORK = Path("runs") / NAME
_ROWS = WORK / "rows"
"""Held by the process that writes rows."""


@contextlib.contextmanager
def locked(path: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold a file until no other process does, or say that one does; the system lets go of it when a process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def record(name: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Append rows to `results/NAME.csv`, with where they were made."""
    with locked(_ROWS):
        for row in rows:
            append_row(name, {**row, **_where()})


@cache
def _where() -> dict[str, str]:
    return surroundings(torch.device("cpu"))
