"""What tables of every grid of pre-training runs share: cells with their seeds together, and figures as texts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exlm_cli.experiments.cell_files import diverged_tasks, scored_tasks, task_score
from exlm_cli.experiments.statistics import mean_and_deviation
from exlm_cli.format import NOT_DEFINED
from exlm_cli.report.curves import Row
from exlm_cli.run_dir import read_metrics

Result = Mapping[str, Any]
"""`result.json` of a cell and seed."""

_WORDS = {
    "entropy_bits": "Entropy, bits",
    "entropy_posterior_bits": "Entropy weighted by the posterior, bits",
    "loss": "Loss, nats per target",
    "perplexity": "Perplexity",
    "mask_accuracy": "Mask accuracy",
    "effective_states": "Effective states",
}


@dataclass(frozen=True, kw_only=True)
class CellRow:
    """One cell, all its seeds.

    Attributes:
        seeds: Those that came to an end.
        diverged_seeds: Those whose training met a loss that is no number.
        diverged_tasks: Tasks on which fine-tuning did so, of any seed.
        figures: One value a seed by name: of the validation, then those of fine-tuned tasks, `glue/rte accuracy`. Seeds
            for which a figure is not defined have no value.
    """

    seeds: tuple[int, ...]
    diverged_seeds: tuple[int, ...]
    diverged_tasks: tuple[str, ...]
    figures: Mapping[str, tuple[float, ...]]

    def mean(self, name: str) -> float:
        """Mean over seeds; NaN where no seed has the figure."""
        values = self.figures.get(name, ())
        return mean_and_deviation(values)[0] if values else math.nan

    def deviation(self, name: str) -> float:
        """Sample standard deviation over seeds; NaN below two seeds."""
        values = self.figures.get(name, ())
        return mean_and_deviation(values)[1] if values else math.nan

    def show(self, name: str) -> str:
        """Return the mean, and the deviation where there is one, or what there is in their place."""
        mean, deviation = self.mean(name), self.deviation(name)
        if math.isnan(mean):
            return self.why_missing(name) or "–"
        return show_figure(name, mean) + ("" if math.isnan(deviation) else f" ± {show_figure(name, deviation)}")

    def why_missing(self, name: str) -> str:
        """Return `diverged` or `not defined` where no seed has the figure; empty where it was not asked for."""
        if (self.diverged_seeds and not self.seeds) or name.partition(" ")[0] in self.diverged_tasks:
            return "diverged"
        return NOT_DEFINED if name in self.figures else ""


def finished(results: Sequence[Result]) -> list[Result]:
    """Return the results of training that came to an end."""
    return [result for result in results if "diverged" not in result]


def pool_seeds(results: Sequence[Result], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a `CellRow` from the results of one cell; validation figures that are in `names`."""
    figures: dict[str, list[float]] = {}
    for result in finished(results):
        for name in names:
            if name in result["metrics"]:
                figures.setdefault(name, []).extend(_defined([result["metrics"][name]]))
        for task, scored in scored_tasks(result).items():
            figures.setdefault(f"{task} {scored['metric']}", []).extend(_defined([task_score(scored)]))
    return {
        "seeds": tuple(sorted(int(result["seed"]) for result in finished(results))),
        "diverged_seeds": tuple(sorted(int(result["seed"]) for result in results if "diverged" in result)),
        "diverged_tasks": tuple(dict.fromkeys(task for result in results for task in diverged_tasks(result))),
        "figures": {name: tuple(values) for name, values in figures.items()},
    }


def other_figures(rows: Sequence[CellRow], names: Sequence[str]) -> list[str]:
    """Return the names of the figures beyond `names`, those of fine-tuned tasks, in the order in which they came."""
    return list(dict.fromkeys(name for row in rows for name in row.figures if name not in names))


def divergences(rows: Sequence[CellRow], names: Sequence[str]) -> list[str]:
    """Return the names of the cells of which some training diverged, and in brackets where that was fine-tuning."""
    found = []
    for row, name in zip(rows, names, strict=True):
        if row.diverged_seeds or row.diverged_tasks:
            found.append(name + (f" (fine-tuning on {', '.join(row.diverged_tasks)})" if row.diverged_tasks else ""))
    return found


def read_curves(run: Path, results: Sequence[Result]) -> dict[str, list[Row]]:
    """Return the rows of `metrics.jsonl` of one seed of each cell, by label; those of the first seed.

    Raises:
        CheckpointError: A metrics.jsonl is damaged.
    """
    curves: dict[str, list[Row]] = {}
    for result in results:
        path = run / "cells" / result["label"] / f"seed-{result['seed']}" / "pretrain" / "metrics.jsonl"
        if result["label"] not in curves and path.is_file():
            curves[result["label"]] = list(read_metrics(path))
    return curves


def show_figure(name: str, value: float) -> str:
    """Return a figure as the paper prints it: accuracies in percent, entropy in bits with two decimals."""
    if "accuracy" in name:
        return f"{100 * value:.1f}"
    if name.startswith("entropy") or name == "effective_states":
        return f"{value:.2f}"
    return f"{value:.3g}" if name == "perplexity" else f"{value:.3f}"


def in_words(name: str) -> str:
    """Return what a figure is, for titles."""
    return _WORDS.get(name, name)


def seed_note(rows: Sequence[CellRow]) -> str:
    """Return what the numbers are means of, in brackets; empty where no cell has two seeds."""
    most = max((len(row.seeds) for row in rows), default=0)
    return f" (mean ± standard deviation of {most} seeds)" if most > 1 else ""


def column_name(name: str) -> str:
    """Return `glue_rte_accuracy` for `glue/rte accuracy`."""
    return name.replace("/", "_").replace(" ", "_")


def csv_number(value: float) -> str:
    """Return a number with six digits; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.6g}"


def _defined(values: Sequence[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]
