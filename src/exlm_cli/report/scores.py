"""Tables of scores: one fine-tuning run, runs of a task side by side, pre-trained checkpoints side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_cli.files import finite_or_none
from exlm_cli.finetune.results import Aggregate, BaselineResult, InitialWeights, RunResults, Summaries, Summary
from exlm_cli.format import (
    NO_VALUE,
    NOT_DEFINED,
    format_count,
    format_counts,
    format_duration,
    format_in_percent,
    format_large,
    format_measure,
    format_number,
    format_number_of,
    format_parameters,
    format_percent,
    format_spread,
    number_repeated,
)
from exlm_cli.report.tables import ReportTable

if TYPE_CHECKING:
    from exlm_cli.experiments.evaluate import PretrainedScore

_FIGURES = {
    "loss": "loss, nats per target",
    "loss_given_length": "loss given the number of targets",
    "loss_independent": "the same if targets were independent",
    "perplexity": "perplexity",
    "mask_accuracy": "mask accuracy",
    "entropy_bits": "entropy, bits",
    "entropy_posterior_bits": "entropy, posterior-weighted, bits",
    "effective_states": "effective states per mask",
    "clones_in_use": "clones in use over all masks",
    "path_entropy_bits": "path entropy, bits per target",
    "masks_with_0_share": "share of masks that yield no token",
    "masks_with_2plus_share": "share of masks that yield 2 or more",
    "tokens_of_first_mask": "tokens of the first mask",
    "tokens_of_middle_mask": "tokens of the middle mask",
    "tokens_of_last_mask": "tokens of the last mask",
    "num_sequences": "sequences scored",
    "num_infeasible": "sequences without an alignment",
}
"""Validation figures of a checkpoint in the order of the table, with their headings."""
_OF_VALUES, _OF_LABELS = ("rmse", "mae", "r2"), ("roc_auc", "average_precision", "accuracy")
_MAX_LABELS = 30
_COUNTS = ("num_sequences", "num_infeasible")


@dataclass(frozen=True)
class FinetunedRun:
    """A finished fine-tuning run: its name in tables, its directory, its results."""

    name: str
    folder: Path
    results: RunResults

    def summary(self, metric: str) -> Summary | None:
        """Return a metric of the reported split over seeds, or over splits; None where there is no such metric."""
        shown = self.results.replication or self.results
        return shown.metrics[self.results.scored_split].get(metric)

    @property
    def baseline(self) -> BaselineResult | None:
        """Scores of the baseline over seeds, or over splits; None where it was not scored."""
        return (self.results.replication or self.results).baseline

    def baseline_summary(self, metric: str) -> Summary | None:
        """Return a metric of the baseline on the reported split; None where there is none."""
        return None if self.baseline is None else self.baseline.metrics[self.results.scored_split].get(metric)


def results_tables(results: RunResults) -> list[ReportTable]:
    """Return the scores of a fine-tuning run, and those of each label where it has several."""
    return [_scores_table(results), *([_labels_table(results)] if results.labels else [])]


def _scores_table(results: RunResults) -> ReportTable:
    """Return the scores on each split, those of the baseline below, and notes on the training."""
    shown = results.replication or results
    splits = tuple(shown.metrics)
    groups = [_rows_by_metric(shown.metrics, results)]
    if (baseline := shown.baseline) is not None:
        groups.append([(baseline.name, *("" for _ in splits)), *_rows_by_metric(baseline.metrics, results)])
    init = results.init
    begun = f"{init.objective} {init.recipe}"
    if init.checkpoint is not None:
        begun += f" after {format_count(init.steps)} steps"
    sizes = format_counts(results.split_sizes.values())
    return ReportTable(
        "scores",
        f"{results.task}, {sizes} rows: {begun}, {_describe_seeds(results)}",
        ("metric", *splits),
        tuple(map(tuple, groups)),
        tuple(_notes(results)),
    )


def label_scores_table(labels: Mapping[str, Mapping[str, float]]) -> ReportTable:
    """Return the scores of each label or value of a prediction."""
    is_value = "rmse" in next(iter(labels.values()))
    names, kind = (_OF_VALUES, "value") if is_value else (_OF_LABELS, "label")
    rows = [
        (label, *(format_number(finite_or_none(scores)[name]) for name in names)) for label, scores in labels.items()
    ]
    shown = rows[:_MAX_LABELS]
    notes = [f"the first {len(shown)} of {len(rows)}; the JSON output has all"] if len(rows) > _MAX_LABELS else []
    return ReportTable("labels", f"Each {kind} alone", (kind, *names), (tuple(shown),), tuple(notes))


def _labels_table(results: RunResults) -> ReportTable:
    """Return the scores of each label or value on the reported split, the baseline's beside them."""
    shown, split = results.replication or results, results.scored_split
    names = _OF_VALUES if results.loss == "regression" else _OF_LABELS
    of_baseline = shown.baseline.labels.get(split, {}) if shown.baseline is not None else {}
    aggregate = results.aggregate
    rows = [
        (
            label,
            *(format_score(scores[name], aggregate) for name in names),
            *([format_score(of_baseline[label][names[0]], aggregate)] if of_baseline else []),
        )
        for label, scores in shown.labels[split].items()
    ]
    notes = ["errors are in the unit of each column"] if results.loss == "regression" else []
    if len(rows) > _MAX_LABELS:
        notes.append(f"the first {_MAX_LABELS} of {len(rows)}; `labels` in results.json has all")
    beside = (f"{names[0]} of {shown.baseline.name}",) if shown.baseline is not None and of_baseline else ()
    columns = ("value" if results.loss == "regression" else "label", *names, *beside)
    return ReportTable(
        "labels", f"{split}: each {columns[0]} alone", columns, (tuple(rows[:_MAX_LABELS]),), tuple(notes)
    )


def task_tables(runs: Sequence[FinetunedRun]) -> list[ReportTable]:
    """Return a table for each task, in the order of the runs; CSV runs on other rows or labels have their own."""
    groups: dict[tuple[object, ...], list[FinetunedRun]] = {}
    for run in runs:
        results = run.results
        groups.setdefault((results.task, results.output_names, results.labels_sha256), []).append(run)
    tables = [_task_table(group) for group in groups.values()]
    names = number_repeated([table.name for table in tables])
    return [replace(table, name=name) for name, table in zip(names, tables, strict=True)]


def pretraining_table(scores: "Sequence[PretrainedScore]") -> ReportTable:
    """Return the validation figures of pre-trained checkpoints, a column each."""
    rows = [
        (heading, *(_figure(name, score.metrics) for score in scores))
        for name, heading in _FIGURES.items()
        if any(name in score.metrics for score in scores)
    ]
    notes = [
        f"{score.name}: {score.objective}, step {format_count(score.step)}, {format_parameters(score.parameters)} "
        f"parameters, {format_large(score.tokens)} tokens, scored on {score.data}"
        for score in scores
    ]
    if len({score.tokenizer for score in scores}) > 1:
        notes.append("these runs have different tokenizers: do not compare their losses, accuracies and entropies")
    columns = ("figure", *(score.name for score in scores))
    return ReportTable("pretraining", "Pre-trained checkpoints", columns, (tuple(rows),), tuple(notes))


def describe_validation(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the figures of a validation under their headings, in the order of the table."""
    return {heading: _figure(name, metrics) for name, heading in _FIGURES.items() if name in metrics}


def format_score(summary: Summary, aggregate: Aggregate) -> str:
    """Return `0.8123 ± 0.0101` (sample standard deviation), or `0.8123 (0.8001 to 0.8201)` around a median."""
    center = summary.center(aggregate)
    known = [value for value in summary.values if value is not None]
    if center is None or len(known) == 1:
        return format_number(center)
    if aggregate == "mean":
        return format_spread(center, summary.std)
    low, high = (format_number(bound, beside=center) for bound in (min(known), max(known)))
    return f"{format_number(center)} ({low} to {high})"


def percent_score(summary: Summary | None, aggregate: Aggregate) -> str:
    """Return a score as the paper prints it: `85.2 ±0.4` in percent, or a median alone; a dash where there is none."""
    if summary is None:
        return NO_VALUE
    return format_in_percent(summary.center(aggregate), summary.std if aggregate == "mean" else None)


def pretraining_budget(init: InitialWeights) -> str:
    """Return `4,000 steps, 13.1 M tokens`, or `none` for weights drawn from the seed."""
    if init.objective == "scratch":
        return "none"
    return f"{format_count(init.steps)} steps, {format_large(init.tokens)} tokens"


def _rows_by_metric(metrics: Summaries, results: RunResults) -> list[tuple[str, ...]]:
    """Return a row for each metric, with a column for each split."""
    names = _ordered(next(iter(metrics.values())), results)
    return [
        (name, *(format_score(of_split[name], results.aggregate) for of_split in metrics.values())) for name in names
    ]


def _ordered(names: Iterable[str], results: RunResults) -> list[str]:
    """Return metrics with the one that chose the epoch first and the loss last."""
    return sorted(names, key=lambda name: (name != results.selection_metric, name == "loss"))


def _notes(results: RunResults) -> list[str]:
    """Return notes on data and training; those that are known of the first split alone say so."""
    notes, trained = [*results.notes], results.replication or results
    if results.grid_best is not None:
        chosen = ", ".join(f"{key}={value}" for key, value in results.grid_best.values.items())
        notes.append(f"best of {len(results.grid)} grid points: {chosen}")
    if results.replication is not None:
        notes = [f"first split: {note}" for note in notes]
    epochs = ", ".join(map(str, trained.best_epochs))
    notes.append(f"best epochs by validation {results.selection_metric}: {epochs}")
    if results.replication is not None:
        of_split = results.replication.intervals[results.scored_split]
        shown = (
            f"{name} {format_number(bounds[0])} to {format_number(bounds[1])}"
            for name in _ordered(of_split, results)
            if (bounds := of_split[name]) is not None
        )
        notes.append(f"95 % intervals on {results.scored_split} over splits: {', '.join(shown)}")
    notes.append(
        f"trained in {format_duration(trained.elapsed_s)}, {format_count(trained.tokens_per_s)} tokens/s, "
        f"{format_percent(trained.outside_model_share)} of the time outside the model"
    )
    return notes


def _task_table(runs: Sequence[FinetunedRun]) -> ReportTable:
    """Return every metric of runs of one task, a column each, then a column for each baseline."""
    first = runs[0].results
    names = _ordered(
        dict.fromkeys(name for run in runs for name in run.results.metrics[run.results.scored_split]), first
    )
    columns = ["metric", *(run.name for run in runs)]
    cells = [[_score(run.summary(name), run) for name in names] for run in runs]
    has_one_split = len(set(map(_splits_of, runs))) == 1
    shown_splits = set()
    for run in runs:
        baseline, split = run.baseline, _splits_of(run)
        if baseline is not None and split not in shown_splits:
            shown_splits.add(split)
            columns.append(baseline.name if has_one_split else f"{baseline.name}, rows of {run.name}")
            cells.append([_score(run.baseline_summary(name), run) for name in names])
    sizes = format_counts(first.split_sizes.values())
    return ReportTable(
        "scores-" + first.task.replace("/", "-"),
        f"{first.task}, {sizes} rows in {', '.join(first.split_sizes)}, scored on {first.scored_split}",
        tuple(columns),
        (tuple(zip(names, *cells, strict=True)),),
        (*map(_describe_run, runs), *_differences(runs, names[0])),
    )


def _score(summary: Summary | None, run: FinetunedRun) -> str:
    """Return a score with its spread; a dash where there is none or it is not defined."""
    shown = NO_VALUE if summary is None else format_score(summary, run.results.aggregate)
    return NO_VALUE if shown == NOT_DEFINED else shown


def _figure(name: str, metrics: Mapping[str, float]) -> str:
    if name not in metrics:
        return NO_VALUE
    return format_count(metrics[name]) if name in _COUNTS else format_measure(metrics[name])


def _describe_run(run: FinetunedRun) -> str:
    init = run.results.init
    return (
        f"{run.name}: {init.recipe} ({init.objective}), pre-training {pretraining_budget(init)}, "
        f"{format_parameters(run.results.parameters)} parameters, {_describe_seeds(run.results)}"
    )


def _describe_seeds(results: RunResults) -> str:
    num_seeds = len(results.seeds)
    if results.replication is not None:
        seeds = f"{num_seeds} seeds" if num_seeds > 1 else "a seed"
        return f"{results.aggregate} of {len(results.replication.split_seeds)} splits with {seeds} each"
    return f"{results.aggregate} of {num_seeds} seeds" if num_seeds > 1 else f"seed {results.seeds[0]}"


def _differences(runs: Sequence[FinetunedRun], metric: str) -> tuple[str, ...]:
    """Return how much each run differs from the first, or a warning where runs of one task were split differently."""
    if len(set(map(_splits_of, runs))) == 1:
        return tuple(note for run in runs[1:] if (note := _paired_difference(run, runs[0], metric)))
    named = []
    for run in runs:
        sha256, num_splits = _splits_of(run)
        more = f" and {format_number_of(num_splits - 1, 'more split')}" if num_splits > 1 else ""
        named.append(f"{run.name} {run.results.split} {sha256[:8]}{more}")
    return (f"these runs were split differently and cannot be compared: {', '.join(named)}",)


def _splits_of(run: FinetunedRun) -> tuple[str, int]:
    """Return the hash of a run's first split, and the number of its splits."""
    over = run.results.replication
    return run.results.split_sha256, 1 if over is None else len(over.split_seeds)


def _paired_difference(run: FinetunedRun, first: FinetunedRun, metric: str) -> str:
    """Return the mean difference over the seeds of both runs with Student's 95 % interval; empty below three seeds."""
    from scipy.stats import ttest_rel

    ours, theirs = _by_seed(run, metric), _by_seed(first, metric)
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    differences = [one - other for one, other in pairs]
    if len(pairs) < 3 or max(differences) - min(differences) < 1e-9:
        return ""
    test = ttest_rel(*zip(*pairs, strict=True))
    low, high = test.confidence_interval(0.95)
    mean = sum(differences) / len(pairs)
    return (
        f"mean difference of {run.name} from {first.name}, {metric}: {mean:+.4f} (95 % interval {low:+.4f} to "
        f"{high:+.4f}, {len(pairs)} seeds in pairs, p = {test.pvalue:.2g})"
    )


def _by_seed(run: FinetunedRun, metric: str) -> dict[int, float]:
    """Return the values of a metric by seed; none for means over several splits."""
    summary = run.summary(metric)
    if summary is None or run.results.replication is not None:
        return {}
    pairs = zip(run.results.seeds, summary.values, strict=True)
    return {seed: value for seed, value in pairs if value is not None}
