"""What predicts small sets of molecules best: exlm, alone or with descriptors, forests, chemprop, or two together?

Six MoleculeNet sets, canonical SMILES, the same scaffold-balanced splits for every method, one seed, one thread.

    python studies/molecules.py DATA WORK
    python studies/molecules.py DATA WORK --only esol bbbp --methods exlm "forest rdkit2d"
    python studies/molecules.py DATA WORK --chemprop VENV/bin/chemprop
    python studies/molecules.py DATA WORK --new
    python studies/molecules.py DATA WORK --list
    python studies/molecules.py DATA WORK --table

DATA holds `moleculenet/` and `smiles/`. A cell is one set, split and method; one that has its row in
`results/molecules.csv` is not done again, and a run in WORK that was stopped is continued. CPU seconds are user and
system time of the whole command, its start included. `both` is made of the predictions of a model and a forest.
Predictions of all test rows stay in WORK, from which `--table` draws its intervals. chemprop 2.3.1 is installed in an
environment of its own; without `--chemprop` its cells are left out.
"""

import argparse
import csv
import lzma
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from exlm_cli.data.molecules import descriptors, fingerprints
from exlm_cli.files import write_csv
from exlm_cli.finetune import predictions
from exlm_cli.finetune.baselines.baseline import NUM_TREES
from exlm_cli.finetune.results import read_results, read_seed_predictions
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import SplitIndices
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.tasks.registry import load_task
from exlm_cli.tasks.rows.task import RowTask
from rows import append_row, mean_and_half, read_rows, surroundings

NAME = "molecules"
SEED = 1
SETS = ("esol", "bbbp", "bace", "clintox", "lipo", "tox21")
VALUES = {"esol": "logSolubility", "lipo": "lipo"}
"""Column of the sets that are regressions."""
SPLITS = {name: (0,) if name == "tox21" else (0, 1, 2) for name in SETS}
NUM_NEW = 100_000
"""Molecules whose prediction is timed."""
NEW = f"{NUM_NEW} molecules"
TIMED = ("esol", 0)
"""The cells whose models are timed."""
PART = {"train": "train", "valid": "val", "test": "test"}
"""Names of the parts in the column `split`, those of chemprop."""
FORESTS = ("forest ecfp4", "forest rdkit2d")
EXLM = {
    "exlm": "train.max_epochs=10 train.patience=null model.attention_dropout=0.0",
    "exlm + rdkit2d": "train.max_epochs=30 train.patience=null train.freeze_encoder=true task.descriptors=[rdkit2d]",
}
"""Settings beside those of the recipe `csv`, the same for all sets; chosen on the validation rows of ESOL."""
BOTH = {"both": "exlm + rdkit2d", "both, exlm alone": "exlm"}
"""Their models; the forest is the one that is better on validation rows."""
CHEMPROP = {"chemprop": "", "chemprop rdkit_2d": "--molecule-featurizers rdkit_2d"}
METHODS = (*FORESTS, *EXLM, *BOTH, *CHEMPROP)
BOOTSTRAPS = 2000
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One set, split and method.

    Attributes:
        data: Name of the set.
        work: Folder of tables, runs and predictions.
    """

    data: str
    split: int
    method: str
    work: Path

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.data}-{self.split}-{self.method.replace(' + ', '-').replace(' ', '-')}"

    @property
    def table(self) -> Path:
        """The molecules, their labels and the part each belongs to."""
        return self.work / f"tables/{self.data}-{self.split}.csv"

    @property
    def predictions(self) -> Path:
        """Predictions of its validation and test rows."""
        return self.work / f"predictions/{self.name}.npz"

    @property
    def metric(self) -> str:
        """What its predictions are scored by."""
        return "rmse" if self.data in VALUES else "roc_auc"

    @property
    def is_done(self) -> bool:
        """Whether it has its row."""
        return (self.data, str(self.split), self.method) in done_cells()

    @property
    def is_timed(self) -> bool:
        """Whether the prediction of new molecules has its row."""
        return (NEW, "", self.method) in done_cells()


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


def exlm_command(cell: Cell, run: Path) -> list[str]:
    """Return the command that trains a cell of exlm."""
    if (run / "recipe.yaml").exists():
        return [sys.executable, "-m", "exlm_cli", "finetune", "--resume", str(run)]
    given = ["csv", str(cell.table), "--smiles-column", "smiles", "--label-columns", ",".join(label_names(cell.table))]
    given += ["--checkpoint", "bundled:smiles", "--seeds", str(SEED), "--device", "cpu", "--no-baseline"]
    kind = "regression" if cell.data in VALUES else "multi_label"
    values = ["task.split_column=split", f"task.label_kind={kind}", "train.num_threads=1", *EXLM[cell.method].split()]
    given += [word for value in values for word in ("--set", value)]
    return [sys.executable, "-m", "exlm_cli", "finetune", *given, "--out", str(run)]


def chemprop_command(cell: Cell, program: str, run: Path) -> list[str]:
    """Return the command that trains a cell of chemprop."""
    kind, metric = ("regression", "rmse") if cell.data in VALUES else ("classification", "roc")
    given = ["--data-path", str(cell.table), "--smiles-columns", "smiles"]
    given += ["--target-columns", *label_names(cell.table), "--splits-column", "split", "--task-type", kind]
    given += ["--metrics", metric, "--num-workers", "0", "--pytorch-seed", str(SEED), "--accelerator", "cpu"]
    return [program, "train", *given, *CHEMPROP[cell.method].split(), "--output-dir", str(run)]


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


def forest_command(cell: Cell) -> list[str]:
    """Return the command of the process that is measured."""
    words = [sys.executable, __file__, ".", str(cell.work), "--only", cell.data, "--methods", cell.method]
    return [*words, "--forest", str(cell.split)]


def predict_forest(cell: Cell, molecules: Mapping[str, Sequence[str]]) -> dict[str, FloatArray]:
    """Return (N, C) predictions of a forest for each label, with the settings of exlm's baselines.

    Args:
        molecules: SMILES of each part that is predicted.
    """
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    is_regression, train = cell.data in VALUES, read_part(cell.table, "train")
    parts = {"train": train.smiles, **molecules}
    features: dict[str, NDArray[Any]]
    if cell.method == FORESTS[1]:
        features = {split: descriptors(smiles, SilentProgress()) for split, smiles in parts.items()}
        with np.errstate(all="ignore"):
            median = np.nan_to_num(np.nanmedian(features["train"], axis=0))
        features = {split: np.where(np.isnan(of_split), median, of_split) for split, of_split in features.items()}
    else:
        features = {split: fingerprints(smiles) for split, smiles in parts.items()}
    max_features: Any = 1 / 3 if is_regression and cell.method == FORESTS[1] else "sqrt"
    kind: Any = RandomForestRegressor if is_regression else RandomForestClassifier
    outputs: dict[str, list[FloatArray]] = {split: [] for split in molecules}
    for target_N in train.targets.T:
        is_known = ~np.isnan(target_N)
        forest = kind(n_estimators=NUM_TREES, max_features=max_features, random_state=SEED, n_jobs=1)
        forest.fit(features["train"][is_known], target_N[is_known])
        for split, columns in outputs.items():
            found = forest.predict(features[split]) if is_regression else forest.predict_proba(features[split])[:, -1]
            columns.append(found)
    return {split: np.stack(columns, axis=1) for split, columns in outputs.items()}


def train(cell: Cell, chemprop: str | None) -> Mapping[str, object]:
    """Train a cell, keep its predictions, and return the row of its scores and costs."""
    cell.predictions.parent.mkdir(parents=True, exist_ok=True)
    names, run = label_names(cell.table), cell.work / "runs" / cell.name
    log = cell.work / f"logs/{cell.name}.log"
    found: dict[str, FloatArray] = {}
    if cell.method in BOTH:
        found, of = blended(cell)
        costs = [row for row in read_rows(NAME) if (row["data"], row["split"]) == (cell.data, str(cell.split))]
        costs = [row for row in costs if row["method"] in [one.method for one in of]]
        cpu_s, peak = sum(float(row["cpu_s"]) for row in costs), max(float(row["peak_mib"]) for row in costs)
        command = f"mean of {of[0].method} and {of[1].method}"
    elif cell.method in EXLM:
        words = exlm_command(cell, run)
        cpu_s, peak = measured(words, log)
        results = read_results(run)
        parts = predictions.read_rows(run, results.loss, results.output_names)[results.split_seeds[0]]
        rows: SplitIndices = {split: of_split.rows for split, of_split in parts.items() if split != "train"}
        found = {split: by_seed[0] for split, by_seed in read_seed_predictions(run, results, rows).items()}
        command = shlex.join(["exlm", *words[3:]])
    elif cell.method in CHEMPROP:
        assert chemprop is not None, "its cells are left out without it"
        words = chemprop_command(cell, chemprop, run)
        cpu_s, peak = measured(words, log)
        found = {"test": read_predictions(run / "model_0/test_predictions.csv", names)}
        command = shlex.join(["chemprop", *words[1:]])
    else:
        cpu_s, peak = measured(forest_command(cell), log)
        found = dict(np.load(cell.predictions))
        command = f"RandomForest of scikit-learn, {NUM_TREES} trees, `predict_forest`"
    np.savez(cell.predictions, **found)  # type: ignore[arg-type]
    scores = {split: score(cell, split, predicted) for split, predicted in found.items()}
    return {
        "data": cell.data,
        "split": cell.split,
        "method": cell.method,
        "metric": cell.metric,
        "test": f"{scores['test']:.5f}",
        "valid": f"{scores['valid']:.5f}" if "valid" in scores else "",
        "cpu_s": f"{cpu_s:.1f}",
        "peak_mib": f"{peak:.0f}",
        "command": command.replace(f"{cell.work}/", ""),
    } | where()


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


def blended(cell: Cell) -> tuple[dict[str, FloatArray], list[Cell]]:
    """Return the mean of a model and of the forest that is better on validation rows, as `exlm` makes it.

    Also return the two cells.
    """
    (model, *forests) = (Cell(cell.data, cell.split, method, cell.work) for method in (BOTH[cell.method], *FORESTS))
    by_cell = {one.method: dict(np.load(one.predictions)) for one in (model, *forests)}
    chosen = (min if cell.data in VALUES else max)(
        forests, key=lambda forest: score(cell, "valid", by_cell[forest.method]["valid"])
    )
    of_model, of_forest = by_cell[model.method], by_cell[chosen.method]
    return {split: (of_model[split] + of_forest[split]) / 2 for split in ("valid", "test")}, [model, chosen]


def time_new(data: Path, cell: Cell, chemprop: str | None) -> Mapping[str, object]:
    """Return a row with the CPU seconds of many predictions with a cell; a forest is grown within this time."""
    new, run = write_new(data, cell.work), cell.work / "runs" / cell.name
    out, log = cell.work / f"new-{cell.name}.csv", cell.work / f"logs/new-{cell.name}.log"
    if cell.method in CHEMPROP:
        assert chemprop is not None, "its cells are left out without it"
        words = [chemprop, "predict", "--test-path", str(new), "--smiles-columns", "smiles", "--num-workers", "0"]
        words += ["--accelerator", "cpu", "--preds-path", str(out)]
        words += ["--model-paths", str(run / "model_0/best.pt"), *CHEMPROP[cell.method].split()]
        shown = ["chemprop", *words[1:]]
    elif cell.method in FORESTS:
        words = [*forest_command(cell), "--predict", str(new)]
        shown = ["python", "studies/molecules.py", ".", "WORK", *words[4:]]
    else:
        if cell.method in BOTH and not (run / "results.json").exists():
            words = exlm_command(replace(cell, method=BOTH[cell.method]), run)
            measured([word for word in words if word != "--no-baseline"], cell.work / f"logs/{cell.name}.log")
        what = "both" if cell.method in BOTH else "model"
        words = [sys.executable, "-m", "exlm_cli", "predict", str(run), str(new), "--with", what]
        words += ["--out", str(out), "--device", "cpu"]
        shown = ["exlm", *words[3:]]
    cpu_s, peak = measured(words, log)
    return {
        "data": NEW,
        "split": "",
        "method": cell.method,
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
        cells = [Cell(name, split, of, work) for of in (method, first)]
        targets = read_part(cells[0].table, "test").targets
        counts = rng.multinomial(len(targets), np.full(len(targets), 1 / len(targets)), size=BOOTSTRAPS)
        one, other = (np.load(cell.predictions)["test"] for cell in cells)
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


def cells_of(work: Path, only: Sequence[str], methods: Sequence[str]) -> Iterator[Cell]:
    """Yield the cells, the first split of every set before the others."""
    for split in (0, 1, 2):
        for name in SETS:
            for method in METHODS if split in SPLITS[name] and name in only else ():
                if method in methods:
                    yield Cell(name, split, method, work)


def main() -> None:
    """Do the cells, list them, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--chemprop", help="its program, in an environment of its own")
    parser.add_argument("--new", action="store_true", help="time the prediction of new molecules with trained models")
    parser.add_argument("--list", action="store_true", help="print the cells and whether they are done")
    parser.add_argument("--table", action="store_true", help="print the table of what is done")
    parser.add_argument("--forest", type=int, help=argparse.SUPPRESS)  # a split: the process that is measured
    parser.add_argument("--predict", type=Path, help=argparse.SUPPRESS)  # what the forest of that process predicts
    given = parser.parse_args()
    work = given.work.resolve()
    cells = list(cells_of(work, given.only, given.methods))
    if given.forest is not None:
        (cell,) = (cell for cell in cells if cell.split == given.forest)
        if given.predict:
            with given.predict.open(newline="") as file:
                predict_forest(cell, {"new": [row["smiles"] for row in csv.DictReader(file)]})
            return
        found = predict_forest(cell, {split: read_part(cell.table, split).smiles for split in ("valid", "test")})
        np.savez(cell.predictions, **found)  # type: ignore[arg-type]
        return
    if given.list or given.table:
        listed = "\n".join(f"{'done' if cell.is_done else '    '} {cell.name}" for cell in cells)
        sys.stdout.write(f"{table(work) if given.table else listed}\n")
        return
    failed = []
    for cell in cells:
        is_left_out = cell.method in CHEMPROP and given.chemprop is None
        if given.new:
            is_left_out = is_left_out or (cell.data, cell.split) != TIMED
        if is_left_out or (cell.is_timed if given.new else cell.is_done):
            continue
        began = time.perf_counter()
        try:
            write_tables(given.data.resolve(), cell)
            row = time_new(given.data.resolve(), cell, given.chemprop) if given.new else train(cell, given.chemprop)
            append_row(NAME, row)
        except (RuntimeError, OSError) as error:
            failed.append(cell.name)
            sys.stderr.write(f"{cell.name}: {error}\n")
            continue
        sys.stderr.write(
            f"{cell.name}: {row['metric']} {row['test']}, {row['cpu_s']} s CPU, {time.perf_counter() - began:.0f} s\n"
        )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
