"""The child process that works on cells, one after another: `python -m exlm_cli.experiments.cell_worker`.

Reads a JSON line `{"plan": ..., "folder": ...}` for each cell and answers with JSON lines: `bar` and `message` while it
works, then one of `done`, `error` and `interrupted`. It ends, in the middle of a cell if need be, when its input is
closed: a parent that is killed leaves no orphan behind that would go on writing.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import filelock

from exlm_cli.config.cells import CellPlan
from exlm_cli.errors import CheckpointError, ExlmError, InterruptedRunError
from exlm_cli.progress import Bar, SilentProgress

_SECONDS_BETWEEN_BARS = 0.2
_LOCK_TIMEOUT_S = 60.0
"""How long the process that worked on the cell before may take to be gone."""


class PipeProgress(SilentProgress):
    """Progress as JSON lines; messages go to the cell's log too."""

    def __init__(self, pipe: TextIO, log: Path) -> None:
        self._pipe, self._log = pipe, log
        self._sent_s = 0.0

    def message(self, text: str) -> None:
        """Send a line and keep it."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        self.send({"event": "message", "text": text})

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Send where a piece of work stands, a few times a second."""
        bar = _PipeBar(self, label, total)
        bar.send(done)
        yield bar

    def send(self, event: dict[str, Any]) -> None:
        """Write one event."""
        self._pipe.write(json.dumps(event) + "\n")
        self._pipe.flush()

    def is_due(self) -> bool:
        """Say whether another bar may be sent, and count it as sent."""
        now_s = time.monotonic()
        if now_s - self._sent_s < _SECONDS_BETWEEN_BARS:
            return False
        self._sent_s = now_s
        return True


class _PipeBar:
    def __init__(self, progress: PipeProgress, label: str, total: int | None) -> None:
        self._progress, self._label, self._total = progress, label, total

    def update(self, done: int, **fields: str) -> None:
        """Send how far it is, if it is time."""
        del fields
        if self._progress.is_due():
            self.send(done)

    def send(self, done: int) -> None:
        """Send how far it is."""
        self._progress.send({"event": "bar", "label": self._label, "done": done, "total": self._total})


def work_on(job: dict[str, Any], pipe: TextIO) -> None:
    """Do one cell and answer how it ended."""
    from exlm_cli.experiments.cell import run_cell

    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    progress = PipeProgress(pipe, folder / "log.txt")
    try:
        with _sole_worker(folder):
            result = run_cell(CellPlan.model_validate(job["plan"]), folder, progress)
        progress.send({"event": "done", "result": result})
    except InterruptedRunError:
        progress.send({"event": "interrupted"})
    except ExlmError as error:
        progress.send({"event": "error", "message": error.message, "hint": error.hint})


@contextmanager
def _sole_worker(folder: Path) -> Iterator[None]:
    try:
        with filelock.FileLock(folder / ".lock", timeout=_LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout:
        raise CheckpointError(
            f"{folder}: another process works on this cell", "wait for it, or stop it, and resume"
        ) from None


def main() -> None:
    """Work until there are no more jobs."""
    # answers go to the pipe alone: whatever a library prints goes where errors go
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    while True:
        work_on(json.loads(jobs.get()), pipe)


def _read_jobs(jobs: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    # the parent has closed the pipe or is gone; cells are safe against a stop at any point
    os._exit(0)


if __name__ == "__main__":
    main()
