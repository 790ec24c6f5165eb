"""Half an hour of training, validation and checkpoints in one process: memory, open files and threads over time.

Its rows were made at 6558948.

    python studies/soak.py [--minutes 30] [--out studies/results/soak.csv]

A cycle is 20 steps, a validation and a checkpoint. Each row is taken at the same moment of its cycle: when the
checkpoint is written. Exit 1 unless after the first two minutes resident memory stays within 5 %, and open files and
threads are the same in every row.
"""

import argparse
import contextlib
import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from exlm_cli.config.load import load_recipe
from exlm_cli.config.pretrain import PretrainRecipe
from exlm_cli.report import style
from exlm_cli.train.pretrain import run_pretraining
from exlm_cli.train.task import Callback

SETTLED_S = 120.0
MOST_GROWTH = 1.05
SETTINGS = (
    "train.max_steps=100000000", "train.validate_every_steps=20", "train.checkpoint_every_steps=20",
    "train.log_every_steps=10", "train.num_threads=1", "train.batch_sequences=16",
    "optim.schedule=constant", "device=cpu",
)  # fmt: skip


class Row(NamedTuple):
    """The process at the end of a cycle; `peak_mib` is the most memory within the cycle."""

    seconds: float
    step: int
    resident_mib: float
    peak_mib: float
    open_files: int
    threads: int


class TimeIsUpError(Exception):
    """The soak ends here."""


class Watch(Callback):
    """Takes a row after each checkpoint, and ends the run when its time is up."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, time.monotonic()
        self.rows: list[Row] = []

    def on_save(self, step: int, _checkpoint: Path) -> None:
        """Take a row."""
        elapsed = time.monotonic() - self.began
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
        resident, peak = (round(int(status[name].split()[0]) / 1024, 1) for name in ("VmRSS", "VmHWM"))
        files = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # one is the listing's own
        self.rows.append(Row(round(elapsed, 1), step, resident, peak, files, int(status["Threads"])))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        if elapsed >= self.seconds:
            raise TimeIsUpError


def main() -> int:
    """Train and watch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.csv")
    given = parser.parse_args()
    if given.minutes <= SETTLED_S / 60:
        parser.error("--minutes: more than 2, as the first two do not count")
    watch = Watch(60 * given.minutes)
    with tempfile.TemporaryDirectory() as folder:
        settings = [*SETTINGS, f"data.cache_dir={folder}/cache"]
        recipe = load_recipe("quickstart-text", settings, kind=PretrainRecipe)
        with contextlib.suppress(TimeIsUpError):
            run_pretraining(recipe, out=Path(folder) / "run", callbacks=[watch])
    with given.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *watch.rows])
    draw(watch.rows, given.out.with_suffix(".png"))
    return judge(watch.rows)


def settled(rows: list[Row]) -> list[Row]:
    """Return the rows after the first two minutes."""
    return [row for row in rows if row.seconds >= SETTLED_S]


def judge(rows: list[Row]) -> int:
    """Print whether memory, files and threads stay; return the exit code."""
    resident, peaks, files, threads = ([row[column] for row in settled(rows)] for column in (2, 3, 4, 5))
    growth = max(resident) / min(resident)
    print(
        f"{rows[-1].step:,} steps; {len(resident)} checkpoints after {SETTLED_S:g} s: resident memory from "
        f"{min(resident):.1f} to {max(resident):.1f} MiB, {growth - 1:.1%} apart; most within a cycle from "
        f"{min(peaks):.1f} to {max(peaks):.1f} MiB; open files {sorted(set(files))}, threads {sorted(set(threads))}"
    )
    return 0 if growth <= MOST_GROWTH and len(set(files)) == len(set(threads)) == 1 else 1


def draw(rows: list[Row], path: Path) -> None:
    """Draw memory over minutes, and a band of 5 % above the least of the settled rows."""
    with style.drawing():
        figure = style.new_figure(6.4, 2.6)
        axes = figure.subplots()
        low = min(row.resident_mib for row in settled(rows))
        minutes = [row.seconds / 60 for row in rows]
        band = axes.axhspan(low, MOST_GROWTH * low, alpha=0.15)
        (resident,) = axes.plot(minutes, [row.resident_mib for row in rows])
        (peak,) = axes.plot(minutes, [row.peak_mib for row in rows], style.LINE_STYLES[2], color=style.FAINT_INK)
        axes.set_ylim(0, 1.3 * max(row.peak_mib for row in rows))
        labels = ["after a checkpoint", "most since the one before", "5 %"]
        style.add_legend(axes, [resident, peak, band], labels, loc="lower right")
        title = f"{rows[-1].step:,} steps, a validation and a checkpoint every 20"
        style.set_up_axes(axes, "Minutes", "Resident memory, MiB", title)
        path.write_bytes(style.render_figure(figure, ("png",))["png"])


if __name__ == "__main__":
    sys.exit(main())
