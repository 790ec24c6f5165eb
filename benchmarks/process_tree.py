"""A program in processes of its own, watched from outside: its steps, time, memory and what it prints."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

POLL_S = 0.02
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Moment:
    """A moment at which a program had written that a step was done.

    Attributes:
        step: The step, counted from 1.
        cpu_s: Processor time of all its processes so far.
        elapsed_s: Elapsed time so far.
    """

    step: int
    cpu_s: float
    elapsed_s: float


@dataclass
class Watched:
    """What was seen of a program that has ended.

    Attributes:
        moments: One for each step, in order; where two steps ended between two looks, one for the later.
        peak_mib: Peak memory of all its processes together.
        output: What it printed to both outputs.
        code: Exit code; negative: the signal that ended it.
    """

    moments: list[Moment] = field(default_factory=list)
    peak_mib: float = 0.0
    output: str = ""
    code: int = 0


@dataclass(frozen=True)
class StepLog:
    """A file to which a program adds something after each step.

    Attributes:
        path: The file, which need not exist yet.
        mark: Bytes that each step adds once.
    """

    path: Path
    mark: bytes

    def size(self) -> int:
        """Return the bytes of the file; 0 where there is none."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return 0

    def steps(self) -> int:
        """Return the steps that were written down."""
        with contextlib.suppress(OSError):
            return self.path.read_bytes().count(self.mark)
        return 0


def watch(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    step_log: StepLog,
    interrupt: tuple[int, signal.Signals] | None = None,
    timeout_s: float = 900.0,
) -> Watched:
    """Run a program to its end in a session of its own.

    Args:
        command: Its arguments.
        environment: Added to that of this process.
        output: File that gets both of its outputs.
        step_log: Where it writes down its steps.
        interrupt: A step and the signal that all processes get after it, as a terminal sends Ctrl-C.
        timeout_s: After this time it is killed.
    """
    watched, start_s, size = Watched(), time.perf_counter(), 0
    with output.open("w") as file:
        # a script's job in the background ignores SIGINT, and its children would too
        process = subprocess.Popen(
            ["env", "--default-signal=INT", *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        while process.poll() is None:
            elapsed_s = time.perf_counter() - start_s
            if (size_now := step_log.size()) != size:
                size, step = size_now, step_log.steps()
                if step > (watched.moments[-1].step if watched.moments else 0):
                    watched.moments.append(Moment(step, cpu_s(process.pid), elapsed_s))
            watched.peak_mib = max(watched.peak_mib, memory_mib(process.pid))
            if interrupt and watched.moments and watched.moments[-1].step >= interrupt[0]:
                os.killpg(process.pid, interrupt[1])  # its memory at this step has been seen
                interrupt = None
            if elapsed_s > timeout_s:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(POLL_S)
    watched.code = process.returncode
    watched.output = output.read_text(errors="replace")
    return watched


def processes(root: int) -> list[int]:
    """Return the ids of a process and its descendants that exist."""
    found, unread = [], [root]
    while unread:
        found.append(unread.pop())
        for children in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                unread += map(int, children.read_text().split())
    return found


def cpu_s(root: int) -> float:
    """Return the processor time of a process, its descendants and those of them that have ended."""
    ticks = 0
    for process in processes(root):
        with contextlib.suppress(OSError):
            # user and system time, its own and those of children it has waited for: fields 14 to 17 of proc(5)
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S


def memory_mib(root: int) -> float:
    """Return the memory of a process and its descendants in MiB.

    Anonymous pages that several share count once (PSS). Pages of files, such as torch's libraries, are those of the
    process that has most: what other programs of the machine map as well must not make it less.
    """
    anonymous_kib, file_kib = 0, 0
    found = processes(root)
    for process in found:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            file_kib = max(file_kib, kib_of(status, "RssFile"))
            if len(found) == 1:  # counters of the kernel; the other file takes milliseconds
                anonymous_kib += kib_of(status, "RssAnon") + kib_of(status, "RssShmem")
            else:
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
                anonymous_kib += kib_of(rollup, "Pss_Anon") + kib_of(rollup, "Pss_Shmem")
    return (anonymous_kib + file_kib) / 2**10


def kib_of(text: str, name: str) -> int:
    """Return a field of `smaps_rollup` or `status`; 0 where it is missing, as in a process that has just ended."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def rates(moments: Sequence[Moment], tokens: int, first: int) -> tuple[list[float], list[float]]:
    """Return tokens per second of the processor, and elapsed, of each step after `first`."""
    steady = [moment for moment in moments if moment.step >= first]
    by_cpu = [tokens * (b.step - a.step) / max(b.cpu_s - a.cpu_s, 1 / _TICKS_PER_S) for a, b in pairwise(steady)]
    elapsed = [tokens * (b.step - a.step) / (b.elapsed_s - a.elapsed_s) for a, b in pairwise(steady)]
    return by_cpu, elapsed
