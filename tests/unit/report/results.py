"""Results without any run: of the paper's own sweeps with the numbers that it prints, and of fine-tuning."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from exlm_cli.config.load import load_recipe
from exlm_cli.config.sweep import SweepCell, SweepRecipe
from exlm_cli.experiments.results import (
    Corruption,
    DivergedTask,
    EntropyAt,
    SweepCellResult,
    TaskScores,
)
from exlm_cli.finetune.results import BaselineResult, InitialWeights, Replication, RunResults, summarise_values
from exlm_cli.report.paper import TABLE_2, TABLE_4, TABLE_13, PaperTable
from exlm_cli.report.scores import FinetunedRun

TASKS = {"MNLI": "glue/mnli", "QNLI": "glue/qnli", "QQP": "glue/qqp", "RTE": "glue/rte"}

RATIOS = (0.0225, 0.15, 0.387, 0.622, 0.789)
PAIRS = [(k, p) for k, ratios in ((1, RATIOS), (2, RATIOS[1:]), (4, RATIOS[2:]), (8, RATIOS[3:])) for p in ratios]
FIGURE_3 = [81.3, 83.6, 83.3, 81.3, 79.6, 81.4, 83.1, 83.3, 81.3, 81.0, 83.2, 82.6, 79.2, 82.8]
FIGURE_5 = [1.62, 2.78, 3.95, 5.79, 7.26, 1.37, 2.30, 3.44, 5.48, 1.23, 1.77, 3.35, 1.22, 1.76]

# our labels by the rows of each table
ROWS: dict[str, tuple[PaperTable, dict[str, str]]] = {
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


def grid_results(seeds: tuple[int, ...] = (1,), *, has_task: bool = True) -> list[SweepCellResult]:
    """Return Figures 3 and 5 for every cell and seed, counts exactly p^k; seed s adds (s - 1) / 100 bits."""
    figures = {pair: pair_figures for pair, *pair_figures in zip(PAIRS, FIGURE_5, FIGURE_3, strict=True)}
    results = []
    for cell in load_recipe("repeat-mlm", [f"seeds={list(seeds)}"], kind=SweepRecipe).plan():
        masking = cell.pretrain.masking
        k, p = masking.num_repeats, masking.mask_ratio
        entropy, accuracy = figures[k, p]
        bits = entropy + 0.01 * (cell.seed - 1)
        task = scores((accuracy / 100 - 0.01, accuracy / 100 + 0.01))
        result = SweepCellResult(
            **_named(cell),
            **dict(cell.description),
            corruption=corruption(p**k),
            steps=50_000,
            elapsed_s=61.0,
            parameters=1_400_000,
            metrics={"entropy_bits": bits, "loss": bits / 2, "perplexity": 2.0, "mask_accuracy": 0.5},
            entropy=(),
            finetune={"glue/mnli": task} if has_task else {},
        )
        results.append(result)
    return sorted(results, key=lambda result: (PAIRS.index((result.num_repeats, result.mask_ratio)), result.seed))


def corruption(share: float, *, num_tokens: int = 10_000, measured: float | None = None) -> Corruption:
    """Return a count of corrupted tokens that is p^k exactly, or another."""
    return Corruption(
        num_tokens=num_tokens,
        num_corrupted=0,
        expected=share,
        expected_with_floor=share,
        measured=share if measured is None else measured,
        standard_error=(share * (1 - share) / num_tokens) ** 0.5,
    )


def sweep_results(
    name: str, *, seeds: tuple[int, ...] = (1,), tasks: tuple[str, ...] = tuple(TASKS)
) -> list[SweepCellResult]:
    """Return a result for every variant and seed of a shipped sweep; seed s adds s - 1 hundredths to each figure.

    A variant of k states has an entropy of 10 p / k bits at p, weighted by the posterior half of that.
    """
    recipe = load_recipe(name, [f"seeds={list(seeds)}"], kind=SweepRecipe)
    results = []
    for cell in recipe.plan():
        added = 0.01 * (cell.seed - 1)
        pretrain = cell.pretrain
        k, own = pretrain.masking.num_states_per_mask, pretrain.masking.mask_ratio
        has_dag = pretrain.objective == "exlm" and pretrain.model.alignment != "independent"
        entropies = [
            EntropyAt(
                objective=pretrain.objective,
                mask_ratio=p,
                num_repeats=1,
                num_states_per_mask=k,
                entropy_bits=10 * p / k + added,
                entropy_posterior_bits=5 * p / k + added if has_dag else None,
            )
            for p in dict.fromkeys((own, *recipe.entropy_ratios))
        ]
        metrics: dict[str, float | None] = {"loss": 2.0 + added, "perplexity": 7.0, "mask_accuracy": 0.5}
        metrics["entropy_bits"] = entropies[0].entropy_bits
        if has_dag:
            metrics["entropy_posterior_bits"] = entropies[0].entropy_posterior_bits
            metrics |= {"effective_states": 1.5, "path_entropy_bits": 0.25}
        result = SweepCellResult(
            **_named(cell),
            **dict(cell.description),
            corruption=None,
            steps=600,
            elapsed_s=61.0,
            parameters=1_400_000,
            metrics=metrics,
            entropy=tuple(entropies),
            finetune=_printed_scores(cell.label, tasks, added),
        )
        results.append(result)
    return results


def diverge(result: SweepCellResult) -> SweepCellResult:
    """Return the result of the same cell whose training came to no end."""
    measured = {"steps", "elapsed_s", "parameters", "metrics", "entropy", "finetune"}
    kept = {name: value for name, value in dict(result).items() if name not in measured}
    return SweepCellResult(**kept | {"diverged": "loss is nan"})


def with_scores(result: SweepCellResult, **by_task: TaskScores | DivergedTask) -> SweepCellResult:
    """Return the result with other scores on GLUE tasks, or on the task of a whole name."""
    named = {task if "_" not in task else task.replace("_", "/"): found for task, found in by_task.items()}
    return result.model_copy(update={"finetune": {**result.finetune, **named}})


def scores(values: tuple[float | None, ...], *, metric: str = "accuracy", **changed: Any) -> TaskScores:
    """Return the scores of a task without labelled test rows; `changed` are other fields of its results."""
    return TaskScores(identity="x", results=scored("", "glue/qnli", {metric: [*values]}, **changed).results)


def _named(cell: SweepCell) -> dict[str, Any]:
    return {"label": cell.label, "seed": cell.seed, "pretrain_identity": "x"}


def _printed_scores(label: str, tasks: tuple[str, ...], added: float) -> dict[str, TaskScores | DivergedTask]:
    """Return three seeds around the accuracy that the paper prints for a variant, on some columns of its tables.

    For MNLI that is the mismatched accuracy; the matched one is 3 points higher.
    """
    printed = {
        column: table.value(row, column) for table, rows in ROWS.values() for row, own in rows.items() if own == label
        for column in tasks
    }  # fmt: skip
    shares = {column: value / 100 + added for column, value in printed.items() if value is not None}
    by_task: dict[str, TaskScores | DivergedTask] = {}
    for column, share in shares.items():
        printed_values = (share - 0.01, share, share + 0.01)
        by_task[TASKS[column]] = scores(printed_values)
        if column == "MNLI":
            both = {"accuracy": [value + 0.03 for value in printed_values], "mismatched_accuracy": [*printed_values]}
            by_task[TASKS[column]] = TaskScores(identity="x", results=scored("", "glue/mnli", both).results)
    return by_task


Values = dict[str, list[float | None]]

EXLM = InitialWeights(
    checkpoint="/runs/pre/checkpoints/step-1200", sha256="e1" * 32, recipe="smiles-small", objective="exlm", steps=1200,
    tokens=13_100_000, num_states_per_mask=2, num_repeats=1, mask_ratio=0.15,
)  # fmt: skip
SCRATCH = EXLM.model_copy(update={"checkpoint": None, "sha256": None, "objective": "scratch", "steps": 0, "tokens": 0})


def scored(name: str, task: str, metrics: Values, **changed: Any) -> FinetunedRun:
    """Return a run of as many seeds as each metric has values; GLUE and SQuAD are scored on `valid` alone.

    Unless `known_rows` says otherwise, every row has a target, and half of the rows are of either class.
    """
    has_test = task.startswith(("moleculenet", "csv"))
    summaries = {metric: summarise_values(values) for metric, values in metrics.items()}
    seeds = tuple(range(1, 1 + len(next(iter(metrics.values())))))
    values: dict[str, Any] = {
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
        "split_sizes": {"train": 1210, "valid": 151, "test": 152},
        "max_rows": None,
        "split_sha256": "ab" * 32,
        "labels_sha256": "",
        "selection_metric": next(iter(metrics)),
        "is_greater_better": True,
        "aggregate": "mean" if has_test else "median",
        "seeds": seeds,
        "best_epochs": tuple(3 * seed for seed in seeds),
        "elapsed_s": 3725.4,
        "tokens_per_s": 12345.6,
        "outside_model_share": 0.0123,
        "notes": (),
        "metrics": {"valid": summaries, "test": summaries} if has_test else {"valid": summaries},
        "grid_best": None,
        "grid": (),
    }
    values |= changed
    halves = ((part, n // 2, n - n // 2) for part, n in values["split_sizes"].items() if part != "train")
    known = {part: ((a + b,) if values["loss"] == "regression" else (a, b),) for part, a, b in halves}
    return FinetunedRun(name, Path("runs") / name, RunResults(**{"known_rows": known, **values}))


def svg_texts(path: Path) -> list[str]:
    """Return the texts of a drawing, which must be XML."""
    text = path.read_text(encoding="utf-8")
    ET.fromstring(text)
    return re.findall(r"<!-- (.*?) -->", text)


def replicated(metrics: Values, of_baseline: Values) -> Replication:
    """Return the scores of two splits, the values of the first split before those of the second."""
    summaries = {metric: summarise_values(values) for metric, values in metrics.items()}
    return Replication(
        split_seeds=(0, 1),
        best_epochs=(3, 8),
        elapsed_s=7325.0,
        tokens_per_s=500.0,
        outside_model_share=0.25,
        metrics={"test": summaries, "valid": summaries},
        labels={},
        intervals={"test": dict.fromkeys(metrics, (0.5, 0.75))},
        baseline=baseline(of_baseline),
    )


def baseline(metrics: Values) -> BaselineResult:
    summaries = {metric: summarise_values(values) for metric, values in metrics.items()}
    return BaselineResult(name="ECFP4 + random forest", seeds=(1, 2), metrics={"test": summaries, "valid": summaries})
