"""Scores of a sweep by variant: means and deviations over seeds, dependence on p^k, cells of tables and CSV."""

import json
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from exlm_cli.config.sweep import SweepCell
from exlm_cli.experiments.results import CellRuns, masking_of
from exlm_cli.files import make_folder, write_atomically, write_csv
from exlm_cli.finetune.scores import Spread, spread_of
from exlm_cli.format import NO_VALUE, NOT_DEFINED, decimals, format_plain
from exlm_cli.report.learned import read_learned
from exlm_cli.report.tables import Entry, Number, ReportTable, as_markdown
from exlm_cli.run_dir import METRICS_FILE, MetricsRow, read_metrics

UNDECIDED = "not decided"
"""In place of `p^k` or `p` where the seeds' noise can explain the difference."""

_SAME_SHARE = 1.1
"""A p^k within this factor of the next lower one is in its group: 0.15, 0.387^2 and 0.789^8 differ by 0.3 %."""


@dataclass(frozen=True)
class RankAgreement:
    """How a metric of the Repeated-MLM grid depends on p^k.

    Attributes:
        spearman: Rank correlation of the metric with p^k; NaN for fewer than three cells or a constant metric.
        spearman_of_groups: The same with shares that are meant to be equal as ties: their order is that of rounding.
        spread_equal_share: Pooled standard deviation of the metric among cells of equal p^k.
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
    """Compare a metric over pairs (num_repeats, mask_ratio), with a value for each seed of a pair, with p^k and p."""
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
        seed_deviation * math.sqrt(spread_of([1 / len(of_cell) for of_cell in values]).mean),
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


VALIDATED = (
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
"""Metrics of the validation in reports, by their names in metrics.jsonl; those after `entropy_bits` need a DAG."""


@dataclass(frozen=True)
class SweepReport:
    """Tables of a sweep, its content for programs, and the files that were written."""

    tables: list[ReportTable]
    content: dict[str, Any]
    files: list[Path]


@dataclass(frozen=True)
class SeedGroup:
    """One variant: the cells of its seeds. Its scores are those of the seeds that finished."""

    cells: tuple[CellRuns, ...]

    @property
    def first(self) -> SweepCell:
        """The first cell, which describes the variant: all seeds agree on that."""
        return self.cells[0].plan

    @cached_property
    def finished(self) -> list[CellRuns]:
        """Seeds that did not diverge."""
        return [cell for cell in self.cells if cell.diverged is None]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that did not diverge."""
        return tuple(sorted(cell.plan.seed for cell in self.finished))

    @property
    def diverged_seeds(self) -> tuple[int, ...]:
        """Seeds whose training diverged."""
        return tuple(sorted(cell.plan.seed for cell in self.cells if cell.diverged is not None))

    @property
    def diverged_tasks(self) -> tuple[str, ...]:
        """Tasks on which fine-tuning of any seed diverged."""
        return tuple(dict.fromkeys(task for cell in self.cells for task in cell.diverged_tasks))

    @property
    def steps(self) -> int | None:
        """Steps of pre-training; None where no seed finished."""
        return self.finished[0].run.steps if self.finished else None

    @property
    def parameters(self) -> int | None:
        """Parameters of the model; None where no seed finished."""
        return self.finished[0].run.parameters if self.finished else None

    @property
    def elapsed_s(self) -> float:
        """Seconds of pre-training, mean over seeds; NaN where no seed finished."""
        return spread_of([cell.run.train_time_s or math.nan for cell in self.finished]).mean

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that any seed has: of validation, then those that chose the epoch of a task: `glue/rte accuracy`."""
        validated = [name for name in VALIDATED if (self._own, name) in self._by_metric]
        return tuple(dict.fromkeys([*validated, *(name for cell in self.finished for name in cell.task_metrics)]))

    @property
    def mask_ratios(self) -> list[float]:
        """Mask ratios at which it was measured, without the range that it was trained with."""
        return sorted(ratio for ratio in self.first.mask_ratios if not isinstance(ratio, tuple))

    def values(self, metric: str, mask_ratio: float | None = None) -> tuple[float, ...]:
        """Return the defined values of the seeds, at the variant's own mask ratio unless another is given."""
        masking = self._own if mask_ratio is None else masking_of(mask_ratio)
        return self._by_metric.get((masking, metric), ())

    def spread(self, metric: str, mask_ratio: float | None = None) -> Spread:
        """Return mean and deviation over the seeds; NaN where no seed has a value."""
        return spread_of(self.values(metric, mask_ratio))

    def show(self, metric: str) -> Entry:
        """Return the cell of a table: the mean with the deviation, or why there is none."""
        spread = self.spread(metric)
        if spread.num:
            return metric_entry(metric, spread)
        if (self.diverged_seeds and not self.seeds) or metric.partition(" ")[0] in self.diverged_tasks:
            return "diverged"
        return metric_entry(metric, spread, missing=NOT_DEFINED) if metric in self.metrics else NO_VALUE

    @property
    def _own(self) -> str:
        return masking_of(self.first.mask_ratios[0])

    @cached_property
    def _by_metric(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """Defined values of the seeds by masking and metric."""
        import pandas as pd

        tables = [cell.values for cell in self.finished]
        if not tables:
            return {}
        groups = pd.concat(tables).groupby(["masking", "metric"], sort=False).value
        return {key: tuple(values.dropna().tolist()) for key, values in groups}


def group_seeds(cells: Sequence[CellRuns]) -> list[SeedGroup]:
    """Return the variants, each with the cells of its seeds, in the order of the cells."""
    by_label: dict[str, list[CellRuns]] = {}
    for cell in cells:
        by_label.setdefault(cell.plan.label, []).append(cell)
    return [SeedGroup(tuple(of_label)) for of_label in by_label.values()]


def task_metrics(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the metrics of tasks, in the order in which they came."""
    return list(dict.fromkeys(name for group in groups for name in group.metrics if name not in VALIDATED))


def read_curves(cells: Sequence[CellRuns]) -> dict[str, list[MetricsRow]]:
    """Return the rows of `metrics.jsonl` of the first seed of each variant that has them, by label.

    Raises:
        CheckpointError: A metrics.jsonl is damaged.
    """
    curves: dict[str, list[MetricsRow]] = {}
    for cell in cells:
        path = cell.pretrain / METRICS_FILE
        if cell.plan.label not in curves and path.is_file():
            curves[cell.plan.label] = list(read_metrics(path))
    return curves


def metric_entry(name: str, spread: Spread, *, missing: str = NO_VALUE) -> Number:
    """Return a metric as the paper prints it: accuracies in percent, entropy in bits with two decimals.

    Perplexities below 1,000 have three digits.
    """
    scale, mean = 100 if "accuracy" in name else 1, spread.mean
    if scale == 100:
        places = 1
    elif name == "perplexity":
        places = 2 if mean < 10 else 1 if mean < 100 else 0
    else:
        places = 2 if name.startswith(("entropy", "effective", "clones")) else 3
    return Number(scale * mean, decimals(places), scale * spread.std, missing=missing)


def count_seeds(groups: Sequence[SeedGroup], metric: str | None = None) -> str:
    """Return `3 seeds`, or `1 to 3 seeds` of variants that have some; empty where none has two.

    Args:
        metric: Count only seeds that have this metric.
    """
    counts = {len(group.seeds if metric is None else group.values(metric)) for group in groups} - {0}
    if max(counts, default=0) < 2:
        return ""
    return " to ".join(map(str, sorted({min(counts), max(counts)}))) + " seeds"


def seed_note(groups: Sequence[SeedGroup], metric: str | None = None) -> str:
    """Return ` (mean ± standard deviation of N seeds)`, N as in `count_seeds`; empty where no variant has two seeds."""
    seeds = count_seeds(groups, metric)
    return f" (mean ± standard deviation of {seeds})" if seeds else ""


def fewer_seeds_note(groups: Mapping[str, SeedGroup], headings: Mapping[str, str]) -> list[str]:
    """Return a note with the variants, by name, of which a metric is the mean over some of their seeds only.

    Args:
        headings: What the table calls each metric, by its name.
    """
    found = []
    for name, group in groups.items():
        counts = {heading: len(group.values(metric)) for metric, heading in headings.items()}
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


def unlearned_note(groups: Mapping[str, SeedGroup]) -> list[str]:
    """Return a note with the variants, by name, of which no seed is better than the frequencies of tokens.

    Raises:
        CheckpointError: A file of a pre-training is damaged.
    """
    found = []
    for name, group in groups.items():
        # what the sequences are changes only a word in sentences
        learned = [read_learned(cell.pretrain, "text") for cell in group.finished]
        if learned and all(each is not None and each.is_at_unigrams for each in learned):
            found.append(name)
    if not found:
        return []
    return [f"no better than token frequencies, so their numbers are chance: {'; '.join(found)}"]


def by_column(spreads: Mapping[str, Spread]) -> dict[str, float]:
    """Return means and deviations by column: `glue_rte_accuracy` and `..._std` for `glue/rte accuracy`."""
    columns = {name.replace("/", "_").replace(" ", "_"): spread for name, spread in spreads.items()}
    ends = {"": "mean", "_std": "std"}
    return {column + end: getattr(spread, key) for column, spread in columns.items() for end, key in ends.items()}


def write_report_files(
    folder: Path, stem: str, heading: str, records: Sequence[Mapping[str, Any]], tables: Sequence[ReportTable]
) -> list[Path]:
    """Write `<stem>.csv`, of values by column, and `<stem>.md` into a folder, made where there is none.

    Raises:
        CheckpointError: A file cannot be written.
    """
    make_folder(folder)
    files = [folder / f"{stem}.csv", folder / f"{stem}.md"]
    write_csv(files[0], list(records[0]), [list(map(_plain, record.values())) for record in records])
    write_atomically(files[1], "\n".join([f"# {heading}\n", *map(as_markdown, tables)]).encode())
    return files


def _plain(value: Any) -> str:
    """Return a value as CSV holds it: seeds with blanks between them, changes as JSON."""
    match value:
        case str():
            return value
        case tuple():
            return " ".join(map(str, value))
        case dict():
            return json.dumps(value)
    return format_plain(value)
