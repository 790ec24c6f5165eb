"""Child processes that work on the cells of a sweep, one for each device or CPU thread.

Parent and child exchange JSON lines: a job `{"cell": ..., "folder": ...}` goes to stdin, and `done`, `error` or
`interrupted` comes back when the cell ends, through a pipe of its own: anything may print. The files of a cell show how
far it is (`experiments.board`). A child ends, in the middle of a cell if need be, when its input is closed: a parent
that is killed leaves no orphan that goes on writing.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO, final

import filelock

from exlm_cli.config.sweep import SweepCell
from exlm_cli.errors import CheckpointError, ExlmError, InterruptedRunError
from exlm_cli.progress import SilentProgress

Event = dict[str, Any]
"""How a cell ended: `event` is `done`, `error`, `interrupted` or `exit`, with what explains it."""

_LOCK_TIMEOUT_S = 60.0
"""How long the process that worked on the cell before may take to end."""


@final
class Workers:
    """Processes by number, their events in one queue.

    Args:
        environments: Variables of each process in addition to this one's, such as CUDA_VISIBLE_DEVICES.
        logs: Folder for what they print.
    """

    def __init__(self, environments: Sequence[Mapping[str, str]], logs: Path) -> None:
        self._environments, self._logs = environments, logs
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for number, environment in enumerate(self._environments):
                child, answers = self._start(number, environment)
                stack.callback(_stop, child)
                self._children.append(child)
                threading.Thread(target=self._listen, args=(number, child, answers), daemon=True).start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def submit(self, number: int, cell: SweepCell, folder: Path) -> None:
        """Send a cell to a process; if the process has died, the next event for it is `exit`."""
        child = self._children[number]
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps({"cell": cell.model_dump(mode="json"), "folder": str(folder)}) + "\n")
            child.stdin.flush()

    def next_event(self, timeout_s: float) -> tuple[int, Event] | None:
        """Return the number of a process and its next event; None if none comes within the timeout.

        Besides the events of a cell there is `exit`, with the exit code, when a process ends.
        """
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def interrupt(self) -> None:
        """Ask every process to save a checkpoint and leave its cell."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    def log(self, number: int) -> Path:
        """Return the file with what a process printed."""
        return self._logs / f"worker-{number}.log"

    def _start(self, number: int, environment: Mapping[str, str]) -> tuple["subprocess.Popen[str]", TextIO]:
        """Return a process, and the end of its pipe that is read."""
        own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(environment)
        read_end, write_end = os.pipe()
        with self.log(number).open("a", encoding="utf-8") as log, os.fdopen(write_end, "w"):
            child = subprocess.Popen(
                # -P: a queue.py in the current directory must not hide Python's
                [sys.executable, "-P", "-m", "exlm_cli.experiments.workers", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                text=True,
                encoding="utf-8",
                env=own,
                # the parent alone gets Ctrl-C and passes it on once
                start_new_session=True,
            )
        return child, os.fdopen(read_end, encoding="utf-8")

    def _listen(self, number: int, child: "subprocess.Popen[str]", answers: TextIO) -> None:
        with answers:
            for line in answers:
                if line.endswith("\n"):
                    self._events.put((number, json.loads(line)))
        self._events.put((number, {"event": "exit", "code": child.wait()}))


def _stop(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.wait()
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.close()


class _LogProgress(SilentProgress):
    """Progress whose messages go to a file."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def message(self, text: str) -> None:
        """Add a line."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _work_on(job: dict[str, Any]) -> Event:
    """Run one cell in this process and return how it ended."""
    from exlm_cli.experiments.cell import run_cell

    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _only_worker(folder):
            run_cell(SweepCell.model_validate(job["cell"]), folder, _LogProgress(folder / "log.txt"))
    except InterruptedRunError:
        return {"event": "interrupted"}
    except ExlmError as error:
        return {"event": "error", "message": error.message, "hint": error.hint}
    return {"event": "done"}


@contextmanager
def _only_worker(folder: Path) -> Iterator[None]:
    try:
        with filelock.FileLock(folder / ".lock", timeout=_LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout:
        raise CheckpointError(
            f"{folder}: another process works on this cell", "wait for it, or stop it, and resume"
        ) from None


def _work(pipe_number: int) -> None:
    """Work on jobs from stdin until it is closed; answer into the pipe with this file descriptor."""
    os.set_inheritable(pipe_number, False)  # the pipe ends with this process, not with one that it started
    pipe: TextIO = os.fdopen(pipe_number, "w", encoding="utf-8")
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    while True:
        pipe.write(json.dumps(_work_on(json.loads(jobs.get()))) + "\n")
        pipe.flush()


def _read_jobs(jobs: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    # the parent has closed the pipe or was killed; cells are safe against a stop at any point
    os._exit(0)


if __name__ == "__main__":
    _work(int(sys.argv[1]))
