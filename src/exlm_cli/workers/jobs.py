"""Jobs for a pool of workers: the longest is done first, finished ones are kept, a table shows how far others are."""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exlm_cli.errors import (
    BackendError,
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    ExlmError,
    InterruptedRunError,
    TokenizerError,
)
from exlm_cli.format import format_percent
from exlm_cli.progress import Bar, Board, Progress
from exlm_cli.train.process import StopSignal
from exlm_cli.workers.pool import Event, Job, Pool

_ERRORS = {
    kind.__name__: kind
    for kind in (BackendError, CheckpointError, ConfigError, DataError, DivergedError, TokenizerError)
}
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class JobKind:
    """What the jobs of a list have in common.

    Attributes:
        worker: Module that is run as a worker.
        function: Key of their function in the worker's table.
        noun: What a job is called, like `cell`.
        title: Title of the table.
        describe: Returns the text of a finished job in the table, and its line; takes what the function returned.
    """

    worker: str
    function: str
    noun: str
    title: str
    describe: Callable[[Job, Any], tuple[str, str]]


def run_jobs(
    jobs: Sequence[Job],
    kind: JobKind,
    *,
    finished: Mapping[str, str],
    environments: Sequence[Mapping[str, str]],
    logs: Path,
    resume: str,
    progress: Progress,
) -> None:
    """Give jobs to workers until all are done.

    Args:
        jobs: At least one.
        kind: What they are.
        finished: Text in the table of each job that is done already, by its name.
        environments: As `worker_environments` returns them, one a worker.
        logs: Folder for what the workers print; the locks that show that they live are there too.
        resume: Command that continues the whole.
        progress: Shows a table, a bar, and a line for each finished job.

    Raises:
        InterruptedRunError: Stopped by a signal; jobs that ran have saved a checkpoint.
        ExlmError: The error of a job, or a worker died; the other jobs have saved a checkpoint.
    """
    waiting = deque(sorted((job for job in jobs if job.name not in finished), key=lambda job: job.work, reverse=True))
    if not waiting:
        return
    running: dict[int, Job] = {}
    failure: ExlmError | None = None
    is_stopping = False
    rows, columns = (list(dict.fromkeys(getattr(job, axis) for job in jobs)) for axis in ("row", "column"))
    begun_at = int(100 * sum(job.work for job in jobs if job.name in finished) / sum(job.work for job in jobs))

    def give(number: int) -> None:
        running[number] = waiting.popleft()
        pool.submit(number, kind.function, running[number])

    def stop_all() -> None:
        nonlocal is_stopping
        is_stopping = True
        pool.interrupt()

    with (
        progress.board(kind.title, rows, columns) as table,
        progress.bar(f"{kind.noun}s in %", 100, done=begun_at) as bar,
        Pool(kind.worker, environments[: len(waiting)], logs) as pool,
        StopSignal() as stop,
    ):
        board = JobBoard(jobs, finished, kind.noun, table, bar)
        for number in range(pool.size):
            give(number)
        while running:
            if stop.number is not None and not is_stopping:
                stop_all()
                progress.message(f"stopping: every {kind.noun} saves a checkpoint; press Ctrl-C again to stop at once")
            received = pool.next_event(_LOOK_EVERY_S)
            if received is None or received[0] not in running:
                continue
            number, event = received
            job = running[number]
            if event["event"] == "share":
                board.look(job, event["share"])
                continue
            del running[number]
            if event["event"] == "done":
                text, line = kind.describe(job, event["value"])
                board.finish(job, text)
                progress.message(f"{job.name}: {line} ({board.count})")
                if waiting and not is_stopping:
                    give(number)
            elif not is_stopping:
                failure = _error_of(event, f"{kind.noun} {job.name}", pool.log(number), resume)
                stop_all()
    if failure is not None:
        raise failure
    if stop.number is not None:
        raise InterruptedRunError(
            f"stopped with {board.count} done; those that ran have saved a checkpoint",
            f"continue with `{resume}`",
            stop.number,
        )


def _error_of(event: Event, job: str, log: Path, resume: str) -> ExlmError:
    """Return the error for a job that ended early without a request to stop."""
    if event["event"] == "error":
        # the hint of a job's own run names the command for that run
        hint = re.sub(r"`exlm (pretrain|finetune) --resume [^`]*`", lambda _: f"`{resume}`", event["hint"])
        return _ERRORS.get(event["kind"], ExlmError)(f"{job}: {event['message']}", hint)
    if event["event"] == "interrupted":
        return ExlmError(f"{job} was interrupted", f"continue with `{resume}`")
    return ExlmError(
        f"{job}: its process ended with code {event['code']}; its output is in {log}",
        f"-9 often means that memory ran out: run fewer at once, as with `workers=1`; continue with `{resume}`",
    )


class JobBoard:
    """Shows in a table and a bar how far running jobs are, and the results of finished ones."""

    def __init__(self, jobs: Sequence[Job], finished: Mapping[str, str], noun: str, table: Board, bar: Bar) -> None:
        self._jobs, self._finished, self._noun, self._table, self._bar = jobs, dict(finished), noun, table, bar
        self._shares: dict[str, float] = {}
        self._show()

    @property
    def count(self) -> str:
        """How many are done, in words."""
        return f"{len(self._finished)} of {len(self._jobs)} {self._noun}s"

    def look(self, job: Job, share: float) -> None:
        """Show how much of a running job is done."""
        self._shares[job.name] = share
        self._show()

    def finish(self, job: Job, text: str) -> None:
        """Show the result of a job."""
        self._finished[job.name] = text
        self._show()

    def _show(self) -> None:
        places: dict[tuple[str, str], list[str]] = {}
        for job in self._jobs:
            places.setdefault((job.row, job.column), []).append(job.name)
        for (row, column), names in places.items():
            is_done = all(name in self._finished for name in names)
            self._table.show(row, column, " ".join(map(self._text, names)), is_done=is_done)
        shares = self._shares | dict.fromkeys(self._finished, 1.0)
        done = sum(job.work * shares.get(job.name, 0.0) for job in self._jobs)
        self._bar.update(int(100 * done / sum(job.work for job in self._jobs)), rate=self.count)

    def _text(self, name: str) -> str:
        if name in self._finished:
            return self._finished[name]
        return format_percent(self._shares[name], 0) if name in self._shares else "·"
