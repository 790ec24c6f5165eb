"""The variants of a sweep, seeds together: rows for every table and figure, and a CSV of all there is."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exlm_cli.experiments.cell_files import scored_tasks
from exlm_cli.experiments.statistics import mean_and_deviation
from exlm_cli.report.cell_rows import CellRow, Result, column_name, csv_number, finished, other_figures, pool_seeds

FIGURES = (
    "loss",
    "perplexity",
    "mask_accuracy",
    "entropy_bits",
    "entropy_posterior_bits",
    "effective_states",
    "path_entropy_bits",
    "masks_with_0_share",
    "masks_with_2plus_share",
)
"""Validation figures of a variant under their names in metrics.jsonl; those after `entropy_bits` need a DAG."""

ABOUT = (
    "objective",
    "num_states_per_mask",
    "mask_ratio",
    "rope",
    "alignment",
    "relative_steps",
    "batch_sequences",
    "batch_tokens",
)
"""What tells variants apart, as the recipe of a sweep has it."""

ENTROPIES = ("entropy_bits", "entropy_posterior_bits")
"""Mean over the emitting states, and weighted by the posterior that a state emits a target."""


@dataclass(frozen=True, kw_only=True)
class SweepRow(CellRow):
    """One variant, all its seeds.

    Attributes:
        label: Its name.
        about: What it is, by the names of `ABOUT`.
        changes: Values by key that make it of the common recipe.
        entropy_at: By mask ratio, what `ENTROPIES` are there, one value a seed.
        num_finetuned: Seeds of fine-tuning in each score.
        sampled: Rows that were trained on by task, where `task.max_rows` left some out.
        parameters, steps: Of pre-training; None where no seed came to an end.
        elapsed_s: Seconds of pre-training, mean over seeds.
    """

    label: str
    about: Mapping[str, Any]
    changes: Mapping[str, Any]
    entropy_at: Mapping[float, Mapping[str, tuple[float, ...]]]
    num_finetuned: int
    sampled: Mapping[str, int]
    parameters: int | None
    steps: int | None
    elapsed_s: float | None

    def entropies(self, ratio: float, kind: str) -> tuple[float, ...]:
        """Return one of `ENTROPIES` at a mask ratio, one value a seed that has it; empty where none has."""
        # an MLM has one state a mask, so both definitions are one
        own = "entropy_bits" if self.about["objective"] == "mlm" else kind
        return self.entropy_at.get(ratio, {}).get(own, ())


def sweep_rows(results: Sequence[Result]) -> list[SweepRow]:
    """Put the `result.json` of variants together by label, in the order in which they came."""
    by_label: dict[str, list[Result]] = {}
    for result in results:
        by_label.setdefault(result["label"], []).append(result)
    return [_row(label, own) for label, own in by_label.items()]


def task_figures(rows: Sequence[SweepRow]) -> list[str]:
    """Return the names of the fine-tuned figures, in the order in which they came."""
    return other_figures(rows, FIGURES)


def csv_text(rows: Sequence[SweepRow]) -> str:
    """Return the sweep as CSV, one row a variant; figures are means over seeds, `<name>_std` their sample deviation.

    Entropies at other mask ratios are `entropy_bits_at_0.387` and so on; `changes` is JSON.
    """
    names = [*FIGURES, *task_figures(rows)]
    ratios = sorted({ratio for row in rows for ratio in row.entropy_at})
    header = [
        "variant", *ABOUT, "parameters", "steps", "elapsed_s",
        *(f"{column_name(name)}{end}" for name in names for end in ("", "_std")),
        *(f"{name}_at_{ratio:g}{end}" for name in ENTROPIES for ratio in ratios for end in ("", "_std")),
        "seeds", "diverged_seeds", "changes",
    ]  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        figures = [value for name in names for value in (row.mean(name), row.deviation(name))]
        entropies = [
            value for name in ENTROPIES for ratio in ratios for value in _mean_and_deviation(row.entropies(ratio, name))
        ]
        elapsed_s = "" if row.elapsed_s is None else f"{row.elapsed_s:.1f}"
        writer.writerow(
            [
                row.label,
                *(row.about[name] for name in ABOUT),
                row.parameters,
                row.steps,
                elapsed_s,
                *(csv_number(value) for value in (*figures, *entropies)),
                *(" ".join(map(str, some)) for some in (row.seeds, row.diverged_seeds)),
                json.dumps(dict(row.changes)),
            ]
        )
    return text.getvalue()


def _row(label: str, results: Sequence[Result]) -> SweepRow:
    done = finished(results)
    first = results[0]
    times_s = [float(result["elapsed_s"]) for result in done]
    return SweepRow(
        label=label,
        about={name: first[name] for name in ABOUT},
        changes=first["changes"],
        entropy_at=_entropies(done),
        num_finetuned=max((len(s["values"]) for result in done for s in scored_tasks(result).values()), default=0),
        sampled={
            task: scored["split_sizes"]["train"]
            for result in done
            for task, scored in scored_tasks(result).items()
            if scored["max_rows"] is not None
        },
        parameters=done[0]["parameters"] if done else None,
        steps=done[0]["steps"] if done else None,
        elapsed_s=mean_and_deviation(times_s)[0] if times_s else None,
        **pool_seeds(results, FIGURES),
    )


def _entropies(results: Sequence[Result]) -> dict[float, dict[str, tuple[float, ...]]]:
    by_ratio: dict[float, dict[str, tuple[float, ...]]] = {}
    for result in results:
        for entropy in result["entropy"]:
            here = by_ratio.setdefault(float(entropy["mask_ratio"]), {})
            for name in ENTROPIES:
                if entropy[name] is not None:
                    here[name] = (*here.get(name, ()), float(entropy[name]))
                elif name == "entropy_bits":
                    here.setdefault(name, ())  # measured, and not defined; the other is of ExLM alone
    return by_ratio


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return mean_and_deviation(values) if values else (float("nan"), float("nan"))
