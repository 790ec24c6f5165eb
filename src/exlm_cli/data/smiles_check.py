"""Check of SMILES rows on all cores, in order; RDKit holds the interpreter's lock, so every core gets a process."""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice

import loky

from exlm_cli.data.rows.records import Row
from exlm_cli.data.smiles import find_invalid_smiles
from exlm_cli.errors import DataError

_CHUNK_ROWS = 1024
_CHUNKS_BEFORE_HELP = 4
"""Starting processes costs as much as checking this many chunks."""
_MAX_PROCESSES = 32


def check_smiles(rows: Iterable[Row], num_processes: int | None = None) -> Iterator[tuple[Row, str | None]]:
    """Yield each row, in order, with the reason why it is not a usable SMILES, or None if it is one.

    Args:
        rows: A row that already has a problem keeps it.
        num_processes: None: one per core that this process may use.

    Raises:
        DataError: A checking process died.
    """
    source = iter(rows)
    num_processes = min(_MAX_PROCESSES, num_processes or loky.cpu_count())
    num_alone = _CHUNKS_BEFORE_HELP * _CHUNK_ROWS if num_processes > 1 else None
    for row in islice(source, num_alone):
        yield row, row.problem or find_invalid_smiles(row.text)
    chunks = iter(lambda: list(islice(source, _CHUNK_ROWS)), [])
    first = next(chunks, None)
    if first is not None:
        yield from _check_in_processes(first, chunks, num_processes)


def _check_in_processes(
    first: list[Row], chunks: Iterator[list[Row]], num_processes: int
) -> Iterator[tuple[Row, str | None]]:
    with _safe_path():
        executor = loky.ProcessPoolExecutor(num_processes, initializer=_start_worker, initargs=(os.getpid(),))
        pending = deque([(first, executor.submit(_find_reasons, [row.text for row in first]))])
    try:
        for chunk in chunks:
            pending.append((chunk, executor.submit(_find_reasons, [row.text for row in chunk])))
            if len(pending) == 2 * num_processes:
                yield from _answers(*pending.popleft())
        while pending:
            yield from _answers(*pending.popleft())
    except BrokenProcessPool as error:
        raise DataError(
            f"{first[0].source}: a process that checked rows with RDKit died",
            "a row may be more than RDKit can take; remove it, or free some memory",
        ) from error
    finally:
        executor.shutdown(wait=True, kill_workers=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the current directory off the path of Python processes started here: its queue.py is not Python's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C, which reaches the whole group, to the parent, and end when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _find_reasons(texts: Sequence[str]) -> list[str | None]:
    return [find_invalid_smiles(text) for text in texts]


def _answers(chunk: list[Row], reasons: "Future[list[str | None]]") -> Iterator[tuple[Row, str | None]]:
    for row, reason in zip(chunk, reasons.result(), strict=True):
        yield row, row.problem or reason
