"""Processes of loky: they run nothing of the current directory, and end with the process that started them."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import loky


def _kill(process: Any, use_psutil: bool = True) -> None:
    """Kill a loky worker."""
    del use_psutil
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.join()


# children of ours end by themselves; loky looks for some with psutil or `pgrep`, and hangs on images without either
loky.process_executor.kill_process_tree = _kill
# loky restarts a process that grows by 300 MB, which may be the weights of a model
loky.process_executor._MAX_MEMORY_LEAK_SIZE = math.inf


@contextmanager
def start_processes(
    number: int, *, environment: Mapping[str, str] | None = None, begin: Callable[[], None] | None = None
) -> Iterator[Any]:
    """Start processes, and kill them when the context ends.

    Each leads a session of its own, so that Ctrl-C in a terminal reaches the starting process alone.

    Args:
        number: How many.
        environment: Variables that they have in addition.
        begin: What each does first; must be picklable.

    Returns:
        A `loky.ProcessPoolExecutor`.
    """
    with _safe_path():
        executor = loky.ProcessPoolExecutor(
            number, initializer=_start, initargs=(os.getpid(), begin), env=dict(environment or {})
        )
        # processes start with the first task, from this thread
        executor.submit(os.getpid)
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, kill_workers=True)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the current directory off the path of processes started here: a queue.py there would hide Python's."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _start(parent: int, begin: Callable[[], None] | None) -> None:
    os.setsid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if begin is not None:
        begin()


def _end_with(parent: int) -> None:
    """End this process, in the middle of its work, when its parent is killed: no orphan goes on writing."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
