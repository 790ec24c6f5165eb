"""Results without any run: of the paper's own sweeps with the numbers that it prints, and of fine-tuning."""

import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

from exlm_cli.config.load import dump_recipe, load_recipe
from exlm_cli.config.sweep import SweepRecipe
from exlm_cli.experiments.results import CellRuns, masking_of
from exlm_cli.files import write_json
from exlm_cli.finetune.evaluation.calibration import PredictedRows
from exlm_cli.finetune.results import FinetunedRun, InitialWeights, RunResults
from exlm_cli.finetune.scores import (
    AVERAGE,
    MODEL,
    Origin,
    make_scores,
    score_rows_of,
    score_table,
    scores_csv,
    write_scores,
)
from exlm_cli.report.experiments.paper import TABLE_2, TABLE_4, TABLE_13
from exlm_cli.report.style import drawing
from exlm_cli.run_dir import RunInfo, describe_environment

TASKS = {"MNLI": "glue/mnli", "QNLI": "glue/qnli", "QQP": "glue/qqp", "RTE": "glue/rte"}

RATIOS = (0.0225, 0.15, 0.387, 0.622, 0.789)
PAIRS = [(k, p) for k, ratios in ((1, RATIOS), (2, RATIOS[1:]), (4, RATIOS[2:]), (8, RATIOS[3:])) for p in ratios]
FIGURE_3 = [81.3, 83.6, 83.3, 81.3, 79.6, 81.4, 83.1, 83.3, 81.3, 81.0, 83.2, 82.6, 79.2, 82.8]
FIGURE_5 = [1.62, 2.78, 3.95, 5.79, 7.26, 1.37, 2.30, 3.44, 5.48, 1.23, 1.77, 3.35, 1.22, 1.76]

# our labels by the rows of each table
ROWS = {
    "table-2": (TABLE_2, {
        "ExLM w/o 2D RoPE": "exlm-no-2d-rope", "ExLM w/o Transitions": "exlm-no-transitions", "Vanilla MLM": "mlm",
        "Vanilla MLM++": "mlm-plus-plus", "ExLM": "exlm",
    }),
    "table-4": (TABLE_4, {
        "15% Vanilla MLM": "mlm", "15% ExLM-k=2": "exlm-k2", "15% ExLM-k=4": "exlm", "15% ExLM-k=8": "exlm-k8",
        "38.7% Vanilla MLM": "mlm-p38.7", "38.7% ExLM-k=2": "exlm-k2-p38.7", "38.7% ExLM-k=4": "exlm-k4-p38.7",
        "38.7% ExLM-k=8": "exlm-k8-p38.7",
    }),
    "table-13": (TABLE_13, {
        "ExLM w/o Transitions": "exlm-no-transitions", "ExLM w/ Sparse DAG": "exlm-sparse-dag", "Vanilla MLM": "mlm",
        "ExLM": "exlm",
    }),
}  # fmt: skip


DIVERGED = "diverged"
"""In place of a run: fine-tuning that came to no end."""


def grid_results(seeds=(1,)):
    """Return Figures 3 and 5 for every cell and seed, counts exactly p^k; seed s adds (s - 1) / 100 bits."""
    return list(_grid_cells(seeds))


@functools.cache  # no test alters a cell
def _grid_cells(seeds):
    metrics = {pair: of_pair for pair, *of_pair in zip(PAIRS, FIGURE_5, FIGURE_3, strict=True)}
    cells = []
    for plan in load_recipe("repeat-mlm", [f"seeds={list(seeds)}"], kind=SweepRecipe).plan():
        k, p = pair_of(plan)
        entropy, accuracy = metrics[k, p]
        bits = entropy + 0.01 * (plan.seed - 1)
        of_cell = {"entropy_bits": bits, "loss": bits / 2, "perplexity": 2.0, "mask_accuracy": 0.5}
        tasks = {"glue/mnli": scores((accuracy / 100 - 0.01, accuracy / 100 + 0.01))}
        cells.append(measured(plan, {p: of_cell}, tasks, counts=corruption(p**k), steps=50_000))
    return sorted(cells, key=lambda cell: (PAIRS.index(pair_of(cell.plan)), cell.plan.seed))


def pair_of(plan):
    """Return k and p of a cell of a Repeated-MLM grid."""
    return plan.pretrain.masking.num_repeats, plan.pretrain.masking.mask_ratio


def measured(plan, metrics, tasks, *, counts=None, steps=600):
    """Return a cell with metrics by mask ratio, runs by task or `DIVERGED`, and counts of corrupted tokens.

    If `steps` is None it has diverged, after tokens were counted.
    """
    by_masking = {masking_of(ratio): {"valid": m} for ratio, m in metrics.items() if steps is not None}
    if counts is not None:
        named = {f"corrupted_{name}": value for name, value in counts.items()}
        by_masking.setdefault(masking_of(plan.mask_ratios[0]), {})["train"] = named
    rows = [
        row
        for masking, of_splits in by_masking.items()
        for row in score_rows_of(Origin(MODEL, masking, 0, plan.seed), of_splits, {})
    ]
    cell = CellRuns(plan, Path("runs/sweep/cells") / plan.name)
    vars(cell).update(
        made_of={"plan": plan, "metrics": metrics, "tasks": tasks, "counts": counts, "steps": steps},
        pretrain_scores=score_table(rows),
        run=RunInfo(**_environment(), command="pretrain", steps=steps, train_time_s=61.0, parameters=1_400_000),
        diverged="step 3" if steps is None else None,
        tuned={task: run for task, run in tasks.items() if run != DIVERGED and steps is not None},
        diverged_tasks={task: "step 3" for task, run in tasks.items() if run == DIVERGED},
    )
    return cell


@functools.cache
def _environment():
    return describe_environment().model_dump()


def altered(cell, *, metrics=None, tasks=None, **changes):
    """Return a cell with other metrics at its own mask ratio, tasks, counts or steps; a task that is None is left out.

    `steps=None` lets its training diverge.
    """
    made = vars(cell)["made_of"] | changes
    own = cell.plan.mask_ratios[0]
    made["metrics"] = made["metrics"] | {own: made["metrics"][own] | (metrics or {})}
    made["tasks"] = {task: run for task, run in (made["tasks"] | (tasks or {})).items() if run is not None}
    return measured(**made)


def write_cell(folder, cell):
    """Write the files of a cell, without its models, and return the folder."""
    (folder / "pretrain").mkdir(parents=True, exist_ok=True)
    write_json(folder / "pretrain/run.json", cell.run)
    (folder / "pretrain/recipe.yaml").write_text(dump_recipe(cell.plan.pretrain))
    (folder / "scores.csv").write_bytes(scores_csv(cell.pretrain_scores))
    for task, run in cell.tuned.items():
        of_task = folder / "finetune" / task.replace("/", "-")
        of_task.mkdir(parents=True)
        write_json(of_task / "results.json", run.results)
        write_scores(of_task, run.scores)
    return folder


def corruption(share, *, num_tokens=10_000, measured=None):
    """Return a count of corrupted tokens that is p^k exactly, or another."""
    return {
        "num_tokens": num_tokens,
        "expected": share,
        "expected_with_floor": share,
        "measured": share if measured is None else measured,
    }


def sweep_results(name, *, seeds=(1,), tasks=tuple(TASKS)):
    """Return a cell for every variant and seed of a shipped sweep; seed s adds s - 1 hundredths to each metric.

    A variant of k states has an entropy of 10 p / k bits at p, weighted by the posterior half of that.
    """
    return list(_sweep_cells(name, seeds, tasks))


@functools.cache
def _sweep_cells(name, seeds, tasks):
    cells = []
    for plan in load_recipe(name, [f"seeds={list(seeds)}"], kind=SweepRecipe).plan():
        added = 0.01 * (plan.seed - 1)
        pretrain = plan.pretrain
        k = pretrain.masking.num_states_per_mask
        has_dag = pretrain.objective == "exlm" and pretrain.model.alignment != "independent"
        metrics = {
            p: {"entropy_bits": 10 * p / k + added} | ({"entropy_posterior_bits": 5 * p / k + added} if has_dag else {})
            for p in plan.mask_ratios
            if isinstance(p, float)
        }
        own = next(iter(metrics))
        metrics[own] |= {"loss": 2.0 + added, "perplexity": 7.0, "mask_accuracy": 0.5}
        metrics[own] |= {"effective_states": 1.5, "path_entropy_bits": 0.25} if has_dag else {}
        cells.append(measured(plan, metrics, _printed_scores(plan.label, tasks, added)))
    return cells


def scores(values, **changes):
    """Return a run with accuracies on a task without labelled test rows; `changes` are other fields of its results."""
    return scored("", "glue/qnli", {"accuracy": [*values]}, **changes)


def _printed_scores(label, tasks, added):
    """Return three seeds around the accuracy that the paper prints for a variant, on some columns of its tables.

    For MNLI that is the mismatched accuracy; the matched one is 3 points higher.
    """
    printed = {
        column: table.value(row, column) for table, rows in ROWS.values() for row, own in rows.items() if own == label
        for column in tasks
    }  # fmt: skip
    shares = {column: value / 100 + added for column, value in printed.items() if value is not None}
    by_task = {}
    for column, share in shares.items():
        near = [share - 0.01, share, share + 0.01]
        metrics = {"accuracy": near}
        if column == "MNLI":
            metrics = {"accuracy": [value + 0.03 for value in near], "mismatched_accuracy": near}
        by_task[TASKS[column]] = scored("", TASKS[column], metrics)
    return by_task


EXLM = InitialWeights(
    checkpoint="/runs/pre/checkpoints/step-1200", sha256="e1" * 32, recipe="smiles-small", objective="exlm", steps=1200,
    tokens=13_100_000, num_states_per_mask=2, num_repeats=1, mask_ratio=0.15,
)  # fmt: skip
SCRATCH = EXLM.model_copy(update={"checkpoint": None, "sha256": None, "objective": "scratch", "steps": 0, "tokens": 0})


def scored(name, task, metrics, *, forests=None, labels=None, averages=None, split_seeds=(0,), **changed):
    """Return a run whose metrics have a value for each seed on each split of the rows, split by split.

    GLUE and SQuAD are scored on `valid` alone.

    Args:
        forests: Metrics of baselines, likewise.
        labels: Metrics of each label, also those of the baselines.
        averages: What the mean prediction of the seeds scores on every split of the rows; else the mean of the seeds.
    """
    seeds = changed.pop("seeds", tuple(range(1, 1 + len(next(iter(metrics.values()))) // len(split_seeds))))
    results = described(task, next(iter(metrics)), seeds, split_seeds, **changed)
    parts = [split for split in ("valid", "test") if split in results.split_sizes] or ["valid"]
    rows = []
    for model, of_model in {MODEL: metrics, **(forests or {})}.items():
        for number, split_seed in enumerate(split_seeds):
            place = slice(number * len(seeds), (number + 1) * len(seeds))
            for index, seed in enumerate((*seeds, AVERAGE)):
                whole = _at(of_model, place, index)
                whole |= averages if averages is not None and (model, seed) == (MODEL, AVERAGE) else {}
                own = {label: _at(of_label, place, index) for label, of_label in (labels or {}).items()}
                origin = Origin(model, "single", split_seed, seed)
                rows += score_rows_of(origin, dict.fromkeys(parts, whole), dict.fromkeys(parts, own))
    run = FinetunedRun(name, Path("runs") / name, results)
    vars(run)["scores"] = make_scores(rows)
    return run


def _at(metrics, place, index):
    """Return the values of a seed on one split, or after the last seed their means, of which the loss has none."""
    found = {}
    for metric, values in metrics.items():
        known = [value for value in values[place] if value is not None]
        if index < len(values[place]):
            found[metric] = values[place][index]
        elif metric != "loss":
            found[metric] = sum(known) / len(known) if known else None
    return found


def predicted_rows(loss, names, by_seed, targets, calibration, **more):
    """Return (K, N, C) predictions of rows, counted from 0, and their (N, C) truth."""
    rows = {"rows": np.arange(len(targets)), "targets": targets, **more}
    return PredictedRows(loss=loss, names=tuple(names), by_seed=by_seed, calibration=calibration, **rows)


def described(task, metric, seeds, split_seeds, **changed):
    """Return the results of such a run, whose epochs a metric has chosen."""
    has_test = task.startswith(("moleculenet", "csv"))
    values = {
        "task": task,
        "kind": "finetune",
        "recipe": "tiny",
        "init": EXLM,
        "parameters": 5_230_000,
        "input_kind": "smiles",
        "loss": "binary",
        "output_names": ("active",),
        "num_labels": 1,
        "split": "scaffold" if has_test else "official",
        "split_seeds": split_seeds,
        "points": ("single",) * len(split_seeds),
        "split_sizes": {"train": 1210, "valid": 151, **({"test": 152} if has_test else {})},
        "max_rows": None,
        "split_sha256": "ab" * 32,
        "labels_sha256": "",
        "selection_metric": metric,
        "is_greater_better": True,
        "aggregate": "mean" if has_test else "median",
        "seeds": seeds,
        "best_seed": seeds[0],
        "best_epochs": tuple(3 * seed for seed in seeds),
        "elapsed_s": 3725.4,
        "tokens_per_s": 12345.6,
        "outside_model_share": 0.0123,
        "notes": (),
        "grid_best": None,
        "grid": (),
    }
    return RunResults(**values | changed)


def svg_texts(path):
    """Return the texts of a drawing, which must be XML."""
    text = path.read_text(encoding="utf-8")
    ET.fromstring(text)
    return re.findall(r"<!-- (.*?) -->", text)


def words_of(figure):
    """Lay a figure out, where a warning of the layout is an error, and return its texts."""
    from matplotlib.text import Text  # not above: tests that draw nothing read this file

    with drawing():
        figure.draw_without_rendering()
    return {text.get_text() for text in figure.findobj(Text)}
