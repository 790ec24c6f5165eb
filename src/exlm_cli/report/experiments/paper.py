"""Tables of the paper with the rows of our runs added, each row with its training budget.

A further table is a `PaperTable` and a `Shape`. `tests/unit/report/test_paper.py` checks the means that the
paper prints against the numbers they are means of.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from exlm_cli.finetune.results import FinetunedRun
from exlm_cli.finetune.scores import BASELINE_NAMES, MODEL
from exlm_cli.format import NO_VALUE, decimals, format_count, format_parameters
from exlm_cli.report.finetuning.scores import percent_entry, pretraining_budget
from exlm_cli.report.tables import Entry, Number, ReportTable, Row
from exlm_cli.tasks.base import SPLITS
from exlm_cli.tasks.glue import GLUE_TASKS, NUM_MISMATCHED
from exlm_cli.tasks.moleculenet import MOLECULENET_SETS
from exlm_cli.tasks.squad.files import NUM_QUESTIONS

Numbers = tuple[float | None, ...]

DETAILS = ("seeds", "parameters", "pre-training")
"""Headings of the budget of a row."""
_MAX_ROWS_OFF = 5
"""Rows by which a split may differ from the benchmark's: public files differ, and unusable rows are left out."""


class Budget(NamedTuple):
    """Seeds, parameters and pre-training of a row, as the appendices give them; a dash where they do not."""

    seeds: str = NO_VALUE
    parameters: str = NO_VALUE
    pretraining: str = NO_VALUE


@dataclass(frozen=True)
class PaperTable:
    """One table.

    Attributes:
        columns: Headings of its numbers.
        rows: Numbers by the name of a model.
        budgets: Of rows that the authors trained themselves.
        usual_budget: Of all other rows.
    """

    number: int
    caption: str
    columns: tuple[str, ...]
    rows: Mapping[str, Numbers]
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    usual_budget: Budget = field(default_factory=Budget)

    def value(self, row: str, column: str) -> float | None:
        """Return one number."""
        return self.rows[row][self.columns.index(column)]


# App. J, Table 7; Table 9 for the seeds
_SMILES_BUDGET = Budget("3", "50.5 M", "120,000 steps of at most 64K tokens, 19 M molecules")
# App. N, Table 10
_TEXT_BUDGET = Budget("5", "128 M", "125,000 steps of 2,048 sequences, Wikipedia and BookCorpus")
_LARGE_TEXT_BUDGET = Budget("5", "361 M", _TEXT_BUDGET.pretraining)

# Tables 5 and 6, App. B: it gives 128 M parameters for these models and three seeds of fine-tuning, but no seeds of
# pre-training
_ABLATION_BUDGET = Budget("3", "128 M", "50,000 steps of 4,096 sequences")
# App. Q.2
_LONG_ABLATION_BUDGET = Budget("3", "128 M", "100,000 steps of 4,096 sequences")

TABLE_1 = PaperTable(
    1,
    "ROC-AUC (%) on MoleculeNet, scaffold split, mean of three seeds",
    ("BACE", "BBBP", "Tox21", "SIDER", "MUV", "ClinTox", "ToxCast", "Mean"),
    {
        "D-MPNN": (80.9, 71.0, 75.9, 57.0, 78.6, 90.6, 65.5, 74.2),
        "Attentive FP": (78.4, 64.3, 76.1, 60.6, 76.6, 84.7, 63.7, 72.1),
        "N-Gram RF": (77.9, 69.7, 74.3, 66.8, 76.9, 77.5, None, None),
        "GROVER": (82.6, 70.0, 74.3, 64.8, 62.5, 81.2, 65.4, 71.5),
        "GraphMVP": (81.2, 72.4, 75.9, 63.9, 77.7, 79.1, 63.1, 73.3),
        "Mole-BERT": (80.8, 71.9, 76.8, 62.8, 78.6, 78.9, 64.3, 73.4),
        "3D InfoMax": (79.7, 69.1, 74.5, 60.6, 74.4, 79.9, 64.4, 71.8),
        "SMILES-BERT (MLM)": (77.8, 68.6, 75.1, 61.2, 75.1, 89.8, 64.9, 73.2),
        "ExLM": (79.6, 72.8, 78.2, 64.5, 78.8, 91.6, 66.9, 76.1),
    },
    {"SMILES-BERT (MLM)": _SMILES_BUDGET, "ExLM": _SMILES_BUDGET},
)

_ABLATION_COLUMNS = ("MNLI", "QNLI", "QQP", "RTE", "Avg")

TABLE_2 = PaperTable(
    2,
    "ablations, accuracy (%) on GLUE development sets",
    _ABLATION_COLUMNS,
    {
        "ExLM w/o 2D RoPE": (84.6, 91.1, 91.3, 56.7, 80.9),
        "ExLM w/o Transitions": (83.8, 90.9, 91.1, 55.6, 80.4),
        "Vanilla MLM": (83.6, 90.0, 90.3, 54.7, 79.6),
        "Vanilla MLM++": (84.4, 91.2, 90.6, 56.3, 80.7),
        "ExLM": (85.1, 91.4, 91.3, 57.6, 81.4),
    },
    {"Vanilla MLM++": _LONG_ABLATION_BUDGET},
    _ABLATION_BUDGET,
)

TABLE_3 = PaperTable(
    3,
    "GLUE and SQuAD 2.0 development sets (%), median of five seeds",
    ("MNLI-m", "MNLI-mm", "QQP", "QNLI", "SST-2", "CoLA", "RTE", "MRPC", "STS-B", "MEAN", "EM", "F1"),
    {
        "BERT": (84.5, None, 91.3, 91.7, 93.2, 58.9, 68.6, 87.3, 89.5, 83.1, 73.7, 76.3),
        "ALBERT": (81.6, None, None, None, 90.3, None, None, None, None, None, 77.1, 80.0),
        "XLNet": (85.8, 85.4, None, None, 92.7, None, None, None, None, None, 78.5, 81.3),
        "UniLMv2": (86.1, 86.1, None, None, 93.2, None, None, None, None, None, 80.9, 83.6),
        "TUPE": (86.2, 86.2, 91.3, 92.2, 93.3, 63.6, 73.6, 89.9, 89.2, 84.9, None, None),
        "RoBERTa (MLM)": (85.9, 85.8, 91.6, 92.3, 93.7, 64.3, 75.5, 88.7, 89.5, 85.2, 78.3, 81.5),
        "ExLM": (86.9, 86.7, 92.0, 93.1, 93.9, 64.6, 78.8, 89.6, 90.5, 86.2, 82.0, 84.6),
        "ExLM large": (87.8, 87.5, 92.2, 93.8, 94.5, 65.3, 79.1, 90.4, 91.2, 86.9, 82.6, 85.0),
    },
    {"RoBERTa (MLM)": _TEXT_BUDGET, "ExLM": _TEXT_BUDGET, "ExLM large": _LARGE_TEXT_BUDGET},
)

TABLE_4 = PaperTable(
    4,
    "mask ratio p and states k, accuracy (%) on GLUE development sets",
    _ABLATION_COLUMNS,
    {
        "15% Vanilla MLM": (83.6, 90.0, 90.3, 54.7, 79.6),
        "15% ExLM-k=2": (84.6, 91.3, 91.1, 56.7, 80.9),
        "15% ExLM-k=4": (85.1, 91.4, 91.3, 57.6, 81.4),
        "15% ExLM-k=8": (84.4, 91.0, 90.9, 56.9, 80.8),
        "38.7% Vanilla MLM": (83.3, 90.0, 90.2, 53.3, 79.2),
        "38.7% ExLM-k=2": (84.1, 91.4, 91.0, 55.4, 80.5),
        "38.7% ExLM-k=4": (84.9, 91.6, 91.2, 57.0, 81.2),
        "38.7% ExLM-k=8": (84.3, 90.9, 90.7, 56.8, 80.7),
    },
    usual_budget=_ABLATION_BUDGET,
)

TABLE_13 = PaperTable(
    13,
    "ExLM with fewer edges, accuracy (%) on GLUE development sets",
    _ABLATION_COLUMNS,
    {
        "ExLM w/o Transitions": (83.8, 90.9, 91.1, 55.6, 80.4),
        "ExLM w/ Sparse DAG": (84.4, 91.2, 91.3, 56.9, 81.0),
        "Vanilla MLM": (83.6, 90.0, 90.3, 54.7, 79.6),
        "ExLM": (85.1, 91.4, 91.3, 57.6, 81.4),
    },
    usual_budget=_ABLATION_BUDGET,
)


@dataclass(frozen=True)
class Shape:
    """How runs fill a table of the paper.

    Attributes:
        scores: Task and metric of each column but the mean.
        mean: Column that holds the mean, and the columns it is over.
        splits: Names of the splits that follow the paper's protocol.
        sizes: Rows of each split by task, where it has the benchmark's own rows.
    """

    paper: PaperTable
    scores: Mapping[str, tuple[str, str]]
    mean: tuple[str, tuple[str, ...]]
    splits: tuple[str, ...]
    sizes: Mapping[str, Mapping[str, int]]


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
_GLUE_SIZES = {
    f"glue/{task.name}": {
        "train": task.num_train,
        "valid": task.num_valid + (NUM_MISMATCHED if task.name == "mnli" else 0),
    }
    for task in GLUE_TASKS.values()
}
SHAPES = (
    Shape(
        TABLE_1,
        {column: (f"moleculenet/{column.lower()}", "roc_auc") for column in TABLE_1.columns[:-1]},
        ("Mean", TABLE_1.columns[:-1]),
        ("scaffold",),
        {f"moleculenet/{name}": dict(zip(SPLITS, s.table_9, strict=True)) for name, s in MOLECULENET_SETS.items()},
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
        {**_GLUE_SIZES, "squad/v2": NUM_QUESTIONS},
    ),
)


def paper_tables(runs: Sequence[FinetunedRun]) -> list[ReportTable]:
    """Return the tables of the paper that contain a task of the runs, our rows below the paper's."""
    tables = []
    for shape in SHAPES:
        tasks = {task for task, _ in shape.scores.values()}
        if chosen := [run for run in runs if run.results.task in tasks]:
            tables.append(_fill(shape, chosen))
    return tables


def paper_table(
    paper: PaperTable, rows_are: str, ours: Sequence[Row], notes: Sequence[str], *, is_sparse: bool = False
) -> ReportTable:
    """Return a table of the paper with our rows below its own.

    Args:
        rows_are: Heading of the names of its rows.
        ours: Name, numbers and budget (`DETAILS`) of each of our rows.
    """
    theirs: list[Row] = []
    for name, numbers in paper.rows.items():
        shown = (Number(math.nan if v is None else v, decimals(1)) for v in numbers)
        theirs.append(("paper", name, *shown, *paper.budgets.get(name, paper.usual_budget)))
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
    over = "single seeds on all splits" if any(len(run.results.split_seeds) > 1 for run in runs) else "single seeds"
    notes = [f"`paper`: the numbers that it prints; `ours`: runs of this program, {spread} of {over}"]
    if shape.paper is TABLE_1:
        notes.append(
            "the paper's models read SMILES as the files write them, whose spelling alone predicts much of BBBP and "
            "ClinTox; there, runs on canonical SMILES cannot be compared with its numbers"
        )
    if other := [f"{run.name} ({run.results.split})" for run in runs if run.results.split not in shape.splits]:
        notes.append("not the paper's split: " + "; ".join(other))
    if differing := [f"{run.name} ({sizes})" for run in runs if (sizes := _other_sizes(shape, run))]:
        notes.append("not the benchmark's number of rows: " + "; ".join(differing))
    for key, split, verb in (("max_rows", "train", "trained"), ("max_valid_rows", "valid", "validated")):
        limited = [run for run in runs if getattr(run.results, key)]
        if named := "; ".join(f"{run.name} ({format_count(run.results.split_sizes[split])} rows)" for run in limited):
            notes.append(f"{verb} on some of the task's rows (`task.{key}`): {named}")
    return notes


def _other_sizes(shape: Shape, run: FinetunedRun) -> str:
    """Return which splits, used whole, differ in size from the benchmark's; empty if the run is split differently."""
    results = run.results
    if results.split not in shape.splits:
        return ""
    limits = {"train": results.max_rows, "valid": results.max_valid_rows}
    return ", ".join(
        f"{split} {format_count(results.split_sizes.get(split, 0))} instead of {format_count(size)}"
        for split, size in shape.sizes[results.task].items()
        if limits.get(split) is None and abs(results.split_sizes.get(split, 0) - size) > _MAX_ROWS_OFF
    )


def _own_row(shape: Shape, label: str, by_task: Mapping[str, FinetunedRun]) -> Row:
    """Return the scores of runs that begin with the same weights, and their budget."""
    runs = list(by_task.values())
    seeds = sorted({len(run.results.seeds) for run in runs})
    parameters = dict.fromkeys(format_parameters(run.results.parameters) for run in runs)
    budget = " or ".join(map(str, seeds)), " or ".join(parameters), pretraining_budget(runs[0].results.init)
    return label, *_scores(shape, by_task, MODEL), *budget


def _baseline_rows(shape: Shape, runs: Sequence[FinetunedRun]) -> list[Row]:
    """Return a row for each baseline, with its scores on each task that has it."""
    tasks = {task for task, _ in shape.scores.values()}
    rows: list[Row] = []
    for model, name in BASELINE_NAMES.items():
        by_task = {run.results.task: run for run in runs if run.results.task in tasks and model in run.scores.baselines}
        if by_task:
            seeds = sorted({len(run.results.seeds) for run in by_task.values()})
            entries = _scores(shape, by_task, model)
            rows.append((name, *entries, " or ".join(map(str, seeds)), NO_VALUE, NO_VALUE))
    return rows


def _scores(shape: Shape, by_task: Mapping[str, FinetunedRun], model: str) -> list[Entry]:
    """Return the entries of a row: a score for each task that has one, and their mean if every task of it has one.

    As in the paper, a score is the mean or median of single seeds.
    """
    entries: dict[str, Entry] = {}
    centers: dict[str, float] = {}
    for column, (task, metric) in shape.scores.items():
        if task in by_task and metric in (run := by_task[task]).scores.names(run.results.scored_split):
            spread, aggregate = run.seeds(metric, model=model), run.results.aggregate
            entries[column], centers[column] = percent_entry(spread, aggregate), spread.center(aggregate)
    mean, members = shape.mean
    known = [value for column in members if not math.isnan(value := centers.get(column, math.nan))]
    if len(known) == len(members):
        entries[mean] = Number(100 * math.fsum(known) / len(known), decimals(1))
    return [entries.get(column, NO_VALUE) for column in shape.paper.columns]


def _rows_by_model(runs: Sequence[FinetunedRun]) -> dict[str, dict[str, FinetunedRun]]:
    """Put runs that begin with the same weights into rows, by task; a second run of a task is in the next row."""
    rows: dict[str, dict[str, FinetunedRun]] = {}
    origins: dict[str, tuple[str | None, str]] = {}
    for run in runs:
        task, init = run.results.task, run.results.init
        name = f"{init.recipe} ({init.objective})"
        origin = (init.sha256, name)
        label = next((known for known, row in rows.items() if origins[known] == origin and task not in row), None)
        if label is None:
            label = name
            while label in rows:
                label = f"{label}'" if label.endswith(f"[{run.name}]") else f"{label} [{run.name}]"
            rows[label], origins[label] = {}, origin
        rows[label][task] = run
    return rows
