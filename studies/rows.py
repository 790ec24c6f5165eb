"""The rows of studies: `results/NAME.csv`, where they were made, and means with their intervals."""

import csv
import datetime
import math
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from scipy import stats

import exlm_cli

RESULTS_DIR = Path(__file__).parent / "results"


def surroundings(device: torch.device) -> dict[str, str]:
    """Return machine, versions, date and the commit of the package that is imported, for a row."""
    package = Path(exlm_cli.__file__).parent
    git = ["git", "-C", str(package)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    measured = [":/src", ":/cuda_ext"]
    is_changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *measured], check=False).returncode
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "commit": commit.strip() + ("+changes" if is_changed else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
    }


def _processor() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.processor()


def append_row(name: str, row: Mapping[str, object]) -> None:
    """Append to `results/<name>.csv`; the first row writes the header, and later rows must have the same columns."""
    path = RESULTS_DIR / f"{name}.csv"
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


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of `results/<name>.csv`; none where it does not exist."""
    path = RESULTS_DIR / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """Return the mean of two or more values, and half of its 95 % interval, Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(half)
