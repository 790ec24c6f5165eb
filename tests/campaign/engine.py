"""Runs cases in worker processes, each with a limit of time and memory, and keeps what came of them in a file."""

import errno
import json
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign.processes import forking, own_mounts
from tests.campaign.trial import Trial, resident_mib
from tests.servers import connecting_locally

_LOOK_EVERY_S = 0.2
ROOT = Path(__file__).parents[2]


class Area(NamedTuple):
    """A kind of case.

    Attributes:
        run: Makes and runs one case.
        cases: How many a whole campaign has.
        seconds: A case that takes longer is ended, and is a violation.
        mebibytes: So is one whose process grows by more.
        starts_processes: Its cases start processes of their own.
    """

    run: Callable[[Trial], None]
    cases: int
    seconds: float = 60
    mebibytes: int = 1024
    starts_processes: bool = False


class Job(NamedTuple):
    area: str
    number: int


def run_jobs(
    areas: dict[str, Area], jobs: Iterable[Job], campaign_seed: int, num_workers: int
) -> Iterator[dict[str, Any]]:
    """Yield a record of each case: area, number, faults, commands, seconds, and mebibytes that the process grew by."""
    waiting = iter(jobs)
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="exlm-campaign-") as root:
        Path(root).chmod(0o755)  # cases of a user without rights begin there
        try:
            workers = [_Worker(Path(root), campaign_seed) for _ in range(num_workers)]
            for worker in workers:
                worker.take(next(waiting, None))
            while busy := [worker for worker in workers if worker.job is not None]:
                ready = wait([worker.pipe for worker in busy], timeout=_LOOK_EVERY_S)
                for worker in busy:
                    record = worker.answer() if worker.pipe in ready else worker.look(areas)
                    if record is not None:
                        yield record
                        worker.take(next(waiting, None))
        finally:
            for worker in workers:
                worker.kill()


class _Worker:
    """A process that runs one case after the other; a new one where it died or was ended."""

    def __init__(self, root: Path, campaign_seed: int) -> None:
        self._root, self._seed = root, campaign_seed
        self.job: Job | None = None
        self._start()

    def _start(self) -> None:
        context = forking()
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._root, self._seed))
        self._process.start()
        theirs.close()
        self.pipe.recv()  # it is ready
        self._resting_mib = resident_mib(self._process.pid)

    def take(self, job: Job | None) -> None:
        self.job, self._since, self._commands = job, time.monotonic(), list[tuple[str, ...]]()
        if job is not None:
            self.pipe.send(job)

    def answer(self) -> dict[str, Any] | None:
        """Return what the process sent of its case, or that it died; None where it only began another command."""
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return self._again(f"the process ended with {self._process.exitcode}")
        if isinstance(said, tuple):
            self._commands.append(said)
            return None
        record: dict[str, Any] = said
        return record

    def look(self, areas: dict[str, Area]) -> dict[str, Any] | None:
        """End a case that takes too long or too much; None where it does not."""
        assert self.job is not None
        area = areas[self.job.area]
        if time.monotonic() - self._since > area.seconds:
            return self._again(f"no answer in {area.seconds:g} s")
        grown = resident_mib(self._process.pid) - self._resting_mib
        return self._again(f"grew by {grown:,.0f} MiB") if grown > 2 * area.mebibytes else None

    def _again(self, fault: str) -> dict[str, Any]:
        """Replace the process; return the record of the case that it had."""
        assert self.job is not None
        self.kill()
        record = _record(self.job, [fault], self._commands, time.monotonic() - self._since, 0.0)
        self._start()
        return record

    def kill(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, root: Path, campaign_seed: int) -> None:
    """Run the cases that come through the pipe."""
    from tests.campaign.areas import AREAS

    os.setsid()
    own_mounts()
    _stay_here()
    folder = root / f"worker-{os.getpid()}"
    pipe.send("ready")
    with suppress(EOFError):
        while job := pipe.recv():
            area = AREAS[job.area]
            folder.mkdir()
            os.chdir(folder)
            os.environ |= {"EXLM_CACHE_DIR": str(folder / "cache"), "HOME": str(folder)}
            trial = Trial(job.area, job.number, campaign_seed, folder, pipe.send)
            began, resting = time.monotonic(), _forget_peak()
            try:
                area.run(trial)
            except Exception:
                trial.faults.append(f"the campaign itself: {traceback.format_exc()[-600:]}")
            grown = resident_mib(name="VmHWM") - resting
            if grown > area.mebibytes:
                trial.faults.append(f"grew by {grown:,.0f} MiB, allowed are {area.mebibytes:,}")
            elapsed = time.monotonic() - began
            os.chdir(root)
            shutil.rmtree(folder)
            pipe.send(_record(job, trial.faults, trial.commands, elapsed, grown))


def _stay_here() -> None:
    """Use one thread and a terminal of 80 columns, and reach nothing outside this machine."""
    import torch

    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    # the list of fonts is made once a user, and without a compiler no case waits for kernels
    os.environ |= {"MPLCONFIGDIR": str(Path.home() / ".cache/matplotlib"), "PATH": "", "CXX": ""}
    # the server of the processes that a case starts finds its modules from any folder
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    unreachable = OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    # replaced for the whole process: mypy takes methods to be fixed
    socket.socket.connect = connecting_locally(unreachable)  # type: ignore[method-assign]


def _record(
    job: Job, faults: list[str], commands: list[tuple[str, ...]], seconds: float, mebibytes: float
) -> dict[str, Any]:
    shown = [" ".join(words)[:300] for words in commands]
    return {
        "area": job.area, "number": job.number, "faults": faults, "commands": shown,
        "seconds": round(seconds, 3), "mebibytes": round(mebibytes, 1),
    }  # fmt: skip


def _forget_peak() -> float:
    """Let the system forget the largest memory of this process so far; return what it has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_mib()


def load_records(path: Path) -> dict[Job, dict[str, Any]]:
    """Return the records of a file by case; a line that was cut off is left out."""
    records = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                records[Job(record["area"], record["number"])] = record
    return records
