"""What predicts small sets of molecules best: exlm, alone or with descriptors, its baselines, chemprop, two together?

Seven sets, canonical SMILES, the same scaffold-balanced splits for every method, one seed, one thread.

    python studies/molecules.py DATA WORK
    python studies/molecules.py DATA WORK --only esol bbbp --commands csv
    python studies/molecules.py DATA WORK --chemprop VENV/bin/chemprop
    python studies/molecules.py DATA WORK --new
    python studies/molecules.py DATA WORK --list
    python studies/molecules.py DATA WORK --table

DATA holds `moleculenet/` and `smiles/`; a set without its file is left out. `moleculenet/freesolv.csv.gz` has the
columns `smiles` and `expt` of `database.txt` of MobleyLab/FreeSolv. A cell is one set, split and command; one that
has its rows in `results/molecules.csv` is not done again, and a run in WORK that was stopped is continued. `exlm
finetune csv` gives the model, three baselines, and the mean of the model and the best of them, as it chooses it: five
methods, of which each row has the CPU seconds of the whole command, user and system time, its start included.
Predictions of all validation and test rows stay in WORK, from which `--table` draws its intervals: keep it. chemprop
2.3.1 is installed in an environment of its own; without `--chemprop` its cells are left out.
"""

import argparse
import csv
import lzma
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rdkit import Chem, rdBase

from exlm_cli.config.finetune import FinetuneRecipe
from exlm_cli.config.load import load_recipe
from exlm_cli.files import write_csv
from exlm_cli.finetune import predictions
from exlm_cli.finetune.predictions import read_predictor, read_seed_predictions
from exlm_cli.finetune.results import read_results
from exlm_cli.finetune.scores import BOTH, MODEL
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import SplitIndices
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.task import RowTask
from rows import append_row, mean_and_half, read_rows, surroundings

NAME = "molecules"
SEED = 1
SETS = ("esol", "freesolv", "bbbp", "bace", "clintox", "lipo", "tox21")
VALUES = {"esol": "logSolubility", "freesolv": "expt", "lipo": "lipo"}
"""Column of the sets that are regressions."""
SPLITS = {name: (0,) if name == "tox21" else (0, 1, 2) for name in SETS}
NUM_NEW = 100_000
"""Molecules whose prediction is timed."""
NEW = f"{NUM_NEW} molecules"
TIMED = ("esol", 0)
"""The cells whose models are timed."""
PART = {"train": "train", "valid": "val", "test": "test"}
"""Names of the parts in the column `split`, those of chemprop."""
EXLM = {
    "csv": {
        "exlm + rdkit2d": MODEL,
        "both": BOTH,
        "forest ecfp4": "forest-ecfp4",
        "forest rdkit2d": "forest-rdkit2d",
        "boosting": "boosting",
    },
    "csv-encoder": {"exlm": MODEL},
}
"""What each recipe gives, by its name in `scores.csv`; the baselines of the second are those of the first."""
CHEMPROP = {"chemprop": "", "chemprop rdkit_2d": "--molecule-featurizers rdkit_2d"}
COMMANDS = (*EXLM, *CHEMPROP)
METHODS = (*EXLM["csv"], *EXLM["csv-encoder"], *CHEMPROP)
BOOTSTRAPS = 2000
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One set, split and command.

    Attributes:
        data: Name of the set.
        work: Folder of tables, runs and predictions.
    """

    data: str
    split: int
    command: str
    work: Path

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.data}-{self.split}-{self.command.replace(' ', '-')}"

    @property
    def methods(self) -> tuple[str, ...]:
        """What the command gives."""
        return tuple(EXLM.get(self.command, (self.command,)))

    @property
    def table(self) -> Path:
        """The molecules, their labels and the part each belongs to."""
        return self.work / f"tables/{self.data}-{self.split}.csv"

    @property
    def run(self) -> Path:
        """What the command writes."""
        return self.work / "runs" / self.name

    @property
    def metric(self) -> str:
        """What its predictions are scored by."""
        return "rmse" if self.data in VALUES else "roc_auc"

    @property
    def is_done(self) -> bool:
        """Whether it has its rows."""
        return all((self.data, str(self.split), method) in done_cells() for method in self.methods)


def predictions_of(work: Path, data: str, split: int, method: str) -> Path:
    """Return the file with a method's predictions of validation and test rows."""
    return work / f"predictions/{data}-{split}-{method.replace(' + ', '-').replace(' ', '-')}.npz"


@dataclass(frozen=True)
class Rows:
    """One part of a table: SMILES, and (N, C) targets, NaN where missing."""

    smiles: list[str]
    targets: FloatArray


def done_cells() -> set[tuple[str, str, str]]:
    """Return the cells that have rows."""
    return {(row["data"], row["split"], row["method"]) for row in read_rows(NAME)}


# --- tables of molecules --------------------------------------------------------------------------------------------


def write_tables(data: Path, cell: Cell) -> None:
    """Write the table of a set and split, as `exlm finetune` splits it: canonical SMILES, labels, part.

    Molecules that RDKit reads only with a metal's valence unchecked are left out: chemprop refuses them.
    """
    if cell.table.exists():
        return
    values = [f"task.split_seed={cell.split}", "task.split=scaffold-balanced"]
    if column := VALUES.get(cell.data):
        values += [f"task.files.train={data}/moleculenet/{cell.data}.csv.gz", f"task.label_columns=[{column}]"]
        values += ["task.smiles_column=smiles", "task.label_kind=regression"]
    else:
        values += [f"task.name=moleculenet/{cell.data}", f"task.data_dir={data}"]
    recipe = load_recipe("csv" if column else "moleculenet-small", values, kind=FinetuneRecipe)
    task = load_task(recipe.task, SilentProgress())
    assert isinstance(task, RowTask), "a set of molecules has rows"
    found: list[list[object]] = []
    with rdBase.BlockLogs():
        for split in task.splits:
            of_split = task.examples[split]
            for (smiles,), targets in zip(of_split.texts, of_split.targets.tolist(), strict=True):
                if Chem.MolFromSmiles(smiles) is not None:
                    shown = ["" if value != value else value if column else int(value) for value in targets]
                    found.append([smiles, *shown, PART[split]])
    cell.table.parent.mkdir(parents=True, exist_ok=True)
    write_csv(cell.table, ("smiles", *task.output_names, "split"), found)


def write_new(data: Path, work: Path) -> Path:
    """Write the first molecules of the pre-training file, whose prediction is timed."""
    path = work / f"tables/new-{NUM_NEW}.csv"
    if not path.exists():
        with lzma.open(data / "smiles/train.txt.xz", "rt") as file, rdBase.BlockLogs():
            molecules = (line.strip() for line in file)
            readable = (text for text in molecules if 2 <= len(text) <= 100 and Chem.MolFromSmiles(text) is not None)
            write_csv(path, ("smiles",), ([text] for text in islice(readable, NUM_NEW)))
    return path


def label_names(table: Path) -> list[str]:
    """Return the names of the label columns."""
    with table.open(newline="") as file:
        return next(csv.reader(file))[1:-1]


@cache
def read_part(table: Path, split: str) -> Rows:
    """Return the rows of one part of a table."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == PART[split]]
    names = label_names(table)
    targets = np.array([[float(row[name]) if row[name] else np.nan for name in names] for row in rows])
    return Rows([row["smiles"] for row in rows], targets)


# --- methods --------------------------------------------------------------------------------------------------------


def measured(command: Sequence[str], log: Path) -> tuple[float, float]:
    """Run a command on one thread and return its CPU seconds and its peak memory in MiB.

    Raises:
        RuntimeError: It fails; its last lines are the message.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = os.environ | dict.fromkeys(threads, "1")
    with log.open("w") as file:
        actions = [(os.POSIX_SPAWN_DUP2, file.fileno(), 1), (os.POSIX_SPAWN_DUP2, file.fileno(), 2)]
        process = os.posix_spawnp(command[0], list(command), environment, file_actions=actions)
        _, status, usage = os.wait4(process, 0)
    if status:
        raise RuntimeError(f"{shlex.join(command)}\n" + "\n".join(log.read_text().splitlines()[-5:]))
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def exlm_command(cell: Cell) -> list[str]:
    """Return the command that trains a cell of exlm."""
    if (cell.run / "recipe.yaml").exists():
        return [sys.executable, "-m", "exlm_cli", "finetune", "--resume", str(cell.run)]
    given = ["csv", str(cell.table), "--smiles-column", "smiles", "--label-columns", ",".join(label_names(cell.table))]
    given += ["--recipe", cell.command, "--checkpoint", "bundled:smiles", "--seeds", str(SEED), "--device", "cpu"]
    given += ["--baseline" if BOTH in EXLM[cell.command].values() else "--no-baseline"]
    kind = "regression" if cell.data in VALUES else "multi_label"
    values = ["task.split_column=split", f"task.label_kind={kind}", "train.num_threads=1"]
    given += [word for value in values for word in ("--set", value)]
    return [sys.executable, "-m", "exlm_cli", "finetune", *given, "--out", str(cell.run)]


def chemprop_command(cell: Cell, program: str) -> list[str]:
    """Return the command that trains a cell of chemprop."""
    kind, metric = ("regression", "rmse") if cell.data in VALUES else ("classification", "roc")
    given = ["--data-path", str(cell.table), "--smiles-columns", "smiles"]
    given += ["--target-columns", *label_names(cell.table), "--splits-column", "split", "--task-type", kind]
    given += ["--metrics", metric, "--num-workers", "0", "--pytorch-seed", str(SEED), "--accelerator", "cpu"]
    return [program, "train", *given, *CHEMPROP[cell.command].split(), "--output-dir", str(cell.run)]


def read_predictions(path: Path, names: Sequence[str]) -> FloatArray:
    """Return (N, C) predictions of a file of chemprop.

    Raises:
        RuntimeError: Rows have none, as where one of RDKit's descriptors is not a number.
    """
    with path.open(newline="") as file:
        rows = [[row[name] for name in names] for row in csv.DictReader(file)]
    if num_empty := sum("" in row for row in rows):
        raise RuntimeError(f"{num_empty} of {len(rows)} test rows have no prediction, so there is no score")
    return np.array(rows, dtype=np.float64)


def train(cell: Cell, chemprop: str | None) -> list[Mapping[str, object]]:
    """Train a cell, keep its predictions, and return the rows of its methods."""
    log = cell.work / f"logs/{cell.name}.log"
    if cell.command in EXLM:
        words = exlm_command(cell)
        cpu_s, peak = measured(words, log)
        command, found = shlex.join(["exlm", *words[3:]]), exlm_predictions(cell)
    else:
        assert chemprop is not None, "its cells are left out without it"
        words = chemprop_command(cell, chemprop)
        cpu_s, peak = measured(words, log)
        command = shlex.join(["chemprop", *words[1:]])
        found = {
            cell.command: {"test": read_predictions(cell.run / "model_0/test_predictions.csv", label_names(cell.table))}
        }
    rows: list[Mapping[str, object]] = []
    for method, by_part in found.items():
        path = predictions_of(cell.work, cell.data, cell.split, method)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **by_part)  # type: ignore[arg-type]
        scores = {part: score(cell, part, predicted) for part, predicted in by_part.items()}
        rows.append(
            {
                "data": cell.data,
                "split": cell.split,
                "method": method,
                "metric": cell.metric,
                "test": f"{scores['test']:.5f}",
                "valid": f"{scores['valid']:.5f}" if "valid" in scores else "",
                "cpu_s": f"{cpu_s:.1f}",
                "peak_mib": f"{peak:.0f}",
                "command": command.replace(f"{cell.work}/", ""),
            }
            | where()
        )
    return rows


def exlm_predictions(cell: Cell) -> dict[str, dict[str, FloatArray]]:
    """Return (N, C) predictions of validation and test rows by method."""
    results = read_results(cell.run)
    parts = predictions.read_rows(cell.run, results.loss, results.output_names)[results.split_seeds[0]]
    rows: SplitIndices = {part: of_part.rows for part, of_part in parts.items() if part != "train"}
    found: dict[str, dict[str, FloatArray]] = {}
    for method, model in EXLM[cell.command].items():
        by_part = (
            read_predictor(cell.run, results, rows, "both")
            if model == BOTH
            else read_seed_predictions(cell.run, results, rows, baseline=None if model == MODEL else model)
        )
        found[method] = {part: by_seed[0] for part, by_seed in by_part.items()}
    return found


@cache
def where() -> dict[str, str]:
    """Return machine, versions and commit."""
    torch.set_num_threads(1)
    return surroundings(torch.device("cpu"))


def score(cell: Cell, split: str, predicted: FloatArray) -> float:
    """Return the metric of predictions: RMSE, or the mean ROC-AUC of the labels that have one."""
    targets = read_part(cell.table, split).targets
    return score_targets(cell.metric, predicted, targets)


def score_targets(metric: str, predicted: FloatArray, targets: FloatArray) -> float:
    """Return the metric of (N, C) predictions."""
    return score_rows("regression" if metric == "rmse" else "binary", predicted, targets)[metric]


def time_new(data: Path, cell: Cell, chemprop: str | None) -> Iterator[Mapping[str, object]]:
    """Yield rows with the CPU seconds of many predictions with a trained cell that have none yet."""
    new = write_new(data, cell.work)
    predictors = {"csv": {"exlm + rdkit2d": "model", "best baseline": "baseline", "both": "both"}}
    for method, predictor in predictors.get(cell.command, {cell.methods[0]: "model"}).items():
        if (NEW, "", method) in done_cells():
            continue
        out = cell.work / f"new-{cell.name}-{predictor}.csv"
        if cell.command in CHEMPROP:
            assert chemprop is not None, "its cells are left out without it"
            words = [chemprop, "predict", "--test-path", str(new), "--smiles-columns", "smiles", "--num-workers", "0"]
            words += ["--accelerator", "cpu", "--preds-path", str(out)]
            words += ["--model-paths", str(cell.run / "model_0/best.pt"), *CHEMPROP[cell.command].split()]
            shown = ["chemprop", *words[1:]]
        else:
            words = [sys.executable, "-m", "exlm_cli", "predict", str(cell.run), str(new), "--with", predictor]
            words += ["--out", str(out), "--device", "cpu"]
            shown = ["exlm", *words[3:]]
        cpu_s, peak = measured(words, cell.work / f"logs/new-{cell.name}-{predictor}.log")
        yield {
            "data": NEW,
            "split": "",
            "method": method,
            "metric": "cpu_s",
            "test": "",
            "valid": "",
            "cpu_s": f"{cpu_s:.1f}",
            "peak_mib": f"{peak:.0f}",
            "command": shlex.join(shown).replace(f"{cell.work}/", ""),
        } | where()


# --- table ----------------------------------------------------------------------------------------------------------


def table(work: Path) -> str:
    """Return the tables of all rows: mean over splits, and the difference from the first with two 95 % intervals.

    All methods of a set are compared on the splits that all of them have, and once more those that have more splits on
    these; then `both` less chemprop's default. The interval over rows is a paired bootstrap of the test rows within
    each split; that over splits is Student's t.
    """
    rows = {(row["data"], int(row["split"]), row["method"]): row for row in read_rows(NAME) if row["split"]}
    lines = [
        "| set | splits | method | test | less the first, over rows | over splits | CPU s | MiB |",
        "|---" * 8 + "|",
    ]
    for name in SETS:
        have = {m: {s for s in SPLITS[name] if (name, s, m) in rows} for m in METHODS}
        have = {m: splits for m, splits in have.items() if splits}
        shared = [set.intersection(*have.values())] if have else []
        if have and len(most := max(have.values(), key=len)) > len(shared[0]):
            shared.append(most)
        for splits in map(sorted, shared):
            methods = [m for m in have if have[m].issuperset(splits)]
            lines += _compared(work, name, splits, methods, rows)
    lines += ["", "| set | `both` less chemprop, over rows | over splits |", "|---" * 3 + "|"]
    for name in SETS:
        splits = [s for s in SPLITS[name] if (name, s, "both") in rows and (name, s, "chemprop") in rows]
        gaps = differences(work, name, splits, "both", "chemprop", rows) if splits else ("", "")
        lines.append(f"| {name} | {' | '.join(gaps)} |")
    lines += ["", f"| method | CPU s of {NUM_NEW:,} predictions | MiB |", "|---|---|---|"]
    lines += [f"| {r['method']} | {r['cpu_s']} | {r['peak_mib']} |" for r in read_rows(NAME) if not r["split"]]
    return "\n".join(lines)


def _compared(
    work: Path, name: str, splits: Sequence[int], methods: Sequence[str], rows: Mapping[tuple[str, int, str], Any]
) -> Iterator[str]:
    """Yield the lines of one set, the best method first."""
    means = {m: float(np.mean([float(rows[name, s, m]["test"]) for s in splits])) for m in methods}
    order = sorted(methods, key=lambda m: means[m] if name in VALUES else -means[m])
    for m in order if splits else ():
        gaps = ("", "") if m == order[0] else differences(work, name, splits, m, order[0], rows)
        costs = [rows[name, s, m] for s in splits]
        cpu_s = np.mean([float(row["cpu_s"]) for row in costs])
        peak = max(float(row["peak_mib"]) for row in costs)
        cells = (name, ", ".join(map(str, splits)), m, f"{means[m]:.3f}", *gaps, f"{cpu_s:.0f}", f"{peak:.0f}")
        yield f"| {' | '.join(cells)} |"


def differences(
    work: Path, name: str, splits: Sequence[int], method: str, first: str, rows: Mapping[tuple[str, int, str], Any]
) -> tuple[str, str]:
    """Return the difference of two methods in their metric, with its interval over rows and over splits."""
    rng = np.random.default_rng(0)
    gaps = [float(rows[name, s, method]["test"]) - float(rows[name, s, first]["test"]) for s in splits]
    drawn = np.zeros(BOOTSTRAPS)
    for split in splits:
        targets = read_part(Cell(name, split, "", work).table, "test").targets
        counts = rng.multinomial(len(targets), np.full(len(targets), 1 / len(targets)), size=BOOTSTRAPS)
        one, other = (np.load(predictions_of(work, name, split, of))["test"] for of in (method, first))
        drawn += (resampled(one, targets, counts, name) - resampled(other, targets, counts, name)) / len(splits)
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    over_splits = "{:+.3f} ± {:.3f}".format(*mean_and_half(gaps)) if len(gaps) > 1 else ""
    return f"{np.mean(gaps):+.3f} ({low:+.3f} to {high:+.3f})", over_splits


def resampled(predicted: FloatArray, targets: FloatArray, counts: NDArray[np.int64], name: str) -> FloatArray:
    """Return the metric of a set in each of B resamplings of its N test rows.

    Args:
        counts: (B, N) how often each row was drawn.
    """
    columns = []
    with np.errstate(invalid="ignore"):  # a resampling without one of the classes has no ROC-AUC
        for values, target_N in zip(predicted.T, targets.T, strict=True):
            if name in VALUES:
                columns.append(np.sqrt(counts @ (values - target_N) ** 2 / counts.sum(axis=1)))
                continue
            high, low = target_N == 1, target_N == 0
            above = np.sign(values[high][:, None] - values[low][None]) / 2 + 0.5
            won = ((counts[:, high] @ above) * counts[:, low]).sum(axis=1)
            columns.append(won / (counts[:, high].sum(axis=1) * counts[:, low].sum(axis=1)))
    return np.asarray(np.nanmean(columns, axis=0))


def cells_of(work: Path, only: Sequence[str], commands: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells, the first split of every set before the others."""
    for split in (0, 1, 2):
        for name in SETS:
            for command in COMMANDS if split in SPLITS[name] and name in only else ():
                if command in commands:
                    yield Cell(name, split, command, work)


def main() -> None:
    """Do the cells, list them, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--commands", nargs="+", default=COMMANDS, choices=COMMANDS)
    parser.add_argument("--chemprop", help="its program, in an environment of its own")
    parser.add_argument("--new", action="store_true", help="time the prediction of new molecules with trained models")
    parser.add_argument("--list", action="store_true", help="print the cells and whether they are done")
    parser.add_argument("--table", action="store_true", help="print the table of what is done")
    given = parser.parse_args()
    data, work = given.data.resolve(), given.work.resolve()
    cells = list(cells_of(work, given.only, given.commands))
    if given.list or given.table:
        listed = "\n".join(f"{'done' if cell.is_done else '    '} {cell.name}" for cell in cells)
        sys.stdout.write(f"{table(work) if given.table else listed}\n")
        return
    failed = []
    for cell in cells:
        is_left_out = cell.command in CHEMPROP and given.chemprop is None
        is_left_out = is_left_out or not (data / f"moleculenet/{cell.data}.csv.gz").exists()
        if is_left_out or ((cell.data, cell.split) != TIMED if given.new else cell.is_done):
            continue
        began = time.perf_counter()
        try:
            write_tables(data, cell)
            for row in time_new(data, cell, given.chemprop) if given.new else train(cell, given.chemprop):
                append_row(NAME, row)
                sys.stderr.write(f"{cell.name}, {row['method']}: {row['metric']} {row['test']}, {row['cpu_s']} s CPU\n")
        except (RuntimeError, OSError) as error:
            failed.append(cell.name)
            sys.stderr.write(f"{cell.name}: {error}\n")
            continue
        sys.stderr.write(f"{cell.name}: {time.perf_counter() - began:.0f} s\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
