"""Checks SMILES on all cores. RDKit holds the interpreter's lock, so each core gets a process of its own.

The processes are plain children that answer JSON lines (`python -m exlm_cli.data.smiles_check`): nothing is pickled, no
thread is forked, and a script that calls `prepare_data` needs no `__main__` guard.
"""

import json
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import Self, final

from exlm_cli.data.rows.records import Row
from exlm_cli.data.smiles import find_invalid_smiles
from exlm_cli.errors import DataError

_CHUNK_ROWS = 1024
_CHUNKS_BEFORE_HELP = 4
"""Starting processes costs as much as checking this many chunks."""
_MOST_PROCESSES = 32

Checked = list[tuple[Row, str | None]]


def check_smiles(rows: Iterable[Row], num_processes: int | None = None) -> Iterator[tuple[Row, str | None]]:
    """Yield each row, in order, with the reason why it is no usable SMILES, or None where it is one.

    Args:
        rows: A row that has a problem already keeps it.
        num_processes: None: one per core that this process may use.

    Raises:
        DataError: A checking process died.
    """
    source = iter(rows)
    num_processes = min(_MOST_PROCESSES, num_processes or _num_cores())
    num_alone = _CHUNKS_BEFORE_HELP * _CHUNK_ROWS if num_processes > 1 else None
    for row in islice(source, num_alone):
        yield row, row.problem or find_invalid_smiles(row.text)
    chunks = iter(lambda: list(islice(source, _CHUNK_ROWS)), [])
    first = next(chunks, None)
    if first is None:
        return
    with _Pool(num_processes) as pool:
        pending: deque[Future[Checked]] = deque([pool.submit(first)])
        for chunk in chunks:
            pending.append(pool.submit(chunk))
            if len(pending) == 2 * num_processes:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@final
class _Pool:
    """Child processes, and a thread for each that waits for its answers."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            for _ in range(self._num_processes):
                child = subprocess.Popen(
                    # -P: a queue.py in the current directory is not Python's
                    [sys.executable, "-P", "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    env=environment,
                )
                stack.callback(_stop, child)
                self._idle.put(child)
            self._threads = ThreadPoolExecutor(self._num_processes, thread_name_prefix="exlm-smiles")
            stack.callback(self._threads.shutdown, cancel_futures=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def submit(self, chunk: list[Row]) -> "Future[Checked]":
        return self._threads.submit(self._ask, chunk)

    def _ask(self, chunk: list[Row]) -> Checked:
        child = self._idle.get()
        try:
            answer = _answer(child, [row.text for row in chunk])
        finally:
            # a dead one too: whoever waits for a child must not wait for ever
            self._idle.put(child)
        if not answer:
            raise DataError(
                f"{chunk[0].source}: the process that checked rows {chunk[0].number} to {chunk[-1].number} with RDKit "
                f"died with code {child.wait()}",
                "one of these rows may be more than RDKit can take; remove it, or free some memory",
            )
        return [(row, row.problem or reason) for row, reason in zip(chunk, json.loads(answer), strict=True)]


def _answer(child: "subprocess.Popen[str]", texts: list[str]) -> str:
    """Return a child's answer, empty where it has died."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(json.dumps(texts) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return ""
    return child.stdout.readline()


def _stop(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.communicate()


def main() -> None:
    """Answer each line, a JSON list of SMILES, with a JSON list of reasons."""
    # Ctrl-C reaches the whole group; the parent ends its children itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        sys.stdout.write(json.dumps([find_invalid_smiles(smiles) for smiles in json.loads(line)]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
