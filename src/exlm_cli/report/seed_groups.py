"""Results of a sweep by variant: means and deviations over seeds, dependence on p^k, texts and CSV cells."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exlm_cli.experiments.results import SweepCellResult
from exlm_cli.files import make_folder, write_atomically, write_csv
from exlm_cli.format import NO_VALUE, NOT_DEFINED, format_fixed, format_in_percent
from exlm_cli.report.tables import ReportTable, as_markdown
from exlm_cli.run_dir import METRICS_FILE, MetricsRow, read_metrics

UNDECIDED = "not decided"
"""In place of `p^k` or `p` where the seeds' noise can explain the difference."""

_SAME_SHARE = 1.1
"""A p^k within this factor of the next lower one is in its group: 0.15, 0.387^2 and 0.789^8 differ by 0.3 %."""


@dataclass(frozen=True)
class RankAgreement:
    """How a figure of the Repeated-MLM grid depends on p^k.

    Attributes:
        spearman: Rank correlation of the figure with p^k; NaN for fewer than three cells or a constant figure.
        spearman_of_groups: The same with shares that are meant to be equal as ties: their order is that of rounding.
        spread_equal_share: Pooled standard deviation of the figure among cells of equal p^k.
        spread_equal_ratio: The same among cells of equal p. NaN where no two cells are equal.
        standard_error: Of a cell's mean over its seeds, pooled over cells; NaN where no cell has two seeds.
    """

    spearman: float
    spearman_of_groups: float
    spread_equal_share: float
    spread_equal_ratio: float
    standard_error: float

    @property
    def follows(self) -> str:
        """Whether cells of equal `p^k` or of equal `p` lie closer together; empty where a spread is NaN.

        Noise changes a spread by about one standard error at most. Spreads that differ by no more than two are not
        decided. With one seed nothing is known about noise, and the smaller spread counts as it is.
        """
        difference = self.spread_equal_ratio - self.spread_equal_share
        if math.isnan(difference):
            return ""
        if difference == 0 or abs(difference) <= 2 * self.standard_error:
            return UNDECIDED
        return "p^k" if difference > 0 else "p"


def rank_agreement(cells: Sequence[tuple[int, float]], values: Sequence[Sequence[float]]) -> RankAgreement:
    """Compare a figure over pairs (num_repeats, mask_ratio), with a value for each seed of a pair, with p^k and p."""
    shares = [p**k for k, p in cells]
    groups = share_groups(shares)
    means = [statistics.fmean(of_cell) for of_cell in values]
    seed_deviation = pooled_deviation(
        [value for of_cell in values for value in of_cell],
        [cell for cell, of_cell in zip(cells, values, strict=True) for _ in of_cell],
    )
    return RankAgreement(
        spearman_correlation(shares, means),
        spearman_correlation(groups, means),
        pooled_deviation(means, groups),
        pooled_deviation(means, [p for _, p in cells]),
        seed_deviation * math.sqrt(mean_and_deviation([1 / len(of_cell) for of_cell in values])[0]),
    )


def share_groups(shares: Sequence[float]) -> list[int]:
    """Number the groups of equal p^k, from the smallest on; one number for each share given."""
    groups: dict[float, int] = {}
    group, before = -1, 0.0
    for share in sorted(set(shares)):
        group += share > _SAME_SHARE * before
        groups[share] = group
        before = share
    return [groups[share] for share in shares]


def spearman_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the rank correlation, ties shared; NaN where it is not defined."""
    from scipy.stats import spearmanr

    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return math.nan
    return float(spearmanr(x, y).statistic)


def pooled_deviation(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Return the standard deviation around the means of groups, pooled over those with two members; NaN without any."""
    squares, freedom = 0.0, 0
    for group in set(groups):
        members = [value for value, own in zip(values, groups, strict=True) if own == group]
        mean = math.fsum(members) / len(members)
        squares += math.fsum((value - mean) ** 2 for value in members)
        freedom += len(members) - 1
    return math.sqrt(squares / freedom) if freedom else math.nan


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation; the deviation of one value is NaN, and so is the mean of none."""
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else math.nan


FIGURES = (
    "loss",
    "loss_given_length",
    "perplexity",
    "mask_accuracy",
    "entropy_bits",
    "loss_independent",
    "entropy_posterior_bits",
    "effective_states",
    "clones_in_use",
    "path_entropy_bits",
    "masks_with_0_share",
    "masks_with_2plus_share",
)
"""Validation figures of a variant under their names in metrics.jsonl; those after `entropy_bits` need a DAG."""


@dataclass(frozen=True)
class SweepReport:
    """Tables of a sweep, its content for programs, and the files that were written."""

    tables: list[ReportTable]
    content: dict[str, Any]
    files: list[Path]


@dataclass(frozen=True)
class SeedGroup:
    """One variant: the results of its seeds. Figures are means over the seeds that finished."""

    results: tuple[SweepCellResult, ...]

    @property
    def first(self) -> SweepCellResult:
        """The first result, which describes the variant: all seeds agree on that."""
        return self.results[0]

    @property
    def finished(self) -> list[SweepCellResult]:
        """Results of the seeds that did not diverge."""
        return [result for result in self.results if result.diverged is None]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that did not diverge."""
        return tuple(sorted(result.seed for result in self.finished))

    @property
    def diverged_seeds(self) -> tuple[int, ...]:
        """Seeds whose training diverged, or collapsed with `train.on_collapse: stop`."""
        return tuple(sorted(result.seed for result in self.results if result.diverged is not None))

    @property
    def diverged_tasks(self) -> tuple[str, ...]:
        """Tasks on which fine-tuning of any seed diverged."""
        return tuple(dict.fromkeys(task for result in self.results for task in result.diverged_tasks))

    @property
    def model(self) -> SweepCellResult:
        """A result that has the steps and parameters of the model, where any seed finished."""
        return next(iter(self.finished), self.first)

    @property
    def elapsed_s(self) -> float | None:
        """Seconds of pre-training, mean over seeds; None where no seed finished."""
        times_s = [result.elapsed_s for result in self.finished if result.elapsed_s is not None]
        return mean_and_deviation(times_s)[0] if times_s else None

    @cached_property
    def figures(self) -> dict[str, tuple[float, ...]]:
        """Defined values of the seeds, by figure: of validation, then of tasks like `glue/rte accuracy`."""
        found: dict[str, list[float | None]] = {}
        for result in self.finished:
            scores = {f"{task} {scores.metric}": scores.score for task, scores in result.scored_tasks.items()}
            metrics = {name: result.metrics[name] for name in FIGURES if name in result.metrics}
            for name, value in (metrics | scores).items():
                found.setdefault(name, []).append(value)
        return {name: tuple(value for value in values if value is not None) for name, values in found.items()}

    def values(self, name: str) -> tuple[float, ...]:
        """Return the defined values of a figure, or of any other metric of a task: `glue/mnli mismatched_accuracy`."""
        task, _, metric = name.partition(" ")
        if name in self.figures or not metric:
            return self.figures.get(name, ())
        scored = (result.scored_tasks[task] for result in self.finished if task in result.scored_tasks)
        return tuple(score for scores in scored if (score := scores.score_by(metric)) is not None)

    def mean(self, name: str) -> float:
        """Return the mean over seeds; NaN where no seed has the figure."""
        return mean_and_deviation(self.values(name))[0]

    def deviation(self, name: str) -> float:
        """Return the sample standard deviation over seeds; NaN below two seeds."""
        return mean_and_deviation(self.values(name))[1]

    def show(self, name: str, plus_minus: str = " ± ") -> str:
        """Return the mean with the deviation, or why there is none."""
        mean, deviation = self.mean(name), self.deviation(name)
        if not math.isnan(mean):
            return show_figure(name, mean) + (
                "" if math.isnan(deviation) else plus_minus + show_figure(name, deviation, beside=mean)
            )
        if (self.diverged_seeds and not self.seeds) or name.partition(" ")[0] in self.diverged_tasks:
            return "diverged"
        return NOT_DEFINED if name in self.figures else NO_VALUE

    def csv_figures(self, names: Sequence[str]) -> dict[str, str]:
        """Return means and deviations by column: `glue_rte_accuracy` and `..._std` for `glue/rte accuracy`."""
        columns = {name: name.replace("/", "_").replace(" ", "_") for name in names}
        return csv_spreads({column: self.figures.get(name, ()) for name, column in columns.items()})

    def csv_seeds(self) -> dict[str, str]:
        """Return the seeds by column."""
        both = {"seeds": self.seeds, "diverged_seeds": self.diverged_seeds}
        return {column: " ".join(map(str, seeds)) for column, seeds in both.items()}


def group_seeds(results: Sequence[SweepCellResult]) -> list[SeedGroup]:
    """Return the variants, each with the results of its seeds, in the order of the results."""
    by_label: dict[str, list[SweepCellResult]] = {}
    for result in results:
        by_label.setdefault(result.label, []).append(result)
    return [SeedGroup(tuple(of_label)) for of_label in by_label.values()]


def task_figures(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the names of the fine-tuned figures, in the order in which they came."""
    return list(dict.fromkeys(name for group in groups for name in group.figures if name not in FIGURES))


def read_curves(run: Path, results: Sequence[SweepCellResult]) -> dict[str, list[MetricsRow]]:
    """Return the rows of `metrics.jsonl` of the first seed of each variant that has them, by label.

    Raises:
        CheckpointError: A metrics.jsonl is damaged.
    """
    curves: dict[str, list[MetricsRow]] = {}
    for result in results:
        path = run / "cells" / result.label / f"seed-{result.seed}" / "pretrain" / METRICS_FILE
        if result.label not in curves and path.is_file():
            curves[result.label] = list(read_metrics(path))
    return curves


def show_figure(name: str, value: float, *, beside: float | None = None) -> str:
    """Return a figure as the paper prints it: accuracies in percent, entropy in bits with two decimals.

    Args:
        beside: Mean whose decimals a deviation gets; perplexities below 1,000 have three digits.
    """
    if "accuracy" in name:
        return format_in_percent(value)
    if name == "perplexity":
        mean = value if beside is None else beside
        return format_fixed(value, 2 if mean < 10 else 1 if mean < 100 else 0)
    return format_fixed(value, 2 if name.startswith(("entropy", "effective", "clones")) else 3)


def count_seeds(groups: Sequence[SeedGroup], figure: str | None = None) -> str:
    """Return `3 seeds`, or `1 to 3 seeds` of variants that have some; empty where none has two.

    Args:
        figure: Count only seeds that have this figure.
    """
    counts = {len(group.seeds if figure is None else group.values(figure)) for group in groups} - {0}
    if max(counts, default=0) < 2:
        return ""
    return " to ".join(map(str, sorted({min(counts), max(counts)}))) + " seeds"


def seed_note(groups: Sequence[SeedGroup], figure: str | None = None) -> str:
    """Return ` (mean ± standard deviation of N seeds)`, N as in `count_seeds`; empty where no variant has two seeds."""
    seeds = count_seeds(groups, figure)
    return f" (mean ± standard deviation of {seeds})" if seeds else ""


def different_seeds_note(groups: Sequence[SeedGroup]) -> list[str]:
    """Return a note where means of variants are over different seeds."""
    if len({group.seeds for group in groups if group.seeds}) < 2:
        return []
    return ["these means are over different seeds; `seeds` in the CSV file of the report has them"]


def fewer_seeds_note(groups: Mapping[str, SeedGroup], headings: Mapping[str, str]) -> list[str]:
    """Return a note with the variants, by name, of which a figure is the mean over some of their seeds only.

    Args:
        headings: What the table calls each figure, by its name.
    """
    found = []
    for name, group in groups.items():
        counts = {heading: len(group.values(figure)) for figure, heading in headings.items()}
        whole = len(group.seeds)
        parts = [f"{heading} over {count} of {whole} seeds" for heading, count in counts.items() if 0 < count < whole]
        if parts:
            found.append(f"{name}: {', '.join(parts)}")
    return ["; ".join(found)] if found else []


def divergence_note(groups: Mapping[str, SeedGroup]) -> list[str]:
    """Return a note with the variants, by name, of which a seed or a fine-tuning diverged."""
    found = []
    for name, group in groups.items():
        parts = [f"seed {seed}" for seed in group.diverged_seeds]
        parts += [f"fine-tuning on {task}" for task in group.diverged_tasks]
        if parts:
            found.append(f"{name} ({', '.join(parts)})")
    return [f"diverged: {'; '.join(found)}"] if found else []


def csv_spreads(values: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Return the mean of each column's values under its name, and the deviation under `<name>_std`."""
    cells: dict[str, str] = {}
    for column, of_column in values.items():
        mean, deviation = mean_and_deviation(of_column)
        cells |= {column: csv_number(mean), f"{column}_std": csv_number(deviation)}
    return cells


def csv_number(value: float) -> str:
    """Return a number with six digits; nothing for NaN."""
    return "" if math.isnan(value) else f"{value:.6g}"


def write_report_files(
    folder: Path, stem: str, heading: str, rows: Sequence[Mapping[str, Any]], tables: Sequence[ReportTable]
) -> list[Path]:
    """Write `<stem>.csv`, of rows by column, and `<stem>.md` into a folder, made where there is none.

    Raises:
        CheckpointError: A file cannot be written.
    """
    make_folder(folder)
    files = [folder / f"{stem}.csv", folder / f"{stem}.md"]
    write_csv(files[0], list(rows[0]), [list(row.values()) for row in rows])
    write_atomically(files[1], "\n".join([f"# {heading}\n", *map(as_markdown, tables)]).encode())
    return files
