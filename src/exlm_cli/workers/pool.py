"""Worker processes, one for each device or CPU thread, each of which does many jobs.

A worker is `python -m MODULE`, where the module calls `serve` with its table of functions. A job names one of them, a
folder and JSON values; it goes to the worker's stdin as one line, and how far the job is and how it ended comes back
through a pipe of its own: anything may print. A worker takes many jobs, so its imports are paid once. It ends, in the
middle of a job if need be, when its input is closed: a parent that is killed leaves no orphan that goes on writing.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO, final

import filelock
import loky

from exlm_cli.errors import CheckpointError, ExlmError, InterruptedRunError
from exlm_cli.progress import Bar, Progress

JobFunction = Callable[[Path, Mapping[str, Any], Progress], Any]
"""Does a job in its folder with its values, and returns a JSON value that goes back to the parent."""

Event = dict[str, Any]
"""What a worker tells: `event` is `share`, or `done`, `error` or `interrupted` when a job ends; `exit` when it ends."""

_EARLIER_TIMEOUT_S = 60.0
"""How long a worker whose parent was killed may take to end."""


@dataclass(frozen=True)
class Job:
    """A piece of work for one worker.

    Attributes:
        name: Unique, as messages name it.
        folder: Where it works.
        values: JSON values for the function.
        work: Measure of its length: the longest job is taken first, and the bar counts work.
        row, column: Its place in the table; jobs with the same place are shown side by side.
    """

    name: str
    folder: Path
    values: Mapping[str, Any]
    row: str
    column: str
    work: float = 1.0


def worker_environments(device: str, *, num_threads: int | None, workers: int | None) -> list[dict[str, str]]:
    """Return the environment variables of every worker: its CUDA device, or its number of CPU threads.

    With a fixed number of threads, one by default, no result depends on the number of workers.

    Args:
        device: Kind of device on which the jobs run, as in torch.
        num_threads: On a CPU, threads of a worker; None: one.
        workers: Number of workers; None: one for each CUDA device, or for each `num_threads` CPU cores.
    """
    if device == "cuda":
        import torch  # a worker may be without it

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return [{"CUDA_VISIBLE_DEVICES": names[number % len(names)]} for number in range(workers or len(names))]
    threads = num_threads or 1
    # the second one is for whatever counts cores, so that a worker starts no pool of its own on all of them
    variables = dict.fromkeys(("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"), str(threads))
    return [variables] * (workers or max(1, loky.cpu_count() // threads))


@final
class Pool:
    """Worker processes by number, their events in one queue.

    Args:
        module: Module that is run as a worker.
        environments: Variables of each worker in addition to this process's, such as CUDA_VISIBLE_DEVICES.
        logs: Folder for what they print.
    """

    def __init__(self, module: str, environments: Sequence[Mapping[str, str]], logs: Path) -> None:
        self._module, self._environments, self._logs = module, environments, logs
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        self._wait_for_earlier()
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

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._environments)

    def submit(self, number: int, function: str, job: Job) -> None:
        """Send a job to a worker; if the worker has died, the next event for it is `exit`."""
        child = self._children[number]
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(request_of(function, job) + "\n")
            child.stdin.flush()

    def next_event(self, timeout_s: float) -> tuple[int, Event] | None:
        """Return the number of a worker and its next event; None if none comes within the timeout.

        Besides the events of a job there is `exit`, with the exit code, when a worker ends.
        """
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def interrupt(self) -> None:
        """Ask every worker to save a checkpoint and leave its job."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)

    def log(self, number: int) -> Path:
        """Return the file with what a worker printed."""
        return self._logs / f"worker-{number}.log"

    def _wait_for_earlier(self) -> None:
        """Wait until no worker of a killed parent lives: it may still write into the folder of a job."""
        for lock in self._logs.glob("worker-*.lock"):
            try:
                filelock.FileLock(lock, timeout=_EARLIER_TIMEOUT_S).acquire().lock.release()
            except filelock.Timeout:
                raise CheckpointError(
                    f"{self._logs.parent}: a worker of an earlier start is still at work there",
                    "wait for it, or stop it, and resume",
                ) from None

    def _start(self, number: int, environment: Mapping[str, str]) -> tuple["subprocess.Popen[str]", TextIO]:
        """Return a worker, and the end of its pipe that is read."""
        own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | dict(environment)
        read_end, write_end = os.pipe()
        with self.log(number).open("a", encoding="utf-8") as log, os.fdopen(write_end, "w"):
            child = subprocess.Popen(
                # -P: a queue.py in the current directory must not hide Python's
                [sys.executable, "-P", "-m", self._module, str(write_end), self.log(number).with_suffix(".lock")],
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


def request_of(function: str, job: Job) -> str:
    """Return the line that gives a job to a worker."""
    return json.dumps({"function": function, "name": job.name, "folder": str(job.folder), "values": job.values})


def serve(functions: Mapping[str, JobFunction]) -> None:
    """Be a worker: do jobs from stdin until it is closed.

    The command line gives the descriptor of the pipe for answers, and the file that is locked while this process lives.
    """
    pipe_number, lock = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(pipe_number, False)  # the pipe ends with this process, not with one that it started
    pipe: TextIO = os.fdopen(pipe_number, "w", encoding="utf-8")
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    with filelock.FileLock(lock):
        while True:
            do_job(requests.get(), functions, lambda event: print(json.dumps(event), file=pipe, flush=True))


def do_job(request: str, functions: Mapping[str, JobFunction], tell: Callable[[Event], None]) -> None:
    """Do one job in this process; tell how far it is and at last how it ended."""
    job = json.loads(request)
    try:
        value = functions[job["function"]](Path(job["folder"]), job["values"], _JobProgress(job["name"], tell))
    except InterruptedRunError:
        tell({"event": "interrupted"})
    except ExlmError as error:
        tell({"event": "error", "kind": type(error).__name__, "message": error.message, "hint": error.hint})
    else:
        tell({"event": "done", "value": value})


@final
class _JobProgress(Progress):
    """Writes messages to the log of the worker, with the name of the job, and sends the share of the bars that is done.

    A bar inside another one is a part of one step of the outer one.
    """

    def __init__(self, name: str, tell: Callable[[Event], None]) -> None:
        self._name, self._tell = name, tell
        self._bars: list[_JobBar] = []
        self._percent = 0

    def message(self, text: str) -> None:
        """Add a line."""
        sys.stderr.write(f"{self._name}: {text}\n")

    @contextmanager
    def bar(self, label: str, total: int | None, *, done: int = 0) -> Iterator[Bar]:
        """Count a bar until the context ends."""
        del label
        self._bars.append(_JobBar(total, done, self._look))
        try:
            yield self._bars[-1]
        finally:
            self._bars.pop()

    def _look(self) -> None:
        share = 0.0
        for bar in reversed(self._bars):
            share = min(1.0, (bar.done + share) / bar.total) if bar.total else 0.0
        if int(100 * share) != self._percent:
            self._percent = int(100 * share)
            self._tell({"event": "share", "share": share})


@dataclass
class _JobBar(Bar):
    total: int | None
    done: int
    look: Callable[[], None]

    def update(self, done: int, **fields: str) -> None:
        """Set how far the work is."""
        del fields
        self.done = done
        self.look()


def _read_requests(requests: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
    # the parent has closed the pipe or was killed; a job is safe against a stop at any point
    os._exit(0)
