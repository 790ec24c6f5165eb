"""Runs each case in a process of its own with a limit of time and memory, and returns what came of it."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from exlm_cli.files import write_atomically
from tests.campaign.processes import forking, own_mounts
from tests.campaign.trial import Trial, resident_mib
from tests.servers import connecting_locally

ROOT = Path(__file__).parents[2]
MOST_MEBIBYTES = 1024
"""A case whose process grows by more is a violation."""


class Area(NamedTuple):
    """A kind of case.

    Attributes:
        run: Makes and runs one case.
        cases: How many a whole campaign has.
        seconds: A case that takes longer is ended, and is a violation.
        starts_processes: Its cases start processes of their own.
    """

    run: Callable[[Trial], None]
    cases: int
    seconds: float = 60
    starts_processes: bool = False


class Job(NamedTuple):
    area: str
    number: int


def run_jobs(
    areas: dict[str, Area], jobs: Iterable[Job], campaign_seed: int, num_workers: int
) -> Iterator[dict[str, Any]]:
    """Yield a record of each case: area, number, faults; commands, seconds, and mebibytes that the process grew by."""
    with tempfile.TemporaryDirectory(prefix="exlm-campaign-") as root, ThreadPoolExecutor(num_workers) as pool:
        yield from pool.map(partial(_run, areas, Path(root), campaign_seed), jobs)


def _run(areas: dict[str, Area], root: Path, campaign_seed: int, job: Job) -> dict[str, Any]:
    """Run a case, and end its process and all that it started."""
    area, folder = areas[job.area], root / f"case-{time.monotonic_ns()}"
    process = forking().Process(target=_work, args=(folder, campaign_seed, job))
    process.start()
    process.join(area.seconds)
    result = folder.with_suffix(".json")
    ended = f"no end in {area.seconds:g} s" if process.exitcode is None else f"ended with {process.exitcode}"
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()
    record: dict[str, Any] = {"area": job.area, "number": job.number, "faults": [f"the process: {ended}"]}
    return record | (json.loads(result.read_bytes()) if result.exists() else {})


def _work(folder: Path, campaign_seed: int, job: Job) -> None:
    """Run a case, and write what came of it beside its folder."""
    from tests.campaign.areas import AREAS

    os.setsid()
    own_mounts()
    _stay_here()
    area = AREAS[job.area]
    folder.mkdir()
    os.chdir(folder)
    os.environ |= {"EXLM_CACHE_DIR": str(folder / "cache"), "HOME": str(folder)}
    trial = Trial(job.area, job.number, campaign_seed, folder)
    began, resting = time.monotonic(), _forget_peak()
    try:
        area.run(trial)
    except Exception:  # a fault of one case is reported, and the others go on
        trial.faults.append(f"the campaign itself: {traceback.format_exc()[-600:]}")
    grown = resident_mib(name="VmHWM") - resting
    if grown > MOST_MEBIBYTES:
        trial.faults.append(f"grew by {grown:,.0f} MiB, allowed are {MOST_MEBIBYTES:,}")
    result = {
        "faults": trial.faults, "commands": [" ".join(words)[:300] for words in trial.commands],
        "seconds": round(time.monotonic() - began, 3), "mebibytes": round(grown, 1),
    }  # fmt: skip
    os.chdir(folder.parent)
    shutil.rmtree(folder)
    write_atomically(folder.with_suffix(".json"), json.dumps(result).encode())


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


def _forget_peak() -> float:
    """Let the system forget the largest memory of this process so far; return what it has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident_mib()
