"""Tables of the paper with our rows below its own: scores, and the budget behind each row so that none is mistaken.

A further table is a `PaperTable` in `paper_numbers.py` and a `Shape` here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exlm_cli.experiments.scores import FinetunedRun
from exlm_cli.format import NO_VALUE, format_in_percent, format_large
from exlm_cli.report.paper_numbers import TABLE_1, TABLE_3, Budget, PaperTable
from exlm_cli.report.score_text import percent, pretraining_budget
from exlm_cli.report.tables import ReportTable

DETAILS = ("seeds", "parameters", "pre-training")


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

    @property
    def tasks(self) -> frozenset[str]:
        """Tasks that have a column."""
        return frozenset(task for task, _ in self.scores.values())


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


def paper_tables(runs: Sequence[FinetunedRun], shapes: Sequence[Shape] = SHAPES) -> list[ReportTable]:
    """Return every table of the paper that has a task of one of the runs, ours below its own rows."""
    tables = []
    for shape in shapes:
        chosen = [run for run in runs if run.results["task"] in shape.tasks]
        if chosen:
            tables.append(_fill(shape, chosen))
    return tables


def _fill(shape: Shape, runs: Sequence[FinetunedRun]) -> ReportTable:
    paper = shape.paper
    theirs = [
        ("paper", name, *(NO_VALUE if v is None else f"{v:.1f}" for v in numbers), *_budget(paper.budgets.get(name)))
        for name, numbers in paper.rows.items()
    ]
    ours = [
        (
            "ours",
            label,
            *(_cell(shape, column, by_task) for column in paper.columns),
            *_own_budget(list(by_task.values())),
        )
        for label, by_task in _rows_by_model(runs).items()
    ]
    with_yardstick = {run.results["task"]: run for run in runs if run.results.get("yardstick") is not None}
    if with_yardstick:
        ours.append(_yardstick_row(shape, with_yardstick))
    spread = "medians" if any(run.results["aggregate"] == "median" for run in runs) else "mean ± standard deviation"
    sampled = [
        f"{run.name} ({run.results['split_sizes']['train']:,} rows)" for run in runs if run.results.get("max_rows")
    ]
    other_split = [f"{run.name} ({run.results['split']})" for run in runs if run.results["split"] not in shape.splits]
    return ReportTable(
        f"table-{paper.number}",
        f"Table {paper.number}: {paper.caption}",
        ("source", "model", *paper.columns, *DETAILS),
        (tuple(theirs), tuple(ours)),
        (
            f"`paper`: the numbers that it prints; `ours`: runs of this program, {spread} over seeds",
            *(["not the paper's split: " + "; ".join(other_split)] if other_split else []),
            *(["trained on some of the task's rows (`task.max_rows`): " + "; ".join(sampled)] if sampled else []),
        ),
        num_keys=2,
        num_details=len(DETAILS),
        is_sparse=True,
    )


def _cell(shape: Shape, column: str, by_task: Mapping[str, FinetunedRun]) -> str:
    if column == shape.mean[0]:
        values = [_value(shape, name, by_task) for name in shape.mean[1]]
        known = [value for value in values if value is not None]
        return format_in_percent(math.fsum(known) / len(known)) if len(known) == len(values) else NO_VALUE
    task, metric = shape.scores[column]
    if task not in by_task:
        return NO_VALUE
    return percent(by_task[task].summary(metric), by_task[task].results["aggregate"])


def _value(shape: Shape, column: str, by_task: Mapping[str, FinetunedRun]) -> float | None:
    task, metric = shape.scores[column]
    summary = by_task[task].summary(metric) if task in by_task else None
    return None if summary is None else summary[by_task[task].results["aggregate"]]


def _yardstick_row(shape: Shape, runs: Mapping[str, FinetunedRun]) -> tuple[str, ...]:
    shown = next(iter(runs.values())).results["yardstick"]
    cells = []
    for column in shape.paper.columns:
        task, metric = shape.scores.get(column, ("", ""))
        if task not in runs:
            cells.append(NO_VALUE)
            continue
        run = runs[task]
        of_split = run.results["yardstick"]["metrics"][run.scored_split]
        cells.append(percent(of_split.get(metric), run.results["aggregate"]))
    return ("ours", shown["name"], *cells, str(len(shown["seeds"])), NO_VALUE, NO_VALUE)


def _rows_by_model(runs: Sequence[FinetunedRun]) -> dict[str, dict[str, FinetunedRun]]:
    """Put runs that begin with the same weights into one row, by task; a second run of a task gets a row of its own."""
    rows: dict[str, dict[str, FinetunedRun]] = {}
    for run in runs:
        init = run.results["init"]
        label = f"{init['recipe']} ({init['objective']})"
        origin = (init["objective"], init["checkpoint"], init["recipe"])
        while label in rows and (run.results["task"] in rows[label] or _origin(rows[label]) != origin):
            label = f"{label} [{run.name}]" if not label.endswith(f"[{run.name}]") else f"{label}'"
        rows.setdefault(label, {})[run.results["task"]] = run
    return rows


def _origin(row: Mapping[str, FinetunedRun]) -> tuple[str, str | None, str]:
    init = next(iter(row.values())).results["init"]
    return init["objective"], init["checkpoint"], init["recipe"]


def _budget(budget: Budget | None) -> tuple[str, str, str]:
    return (NO_VALUE,) * 3 if budget is None else (budget.seeds, budget.parameters, budget.pretraining)


def _own_budget(runs: Sequence[FinetunedRun]) -> tuple[str, str, str]:
    seeds = sorted({len(run.results["seeds"]) for run in runs})
    parameters = dict.fromkeys(format_large(run.results["parameters"]) for run in runs)
    return " or ".join(map(str, seeds)), " or ".join(parameters), pretraining_budget(runs[0].results["init"])
