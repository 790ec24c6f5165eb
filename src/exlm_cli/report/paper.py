"""Tables of the paper with our rows below its own, each row with the budget behind it.

A further table is a `PaperTable` in `paper_numbers.py` and a `Shape` here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exlm_cli.finetune.results import InitialWeights
from exlm_cli.format import NO_VALUE, format_count, format_in_percent, format_parameters
from exlm_cli.report.paper_numbers import TABLE_1, TABLE_3, Budget, PaperTable
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


def paper_table(
    paper: PaperTable, rows_are: str, ours: Sequence[tuple[str, ...]], notes: Sequence[str], *, is_sparse: bool = False
) -> ReportTable:
    """Return a table of the paper with our rows below its own.

    Args:
        paper: What it prints.
        rows_are: Heading of the names of its rows.
        ours: Name, numbers and budget (`DETAILS`) of each of our rows.
        notes, is_sparse: Of the table.
    """
    theirs = []
    for name, numbers in paper.rows.items():
        budget = paper.budgets.get(name, Budget())
        shown = (NO_VALUE if v is None else f"{v:.1f}" for v in numbers)
        theirs.append(("paper", name, *shown, budget.seeds, budget.parameters, budget.pretraining))
    return ReportTable(
        f"table-{paper.number}",
        f"Table {paper.number}: {paper.caption}",
        ("source", rows_are, *paper.columns, *DETAILS),
        (tuple(theirs), tuple(("ours", *row) for row in ours)),
        tuple(notes),
        num_keys=2,
        num_details=len(DETAILS),
        is_sparse=is_sparse,
    )


def _fill(shape: Shape, runs: Sequence[FinetunedRun]) -> ReportTable:
    ours = [_own_row(shape, label, by_task) for label, by_task in _rows_by_model(runs).items()]
    ours += _baseline_rows(shape, runs)
    return paper_table(shape.paper, "model", ours, _notes(shape, runs), is_sparse=True)


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
    capped = [
        f"{run.name} ({format_count(run.results.split_sizes['valid'])} rows)"
        for run in runs
        if run.results.max_valid_rows
    ]
    if capped:
        notes.append("validated on some of the task's rows (`task.max_valid_rows`): " + "; ".join(capped))
    return notes


def _own_row(shape: Shape, label: str, by_task: Mapping[str, FinetunedRun]) -> tuple[str, ...]:
    """Return the scores of runs that begin with the same weights, and their budget."""
    cells, centers = {}, {}
    for column, (task, metric) in shape.scores.items():
        if task in by_task and (summary := by_task[task].summary(metric)) is not None:
            aggregate = by_task[task].results.aggregate
            cells[column], centers[column] = percent_score(summary, aggregate), summary.center(aggregate)
    mean, members = shape.mean
    known = [value for column in members if (value := centers.get(column)) is not None]
    if len(known) == len(members):
        cells[mean] = format_in_percent(math.fsum(known) / len(known))
    runs = list(by_task.values())
    seeds = sorted({len(run.results.seeds) for run in runs})
    parameters = dict.fromkeys(format_parameters(run.results.parameters) for run in runs)
    budget = " or ".join(map(str, seeds)), " or ".join(parameters), pretraining_budget(runs[0].results.init)
    return label, *(cells.get(column, NO_VALUE) for column in shape.paper.columns), *budget


def _baseline_rows(shape: Shape, runs: Sequence[FinetunedRun]) -> list[tuple[str, ...]]:
    """Return the scores of the baseline on each task that has one; no row where none has."""
    by_task = {run.results.task: run.results for run in runs if run.results.baseline is not None}
    cells, baseline = {}, None
    for column, (task, metric) in shape.scores.items():
        results = by_task.get(task)
        if results is not None and results.baseline is not None:
            baseline = baseline or results.baseline
            cells[column] = percent_score(results.baseline.metrics[results.scored_split].get(metric), results.aggregate)
    if baseline is None:
        return []
    row = (cells.get(column, NO_VALUE) for column in shape.paper.columns)
    return [(baseline.name, *row, str(len(baseline.seeds)), NO_VALUE, NO_VALUE)]


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
