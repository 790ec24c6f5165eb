"""Tables of a sweep: every variant with its budget, entropy over p (Figure 12), and Tables 2, 4 and 13 of the paper.

A variant is matched to a row of the paper by what it is, not by its name, and only where nothing else of it is changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exlm_cli.experiments.statistics import mean_and_deviation
from exlm_cli.format import NO_VALUE, NOT_DEFINED, format_duration, format_in_percent, format_large, format_ratio
from exlm_cli.report.cell_rows import divergences, seed_note
from exlm_cli.report.paper_numbers import TABLE_2, TABLE_4, TABLE_13, Budget, PaperTable
from exlm_cli.report.sweep_rows import ENTROPIES, SweepRow, task_figures
from exlm_cli.report.tables import ReportTable

_HEADINGS = {
    "loss": "loss",
    "mask_accuracy": "accuracy %",
    "entropy_bits": "bits",
    "entropy_posterior_bits": "weighted bits",
    "effective_states": "states",
    "path_entropy_bits": "path bits",
}
_LEGEND = (
    "loss: nats per target; accuracy: of masked tokens; bits: entropy of the predictions, mean over states; weighted "
    "bits: the same weighted by the posterior (an MLM has one state, so both are one); states: effective states of a "
    "mask; path bits: entropy of the path per target",
    "the loss of a variant without transitions is that of CTC on each mask alone, with [UNK] as blank",
    "each variant is scored under its own masking: figures at other p or k are of other tasks",
)
_DETAILS = ("k", "p", "pre-training", "parameters", "seeds", "time", "changes")
_COLUMNS = {"MNLI": "glue/mnli", "QNLI": "glue/qnli", "QQP": "glue/qqp", "RTE": "glue/rte"}
_AVERAGE = "Avg"

_EXLM: dict[str, Any] = {
    "objective": "exlm",
    "num_states_per_mask": 4,
    "mask_ratio": 0.15,
    "rope": "2d",
    "alignment": "dag",
    "relative_steps": 1.0,
}
_MLM: dict[str, Any] = {"objective": "mlm", "mask_ratio": 0.15, "relative_steps": 1.0}
_SPOKEN_OF = {
    "objective",
    "masking.num_states_per_mask",
    "masking.mask_ratio",
    "model.rope",
    "model.alignment",
    "train.max_steps",
}
"""Keys whose changes `SweepRow.about` tells."""


@dataclass(frozen=True)
class SweepShape:
    """How variants fill a table of the paper: its numbers, and what the variant of each row is."""

    paper: PaperTable
    rows: Mapping[str, Mapping[str, Any]]

    def match(self, rows: Sequence[SweepRow]) -> dict[str, SweepRow]:
        """Return the first variant that fits each row of the paper; rows without one are left out."""
        found: dict[str, SweepRow] = {}
        for name, wanted in self.rows.items():
            for row in rows:
                if _is_plain(row) and all(row.about[key] == value for key, value in wanted.items()):
                    found.setdefault(name, row)
        return found


SWEEP_SHAPES = (
    SweepShape(
        TABLE_2,
        {
            "ExLM w/o 2D RoPE": _EXLM | {"rope": "1d"},
            "ExLM w/o Transitions": _EXLM | {"alignment": "independent"},
            "Vanilla MLM": _MLM,
            "Vanilla MLM++": _MLM | {"relative_steps": 2.0},
            "ExLM": _EXLM,
        },
    ),
    SweepShape(
        TABLE_4,
        {
            f"{100 * p:g}% {name}": kind | {"mask_ratio": p}
            for p in (0.15, 0.387)
            for name, kind in {
                "Vanilla MLM": _MLM,
                **{f"ExLM-k={k}": _EXLM | {"num_states_per_mask": k} for k in (2, 4, 8)},
            }.items()
        },
    ),
    SweepShape(
        TABLE_13,
        {
            "ExLM w/o Transitions": _EXLM | {"alignment": "independent"},
            "ExLM w/ Sparse DAG": _EXLM | {"alignment": "sparse_dag"},
            "Vanilla MLM": _MLM,
            "ExLM": _EXLM,
        },
    ),
)


def sweep_tables(rows: Sequence[SweepRow], *, name: str) -> list[ReportTable]:
    """Return all tables of a sweep.

    Args:
        rows: Its variants.
        name: Its recipe.
    """
    return [_variants_table(rows, name), *_entropy_tables(rows), *paper_sweep_tables(rows)]


def paper_sweep_tables(rows: Sequence[SweepRow]) -> list[ReportTable]:
    """Return the tables of the paper that the variants fill, ours below its own rows.

    Those that have all their rows; where there is none, the one with the most. None without a score on their tasks.
    """
    columns = [column for column in _COLUMNS if any(not math.isnan(_score(row, column)) for row in rows)]
    matched = [(shape, shape.match(rows)) for shape in SWEEP_SHAPES]
    whole = [(shape, found) for shape, found in matched if len(found) == len(shape.rows)]
    fullest = max(matched, key=lambda pair: len(pair[1]))
    chosen = whole or ([fullest] if fullest[1] else [])
    return [_paper_table(shape.paper, found) for shape, found in chosen] if columns else []


def _variants_table(rows: Sequence[SweepRow], name: str) -> ReportTable:
    tasks = task_figures(rows)
    figures = [key for key in (*_HEADINGS, *tasks) if any(key in row.figures for row in rows)]
    cells = [(row.label, *(row.show(key) for key in figures), *_details(row)) for row in rows]
    diverged = divergences(rows, [row.label for row in rows])
    return ReportTable(
        "variants",
        f"Variants of {name}{seed_note(rows)}",
        ("variant", *(_HEADINGS.get(key, key) for key in figures), *_DETAILS),
        (tuple(cells),),
        (*_LEGEND, *_sampled_note(rows), *([f"some seeds diverged: {', '.join(diverged)}"] if diverged else [])),
        num_details=len(_DETAILS),
    )


def _entropy_tables(rows: Sequence[SweepRow]) -> list[ReportTable]:
    ratios = sorted({ratio for row in rows for ratio in row.entropy_at})
    if all(len(row.entropy_at) < 2 for row in rows):
        return []
    kinds = {"entropy_bits": "mean over states", "entropy_posterior_bits": "weighted by the posterior"}
    tables = []
    has_both = any("entropy_posterior_bits" in at for row in rows for at in row.entropy_at.values())
    for kind in ENTROPIES if has_both else ENTROPIES[:1]:
        cells = [(row.label, *(_entropy(row, ratio, kind) for ratio in ratios)) for row in rows]
        tables.append(
            ReportTable(
                f"figure-12-{'states' if kind == 'entropy_bits' else 'weighted'}",
                f"Entropy of the predictions in bits over the mask ratio p, {kinds[kind]} (Figure 12)",
                ("variant", *map(format_ratio, ratios)),
                (tuple(row for row in cells if any(cell != NO_VALUE for cell in row[1:])),),
            )
        )
    return tables


def _entropy(row: SweepRow, ratio: float, kind: str) -> str:
    values = row.entropies(ratio, kind)
    if not values:
        return NOT_DEFINED if "entropy_bits" in row.entropy_at.get(ratio, {}) else NO_VALUE
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.2f}" + ("" if math.isnan(deviation) else f" ± {deviation:.2f}")


def _paper_table(paper: PaperTable, found: Mapping[str, SweepRow]) -> ReportTable:
    theirs = [
        ("paper", name, *(NO_VALUE if v is None else f"{v:.1f}" for v in numbers), *_paper_budget(paper.budgets[name]))
        for name, numbers in paper.rows.items()
    ]
    ours = [
        ("ours", name, *(format_in_percent(_score(row, column)) for column in paper.columns), *_own_budget(row))
        for name, row in found.items()
    ]
    return ReportTable(
        f"table-{paper.number}",
        f"Table {paper.number}: {paper.caption}",
        ("source", "variant", *paper.columns, "seeds", "parameters", "pre-training"),
        (tuple(theirs), tuple(ours)),
        (
            "`paper`: the numbers that it prints; `ours`: this sweep, with the budget that stands beside it",
            "seeds: of pre-training x of fine-tuning; of the paper those of fine-tuning, it names no others",
            *_sampled_note(list(found.values())),
        ),
        num_keys=2,
        num_details=3,
    )


def _sampled_note(rows: Sequence[SweepRow]) -> list[str]:
    sampled = {task: size for row in rows for task, size in row.sampled.items()}
    tasks = "; ".join(f"{task} ({size:,} rows)" for task, size in sampled.items())
    return [f"fine-tuned on some of the task's rows (`task.max_rows`): {tasks}"] if sampled else []


def _score(row: SweepRow, column: str) -> float:
    """Return the accuracy on the task of a column, or the mean of all; NaN where one is missing."""
    if column == _AVERAGE:
        values = [_score(row, name) for name in _COLUMNS]
        return math.fsum(values) / len(values)
    return row.mean(f"{_COLUMNS[column]} accuracy")


def _is_plain(row: SweepRow) -> bool:
    """Say whether all that a variant changes is told by what it is; an MLM has no clones to embed."""
    others = set(row.changes) - _SPOKEN_OF
    return not others or (row.about["objective"] == "mlm" and others == {"model.clone_embedding"})


def _details(row: SweepRow) -> tuple[str, ...]:
    seeds, parameters, pretraining = _own_budget(row)
    changes = ", ".join(f"{key}={_plain(value)}" for key, value in row.changes.items())
    time = NO_VALUE if row.elapsed_s is None else format_duration(row.elapsed_s)
    k, p = row.about["num_states_per_mask"], row.about["mask_ratio"]
    return str(k), format_ratio(p), pretraining, parameters, seeds, time, changes or NO_VALUE


def _own_budget(row: SweepRow) -> tuple[str, str, str]:
    seeds = str(len(row.seeds)) + (f" x {row.num_finetuned}" if row.num_finetuned else "")
    if row.steps is None or row.parameters is None:
        return seeds, NO_VALUE, NO_VALUE
    sequences, tokens = row.about["batch_sequences"], row.about["batch_tokens"]
    step = f"{sequences:,} sequences" if sequences is not None else f"at most {tokens:,} tokens"
    return seeds, format_large(row.parameters), f"{row.steps:,} steps of {step}"


def _paper_budget(budget: Budget) -> tuple[str, str, str]:
    return budget.seeds, budget.parameters, budget.pretraining


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
