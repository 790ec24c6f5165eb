"""Tables of the paper with our rows below its own, each row with the budget behind it.

A further table is a `PaperTable` in `paper_numbers.py` and a `Shape` here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exlm_cli.finetune.results import InitialWeights
from exlm_cli.format import NO_VALUE, format_count, format_in_percent, format_parameters
from exlm_cli.report.paper_numbers import TABLE_1, TABLE_3, PaperTable
from exlm_cli.report.scores import FinetunedRun, percent_score, pretraining_budget
from exlm_cli.report.tables import ReportTable

DETAILS = ("seeds", "parameters", "pre-training")
"""Headings of the budget of a row."""


@dataclass(frozen=True)
class Shape:
    """How runs fill a table of the paper.

    Attributes:
        paper: Its numbers.
        scores: Task and metric of each column but the mean.
        mean: Column that holds the mean, and the columns it is over.
        splits: Names of the splits that follow the paper's protocol.
    """

    paper: PaperTable
    scores: Mapping[str, tuple[str, str]]
    mean: tuple[str, tuple[str, ...]]
    splits: tuple[str, ...]


# App. M names the metrics of Table 3; what it leaves out is accuracy, as in RoBERTa. Its mean is over the eight GLUE
# tasks, MNLI matched.
_GLUE = {
    "MNLI-m": ("glue/mnli", "accuracy"),
    "QQP": ("glue/qqp", "accuracy"),
    "QNLI": ("glue/qnli", "accuracy"),
    "SST-2": ("glue/sst2", "accuracy"),
    "CoLA": ("glue/cola", "matthews_corrcoef"),
    "RTE": ("glue/rte", "accuracy"),
    "MRPC": ("glue/mrpc", "accuracy"),
    "STS-B": ("glue/stsb", "spearmanr"),
}
SHAPES = (
    Shape(
        TABLE_1,
        {column: (f"moleculenet/{column.lower()}", "roc_auc") for column in TABLE_1.columns[:-1]},
        ("Mean", TABLE_1.columns[:-1]),
        ("scaffold", "scaffold-chiral"),
    ),
    Shape(
        TABLE_3,
        {
            **_GLUE,
            "MNLI-mm": ("glue/mnli", "mismatched_accuracy"),
            "EM": ("squad/v2", "exact_match"),
            "F1": ("squad/v2", "f1"),
        },
        ("MEAN", tuple(_GLUE)),
        ("official",),
    ),
)


def paper_tables(runs: Sequence[FinetunedRun]) -> list[ReportTable]:
    """Return every table of the paper that has a task of one of the runs, our rows below the paper's."""
    tables = []
    for shape in SHAPES:
        tasks = {task for task, _ in shape.scores.values()}
        if chosen := [run for run in runs if run.results.task in tasks]:
            tables.append(_fill(shape, chosen))
    return tables


def paper_rows(paper: PaperTable) -> tuple[tuple[str, ...], ...]:
    """Return the rows that the paper prints: source, model, numbers, and its budget under `DETAILS`."""
    rows = []
    for name, numbers in paper.rows.items():
        budget = paper.budgets.get(name)
        details = (NO_VALUE,) * 3 if budget is None else (budget.seeds, budget.parameters, budget.pretraining)
        rows.append(("paper", name, *(NO_VALUE if v is None else f"{v:.1f}" for v in numbers), *details))
    return tuple(rows)


def _fill(shape: Shape, runs: Sequence[FinetunedRun]) -> ReportTable:
    paper = shape.paper
    ours = [_own_row(shape, label, by_task) for label, by_task in _rows_by_model(runs).items()]
    if row := _baseline_row(shape, runs):
        ours.append(row)
    return ReportTable(
        f"table-{paper.number}",
        f"Table {paper.number}: {paper.caption}",
        ("source", "model", *paper.columns, *DETAILS),
        (paper_rows(paper), tuple(ours)),
        tuple(_notes(shape, runs)),
        num_keys=2,
        num_details=len(DETAILS),
        is_sparse=True,
    )


def _notes(shape: Shape, runs: Sequence[FinetunedRun]) -> list[str]:
    has_medians = any(run.results.aggregate == "median" for run in runs)
    spread = "medians" if has_medians else "mean ± standard deviation"
    notes = [f"`paper`: the numbers that it prints; `ours`: runs of this program, {spread} over seeds"]
    if other := [f"{run.name} ({run.results.split})" for run in runs if run.results.split not in shape.splits]:
        notes.append("not the paper's split: " + "; ".join(other))
    sampled = [
        f"{run.name} ({format_count(run.results.split_sizes['train'])} rows)" for run in runs if run.results.max_rows
    ]
    if sampled:
        notes.append("trained on some of the task's rows (`task.max_rows`): " + "; ".join(sampled))
    return notes


def _own_row(shape: Shape, label: str, by_task: Mapping[str, FinetunedRun]) -> tuple[str, ...]:
    """Return the scores of runs that begin with the same weights, and their budget."""
    runs = list(by_task.values())
    seeds = sorted({len(run.results.seeds) for run in runs})
    parameters = dict.fromkeys(format_parameters(run.results.parameters) for run in runs)
    budget = " or ".join(map(str, seeds)), " or ".join(parameters), pretraining_budget(runs[0].results.init)
    return ("ours", label, *(_cell(shape, column, by_task) for column in shape.paper.columns), *budget)


def _cell(shape: Shape, column: str, by_task: Mapping[str, FinetunedRun]) -> str:
    if column == shape.mean[0]:
        values = [_value(shape, name, by_task) for name in shape.mean[1]]
        known = [value for value in values if value is not None]
        return format_in_percent(math.fsum(known) / len(known)) if len(known) == len(values) else NO_VALUE
    task, metric = shape.scores[column]
    if task not in by_task:
        return NO_VALUE
    return percent_score(by_task[task].summary(metric), by_task[task].results.aggregate)


def _value(shape: Shape, column: str, by_task: Mapping[str, FinetunedRun]) -> float | None:
    task, metric = shape.scores[column]
    summary = by_task[task].summary(metric) if task in by_task else None
    return None if summary is None else summary.center(by_task[task].results.aggregate)


def _baseline_row(shape: Shape, runs: Sequence[FinetunedRun]) -> tuple[str, ...]:
    """Return the scores of the baseline on each task that has one; empty where none has."""
    by_task = {run.results.task: run.results for run in runs if run.results.baseline is not None}
    shown = next((results.baseline for results in by_task.values()), None)
    if shown is None:
        return ()
    cells = []
    for column in shape.paper.columns:
        task, metric = shape.scores.get(column, ("", ""))
        results = by_task.get(task)
        if results is None or results.baseline is None:
            cells.append(NO_VALUE)
        else:
            summary = results.baseline.metrics[results.scored_split].get(metric)
            cells.append(percent_score(summary, results.aggregate))
    return ("ours", shown.name, *cells, str(len(shown.seeds)), NO_VALUE, NO_VALUE)


def _rows_by_model(runs: Sequence[FinetunedRun]) -> dict[str, dict[str, FinetunedRun]]:
    """Put runs that begin with the same weights into one row, by task; a second run of a task gets a row of its own."""
    rows: dict[str, dict[str, FinetunedRun]] = {}
    for run in runs:
        init = run.results.init
        label = f"{init.recipe} ({init.objective})"
        while label in rows and (run.results.task in rows[label] or not _is_same_origin(rows[label], init)):
            label = f"{label} [{run.name}]" if not label.endswith(f"[{run.name}]") else f"{label}'"
        rows.setdefault(label, {})[run.results.task] = run
    return rows


def _is_same_origin(row: Mapping[str, FinetunedRun], init: InitialWeights) -> bool:
    first = next(iter(row.values())).results.init
    return (first.objective, first.checkpoint, first.recipe) == (init.objective, init.checkpoint, init.recipe)
