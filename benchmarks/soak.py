"""Half an hour of training, validation and checkpoints in one process: memory, open files and threads over time.

    python benchmarks/soak.py [--minutes 30] [--out benchmarks/results/soak.csv]

Writes a row every five seconds, and a figure beside the file. Exit 1 unless the medians of memory of all spans of two
minutes but the first lie within 5 %, and the second half has no more open files and threads than the first, and at most
5 % more memory at its highest. (Single samples differ: some fall into a validation, which needs more for a moment.)
"""

import argparse
import csv
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from itertools import groupby
from pathlib import Path

from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.errors import InterruptedRunError
from exlm_cli.report import style
from exlm_cli.train.pretrain import run_pretraining

EVERY_S = 5.0
SPAN_S = 120.0
MOST_GROWTH = 1.05
COLUMNS = ("seconds", "resident_mib", "open_files", "threads", "steps")
SETTINGS = (
    "train.max_steps=100000000", "train.validate_every_steps=50", "train.checkpoint_every_steps=50",
    "train.log_every_steps=10", "train.num_threads=1", "train.batch_sequences=16",
    "optim.schedule=constant", "device=cpu",
)  # fmt: skip

Row = tuple[float, float, int, int, int]


def main() -> int:
    """Train and watch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.csv")
    given = parser.parse_args()
    recipe = load_recipe("quickstart-text", list(SETTINGS), kind=PretrainRecipe)
    with tempfile.TemporaryDirectory() as folder:
        rows = train_and_watch(recipe, Path(folder) / "run", 60 * given.minutes)
    with given.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    draw(rows, given.out.with_suffix(".png"))
    return judge(rows)


def train_and_watch(recipe: PretrainRecipe, run: Path, seconds: float) -> list[Row]:
    """Train for so long; return what the process had, every five seconds."""
    rows: list[Row] = []
    began, is_over = time.monotonic(), threading.Event()

    def watch() -> None:
        while not is_over.wait(EVERY_S):
            rows.append(look(time.monotonic() - began, run))
            if rows[-1][0] >= seconds:
                os.kill(os.getpid(), signal.SIGTERM)  # the loop saves a checkpoint and ends
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_pretraining(recipe, out=run)
    except InterruptedRunError as stop:
        print(stop.message)
    finally:
        is_over.set()
        watcher.join()
    return rows


def look(seconds: float, run: Path) -> Row:
    """Return memory, open files and threads of this process, and the steps of the run so far."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    files = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # one is the listing's own
    mebibytes = int(status["VmRSS"].split()[0]) / 1024
    return round(seconds, 1), round(mebibytes, 1), files, int(status["Threads"]), last_step(run / "metrics.jsonl")


def last_step(metrics: Path) -> int:
    """Return the step of the last row, reading no more than it."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 10_000))
        lines = file.read().splitlines()
    return int(json.loads(lines[-1])["step"]) if lines else 0


def medians(rows: list[Row]) -> list[float]:
    """Return the median memory of each whole span of two minutes after the first."""
    spans = groupby(rows, key=lambda row: row[0] // SPAN_S)
    return [statistics.median(row[1] for row in span) for number, span in spans if 0 < number < rows[-1][0] // SPAN_S]


def judge(rows: list[Row]) -> int:
    """Print whether memory, files and threads stay; return the exit code."""
    low, high = min(medians(rows)), max(medians(rows))
    settled = [row for row in rows if row[0] >= SPAN_S]
    parts = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    highest, files, threads = ([max(row[column] for row in part) for part in parts] for column in (1, 2, 3))
    print(
        f"{rows[-1][4]:,} steps; medians of two minutes from {low:.1f} to {high:.1f} MiB, {high / low - 1:.1%} apart; "
        f"most in each half: {highest} MiB, {files} open files, {threads} threads"
    )
    is_flat = high <= MOST_GROWTH * low and highest[1] <= MOST_GROWTH * highest[0]
    return 0 if is_flat and files[1] <= files[0] and threads[1] <= threads[0] else 1


def draw(rows: list[Row], path: Path) -> None:
    """Draw memory over minutes, and a band of 5 % in which the medians of two minutes lie."""
    with style.drawing():
        figure = style.new_figure(6.4, 2.6)
        axes = figure.subplots()
        low = min(medians(rows))
        axes.axhspan(low, MOST_GROWTH * low, alpha=0.15)
        axes.plot([row[0] / 60 for row in rows], [row[1] for row in rows])
        axes.set_ylim(0, 1.2 * max(row[1] for row in rows))
        title = f"{rows[-1][4]:,} steps, a validation and a checkpoint every 50"
        style.set_up_axes(axes, "Minutes", "Resident memory, MiB", title)
        path.write_bytes(style.render_figure(figure, ("png",))["png"])


if __name__ == "__main__":
    sys.exit(main())
