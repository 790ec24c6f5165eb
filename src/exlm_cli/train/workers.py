"""Jobs for worker processes, one for each device or CPU thread: the longest is done first, finished ones are kept."""

import os
import re
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import loky

from exlm_cli.errors import CheckpointError, ExlmError, InterruptedRunError
from exlm_cli.processes import start_processes
from exlm_cli.progress import Progress
from exlm_cli.train.process import StopSignal

_LOOK_EVERY_S = 0.5
_EARLIER_TIMEOUT_S = 60.0
"""How long a worker whose parent was killed may take to end."""


@dataclass(frozen=True)
class Job:
    """A piece of work for one worker.

    Attributes:
        name: Unique, as messages name it.
        arguments: What the function gets before the progress; must be picklable.
        work: Measure of its length: the longest job is taken first, and the bar counts work.
    """

    name: str
    arguments: tuple[Any, ...]
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
        import torch  # costs seconds

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return [{"CUDA_VISIBLE_DEVICES": names[number % len(names)]} for number in range(workers or len(names))]
    threads = num_threads or 1
    # the second one is for whatever counts cores, so that a worker starts no pool of its own on all of them
    variables = dict.fromkeys(("OMP_NUM_THREADS", "LOKY_MAX_CPU_COUNT"), str(threads))
    return [variables] * (workers or max(1, loky.cpu_count() // threads))


def run_jobs(
    function: Callable[..., Any],
    jobs: Sequence[Job],
    *,
    noun: str,
    finished: Collection[str],
    describe: Callable[[Job, Any], str],
    environments: Sequence[Mapping[str, str]],
    logs: Path,
    resume: str,
    progress: Progress,
) -> None:
    """Give jobs to workers until all are done.

    Args:
        function: Does a job, given its arguments and a progress; must be picklable. Each worker gets it once.
        jobs: At least one.
        noun: What a job is called, like `cell`.
        finished: Names of jobs that are done already.
        describe: Returns the line on a job that is done; takes what the function returned.
        environments: As `worker_environments` returns them, one a worker.
        logs: Folder for what the workers print; the locks that show that they work are there too.
        resume: Command that continues the whole.
        progress: Shows a bar, and a line for each finished job.

    Raises:
        InterruptedRunError: Stopped by a signal; jobs that ran have saved a checkpoint.
        ExlmError: The error of a job, or a worker died; the other jobs have saved a checkpoint.
    """
    work = _Work(jobs, noun, finished)
    if not work.waiting:
        return
    failure: ExlmError | None = None
    with (
        progress.bar(f"{noun}s in %", 100, done=work.percent) as bar,
        _start_workers(function, environments[: len(work.waiting)], logs) as workers,
        StopSignal() as stop,
    ):
        for worker in workers:
            work.give(worker)
        while work.running:
            ended = wait(work.running, _LOOK_EVERY_S, FIRST_COMPLETED).done
            if stop.number is not None and not work.is_stopping:
                work.stop()
                progress.message(f"stopping: every {noun} saves a checkpoint; press Ctrl-C again to stop at once")
            for future in ended:
                worker, job = work.running.pop(future)
                error = future.exception()
                if error is None:
                    work.done.add(job.name)
                    progress.message(f"{job.name}: {describe(job, future.result())} ({work})")
                    bar.update(work.percent, rate=str(work))
                    if work.waiting and not work.is_stopping and stop.number is None:
                        work.give(worker)
                elif not work.is_stopping:
                    failure = _error_of(error, f"{noun} {job.name}", worker.log, resume)
                    failure.__cause__ = error
                    work.stop()
    if failure is not None:
        raise failure
    if stop.number is not None:
        raise InterruptedRunError(
            f"stopped with {work} done; those that ran have saved a checkpoint",
            f"continue with `{resume}`",
            stop.number,
        )


class _Work:
    """Jobs that wait, the longest first, those that run, and names of those that are done."""

    def __init__(self, jobs: Sequence[Job], noun: str, finished: Collection[str]) -> None:
        self._jobs, self._noun, self.done = jobs, noun, {*finished}
        left = (job for job in jobs if job.name not in self.done)
        self.waiting = deque(sorted(left, key=lambda job: job.work, reverse=True))
        self.running: dict[Future[Any], tuple[_Worker, Job]] = {}
        self.is_stopping = False

    def __str__(self) -> str:
        """Say how many are done."""
        return f"{len(self.done)} of {len(self._jobs)} {self._noun}s"

    @property
    def percent(self) -> int:
        """Share of the work that is done."""
        done = sum(job.work for job in self._jobs if job.name in self.done)
        return int(100 * done / sum(job.work for job in self._jobs))

    def give(self, worker: "_Worker") -> None:
        """Let a worker do the next job."""
        job = self.waiting.popleft()
        self.running[worker.executor.submit(_do, job, worker.lock)] = worker, job

    def stop(self) -> None:
        """Ask all workers to save a checkpoint."""
        self.is_stopping = True
        for worker, _ in self.running.values():
            worker.interrupt()


def _error_of(error: BaseException, job: str, log: Path, resume: str) -> ExlmError:
    """Return the error for a job that ended early without a request to stop."""
    if isinstance(error, InterruptedRunError):
        return ExlmError(f"{job} was interrupted", f"continue with `{resume}`")
    if isinstance(error, ExlmError):
        # the hint of a job's own run names the command for that run
        hint = re.sub(r"`exlm (pretrain|finetune) --resume [^`]*`", lambda _: f"`{resume}`", error.hint)
        return type(error)(f"{job}: {error.message}", hint)
    if isinstance(error, BrokenProcessPool):
        return ExlmError(
            f"{job}: its process died; its output is in {log}",
            "where that says nothing, memory may have run out: run fewer at once, as with `--workers 1`; continue with "
            f"`{resume}`",
        )
    with log.open("a") as file:
        traceback.print_exception(error, file=file)
    return ExlmError(
        f"{job}: {type(error).__name__}: {error}; its output is in {log}", f"when mended, continue with `{resume}`"
    )


@dataclass(frozen=True)
class _Worker:
    """A process, whose id is known once it has the function."""

    executor: Any
    pid: "Future[int]"
    log: Path

    @property
    def lock(self) -> Path:
        return self.log.with_suffix(".lock")

    def interrupt(self) -> None:
        """Ask it to save a checkpoint and leave its job."""
        with suppress(BrokenProcessPool, ProcessLookupError):
            os.kill(self.pid.result(), signal.SIGTERM)


def await_earlier_workers(logs: Path) -> None:
    """Wait until the workers of a killed parent have ended: one may still write into the folder of a job.

    Args:
        logs: As of `run_jobs`; there is none before the first start.

    Raises:
        CheckpointError: One is at work for longer than a worker takes to end.
    """
    for lock in logs.glob("worker-*.lock"):
        try:
            filelock.FileLock(lock, timeout=_EARLIER_TIMEOUT_S).acquire().lock.release()
        except filelock.Timeout:
            raise CheckpointError(
                f"{logs.parent}: a worker of an earlier start is still at work there",
                "wait for it, or stop it, and resume",
            ) from None


@contextmanager
def _start_workers(
    function: Callable[..., Any], environments: Sequence[Mapping[str, str]], logs: Path
) -> Iterator[list[_Worker]]:
    """Start workers, each of which a device may be for, as executors of one process."""
    logs.mkdir(parents=True, exist_ok=True)
    await_earlier_workers(logs)
    with ExitStack() as stack:
        workers = []
        for number, environment in enumerate(environments):
            log = logs / f"worker-{number}.log"
            begin = partial(_write_to, log)
            executor = stack.enter_context(start_processes(1, environment=environment, begin=begin))
            workers.append(_Worker(executor, executor.submit(_take, function), log))
        yield workers


_taken: list[Callable[..., Any]] = []
"""What does the jobs of this process, which is a worker."""


def _write_to(log: Path) -> None:
    """Let what this process prints go to a file."""
    with log.open("a") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)


def _take(function: Callable[..., Any]) -> int:
    _taken[:] = [function]
    return os.getpid()


def _do(job: Job, lock: Path) -> Any:
    with filelock.FileLock(lock):
        return _taken[0](*job.arguments, _LogProgress(job.name))


@dataclass(frozen=True)
class _LogProgress(Progress):
    """Writes messages to the log of the worker, with the name of the job."""

    job: str

    def message(self, text: str) -> None:
        """Add a line."""
        sys.stderr.write(f"{self.job}: {text}\n")
