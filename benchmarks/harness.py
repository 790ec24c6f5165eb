"""Measurement of time and memory, in turns where things are compared, and the CSV rows of results."""

import csv
import ctypes
import datetime
import multiprocessing
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles

import torch

RESULTS_DIR = Path(__file__).parent / "results"
_MALLOC_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_LARGE_BYTES = 1 << 16


@dataclass(frozen=True)
class Spread:
    """Median and the percentiles 20 and 80."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise two or more values."""
        p20, _, _, p80 = quantiles(values, n=5, method="inclusive")
        return cls(quantiles(values, n=2, method="inclusive")[0], p20, p80)

    @classmethod
    def of_ratio(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Spread":
        """Summarise the ratios within rounds: a machine that slows down between rounds leaves them alone."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])

    def columns_ms(self, digits: int) -> dict[str, float]:
        """Return the columns of times in milliseconds."""
        return {"median_ms": round(self.median, digits)} | {
            f"{name}_ms": round(getattr(self, name), digits) for name in ("p20", "p80")
        }


@dataclass(frozen=True)
class Times:
    """Milliseconds of each round: elapsed, and of the processor."""

    elapsed: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def measure_turns(
    calls: Mapping[str, Callable[[], object]], num_rounds: int, num_warmup: int, device: torch.device
) -> dict[str, Times]:
    """Measure one call of each thing in every round; every other round has the reverse order.

    Args:
        calls: What is compared, by name.
        num_rounds, num_warmup: Rounds measured, and rounds before those.
        device: A call ends when this device is done.
    """
    times = {name: Times() for name in calls}
    for index in range(num_warmup + num_rounds):
        for name in list(calls)[:: -1 if index % 2 else 1]:
            processor_s, elapsed_s = time.process_time(), time.perf_counter()
            calls[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if index >= num_warmup:
                times[name].processor.append(1000 * (time.process_time() - processor_s))
                times[name].elapsed.append(1000 * (time.perf_counter() - elapsed_s))
    return times


class Stopwatch:
    """Timer that marks points of a call: wall clock on a CPU, events on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments_s: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark the current moment."""
        if self._device.type != "cuda":
            self._moments_s.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def laps_ms(self) -> list[float]:
        """Return the milliseconds between consecutive marks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [a.elapsed_time(b) for a, b in pairwise(self._events)]
        return [1000 * (b - a) for a, b in pairwise(self._moments_s)]


def peak_mib(prepare: Callable[[], Callable[[], object]], device: torch.device) -> float:
    """Return the peak memory of one call in MiB, results included, above the memory in use before it.

    Args:
        prepare: Makes inputs, warms up and returns the call to measure. It must be importable, because on a CPU it runs
            in a fresh process with a peak of its own.
        device: Device of the call.
    """
    if device.type == "cuda":
        call = prepare()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_resident_peak_mib, (prepare, torch.get_num_threads()))


def _resident_peak_mib(prepare: Callable[[], Callable[[], object]], num_threads: int) -> float:
    torch.set_num_threads(num_threads)
    # large blocks return to the system at once, so that the peak counts live memory only
    ctypes.CDLL(None).mallopt(_MALLOC_MMAP_THRESHOLD, _LARGE_BYTES)
    call = prepare()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status_kib("VmRSS")
    result = call()
    peak = _status_kib("VmHWM")
    del result
    return (peak - before) / 2**10


def _status_kib(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match, name
    return int(match[1])


def surroundings(device: torch.device) -> dict[str, str]:
    """Return machine, versions, commit and date for a row; a copy without git names its commit in `EXLM_COMMIT`."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": os.environ.get("EXLM_COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
    }


def _commit() -> str:
    git = ["git", "-C", str(RESULTS_DIR.parents[1])]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    measured = ["src", "cuda_ext", "benchmarks/*.py"]
    is_changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *measured], check=False).returncode
    return commit.strip() + ("+changes" if is_changed else "")


def _processor() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.processor()


def append_row(name: str, row: Mapping[str, object], folder: Path | None = None) -> None:
    """Append to `<name>.csv`; the first row writes the header, and later rows must have the same columns.

    Args:
        folder: Where the file is; None: `results/`.
    """
    path = (folder or RESULTS_DIR) / f"{name}.csv"
    is_new = not path.exists()
    if not is_new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != list(row):
            raise ValueError(f"{path} has the columns {header}, the row {list(row)}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)
