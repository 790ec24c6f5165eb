"""Tables of scores: one fine-tuning run, and runs of a task side by side."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from exlm_cli.finetune.evaluation.calibration import (
    DEFAULT_LEVEL,
    MIN_THIRDS_ROWS,
    Calibration,
    Coverage,
    read_calibration,
)
from exlm_cli.finetune.evaluation.intervals import NUM_RESAMPLES
from exlm_cli.finetune.results import FinetunedRun, InitialWeights, RunResults
from exlm_cli.finetune.scores import BOTH, MODEL, OTHER_NAMES, Aggregate, Spread
from exlm_cli.format import (
    NO_VALUE,
    NOT_DEFINED,
    decimals,
    format_count,
    format_counts,
    format_duration,
    format_large,
    format_number,
    format_number_of,
    format_parameters,
    format_percent,
    name_some,
    number_repeated,
)
from exlm_cli.report.tables import Entry, Number, ReportTable, Row

_OF_VALUES, _OF_LABELS = ("rmse", "mae", "r2"), ("roc_auc", "average_precision", "accuracy")
SINGLE_SEEDS = "single seeds"
"""How tables name the scores of seeds alone."""
_MAX_LABELS = 30


def results_tables(run: FinetunedRun) -> list[ReportTable]:
    """Return the scores of a fine-tuning run, and those of each label where it has several."""
    has_labels = bool(run.scores.labels(run.results.scored_split))
    return [_scores_table(run), *([_labels_table(run)] if has_labels else [])]


class Scored(NamedTuple):
    """A score of a run, of which a terminal and a page show the same ones.

    Attributes:
        what: What was scored: the model by the mean prediction of its seeds, its single seeds, or another predictor.
        part: Part of the rows.
    """

    what: str
    metric: str
    part: str
    entry: Number


def scores_of(run: FinetunedRun) -> list[Scored]:
    """Return all scores of a run but those of single labels, the metric that chose the epoch first.

    A mean prediction has no loss; that of a run of one seed is the seed's.
    """
    results, scores, parts = run.results, run.scores, run.scores.splits
    names, has_seeds = _ordered(scores.names(parts[0]), results), len(results.seeds) > 1
    found = [
        Scored(MODEL, name, part, score_entry((scores.seeds if name == "loss" else scores.average)(part, name), "mean"))
        for name in names
        for part in parts
        if name != "loss" or not has_seeds
    ]
    for name in names if has_seeds else ():
        found += [
            Scored(f"{MODEL}, {SINGLE_SEEDS}", name, part, score_entry(scores.seeds(part, name), results.aggregate))
            for part in parts
        ]
    for model in map(str, scores.reported.model.unique()):
        what = OTHER_NAMES.get(model, model)
        found += [
            Scored(what, name, part, score_entry(scores.average(part, name, model=model), "mean"))
            for name in names
            for part in parts
            if name != "loss" and model != MODEL
        ]
    return found


def _pivot(found: Sequence[Scored], row: str, column: str) -> tuple[tuple[str, ...], tuple[Row, ...]]:
    """Return columns and rows of a table with the entries of scores, by two of their attributes."""
    columns = tuple(dict.fromkeys(getattr(one, column) for one in found))
    rows: dict[str, dict[str, Entry]] = {}
    for one in found:
        rows.setdefault(getattr(one, row), {})[getattr(one, column)] = one.entry
    return columns, tuple((name, *(of_row.get(one, NO_VALUE) for one in columns)) for name, of_row in rows.items())


def _scores_table(run: FinetunedRun) -> ReportTable:
    """Return a group for everything that was scored, with a row for each metric and a column for each part."""
    results, found, groups = run.results, scores_of(run), []
    for what in dict.fromkeys(one.what for one in found):
        parts, rows = _pivot([one for one in found if one.what == what], "metric", "part")
        groups.append(rows if what == MODEL else ((what, *("" for _ in parts)), *rows))
    init = results.init
    begun = "from scratch"
    if init.checkpoint is not None:
        begun = f"pre-trained for {format_count(init.steps)} steps and fine-tuned"
    sizes = format_counts(results.split_sizes.values())
    return ReportTable(
        "scores",
        f"{results.task}, {sizes} rows in {', '.join(results.split_sizes)} ({results.split_words}): {init.recipe} "
        f"{begun}, {_describe_seeds(results)}",
        ("metric", *run.scores.splits),
        tuple(groups),
        (*_legend([run]), *_notes(run)),
    )


def models_table(run: FinetunedRun) -> ReportTable:
    """Return a row for everything that was scored, with a column for each metric, and for what chose the epoch."""
    part, metric = run.results.scored_split, run.results.selection_metric
    found = [
        one._replace(metric=one.metric if one.part == part else f"{one.part} {one.metric}")
        for one in scores_of(run)
        if one.metric != "loss" and (one.part == part or (one.part, one.metric) == ("valid", metric))
    ]
    columns, rows = _pivot(sorted(found, key=lambda one: one.part != part), "what", "metric")
    return ReportTable("models", f"Scores, {part}", ("model", *columns), (rows,), tuple(_legend([run])))


def _legend(runs: Sequence[FinetunedRun]) -> list[str]:
    """Return what the numbers of a table of scores are, where they are not those of one seed on one split."""
    num_splits = max(len(run.scores.split_seeds) for run in runs)
    num_seeds = max(len(run.results.seeds) for run in runs)
    notes = []
    if num_seeds > 1:
        is_median = any(run.results.aggregate == "median" for run in runs)
        what = "median (lowest to highest)" if is_median else "mean ± standard deviation"
        over = f"{num_splits} splits with {num_seeds} seeds each" if num_splits > 1 else f"{num_seeds} seeds"
        gives = "of each split; `exlm predict --with model` averages the splits too" if num_splits > 1 else ""
        gives = gives or "which is what `exlm predict --with model` gives"
        notes.append(
            f"the first scores are those of the seeds' mean prediction, {gives}; those of {SINGLE_SEEDS} are {what} of "
            f"{over}, each scored alone"
        )
    return notes + _spread_over_splits(runs)


def _spread_over_splits(runs: Sequence[FinetunedRun]) -> list[str]:
    """Return what the deviations of mean predictions are, where there are any."""
    num_splits = max(len(run.scores.split_seeds) for run in runs)
    of_seeds = " of the mean prediction" if max(len(run.results.seeds) for run in runs) > 1 else ""
    return [f"mean ± standard deviation over {num_splits} splits{of_seeds}"] if num_splits > 1 else []


def label_scores_table(labels: Mapping[str, Mapping[str, float]]) -> ReportTable:
    """Return the scores of each label or value of a prediction."""
    is_value = "rmse" in next(iter(labels.values()))
    names, kind = (_OF_VALUES, "value") if is_value else (_OF_LABELS, "label")
    rows: list[Row] = [
        (label, *(Number(scores[name], format_number, missing=NOT_DEFINED) for name in names))
        for label, scores in labels.items()
    ]
    shown = rows[:_MAX_LABELS]
    notes = [f"the first {len(shown)} of {len(rows)}; the JSON output has all"] if len(rows) > _MAX_LABELS else []
    return ReportTable("labels", f"Each {kind} alone", (kind, *names), (tuple(shown),), tuple(notes))


def _labels_table(run: FinetunedRun) -> ReportTable:
    """Return the mean prediction's scores of each label or value on the reported split, the others' beside them."""
    results, scores, split = run.results, run.scores, run.results.scored_split
    is_value = results.loss == "regression"
    names = _OF_VALUES if is_value else _OF_LABELS
    labels = scores.labels(split)
    others = [model for model in run.scores.others if scores.labels(split, model)]
    rows: list[Row] = [
        (
            label,
            *(score_entry(run.average(name, label=label), "mean") for name in names),
            *(score_entry(run.average(names[0], model=model, label=label), "mean") for model in others),
        )
        for label in labels[:_MAX_LABELS]
    ]
    notes = [*_spread_over_splits([run]), *(["errors are in the unit of each column"] if is_value else [])]
    if len(labels) > _MAX_LABELS:
        notes.append(f"the first {_MAX_LABELS} of {len(labels)}; scores.csv has all")
    kind = "value" if is_value else "label"
    columns = (kind, *names, *(f"{names[0]} of {OTHER_NAMES[model]}" for model in others))
    return ReportTable("labels", f"{split}: each {kind} alone", columns, (tuple(rows),), tuple(notes))


def interval_tables(run: FinetunedRun) -> list[ReportTable]:
    """Return the table of a run that predicts values and has a test split; none for other runs.

    Raises:
        CheckpointError: The calibration of the run is missing or altered.
    """
    if run.results.loss != "regression" or "test" not in run.results.split_sizes:
        return []
    calibration = read_calibration(run.run_dir, run.results.predictor)
    if not calibration.coverage:
        return []
    table = ReportTable(
        name="intervals",
        title=f"Intervals of {100 * DEFAULT_LEVEL:g} %, test",
        columns=("rows", "number", "inside", "95 % interval of inside", "mean width"),
        entries=tuple(
            tuple(_interval_row(part, name if len(calibration.coverage) > 1 else "") for part in parts)
            for name, parts in calibration.coverage.items()
        ),
        notes=_interval_notes(calibration, run.results),
    )
    return [table]


def _interval_row(part: Coverage, name: str) -> tuple[str, ...]:
    """Return the cells of a third of the rows; the interval is Wilson's, of independent rows."""
    from scipy.stats import binomtest

    sign = "all rows" if part.most is None else f"Tanimoto similarity {part.most:.2g} to {part.least:.2g}"
    interval = binomtest(part.num_inside, part.num_rows).proportion_ci(0.95, method="wilson")
    return (
        f"{name}: {sign}" if name else sign,
        format_count(part.num_rows),
        format_percent(part.num_inside / part.num_rows),
        f"{format_percent(interval.low)} to {format_percent(interval.high)}",
        format_number(part.mean_width),
    )


def _interval_notes(calibration: Calibration, results: RunResults) -> tuple[str, ...]:
    """Return what is promised, and which outputs have intervals of one width although the distance is known."""
    promise = (
        f"promised: {100 * DEFAULT_LEVEL:g} % of the rows that come from where the validation rows come from, or a "
        "little fewer, as these chose the epoch too; a scaffold split, or new chemistry, breaks that"
    )
    few = [f"`{results.output_names[index]}`" for index in calibration.of_one_width]
    plain = f"equally wide for all rows: fewer than {MIN_THIRDS_ROWS} validation rows: {name_some(few)}"
    return (promise, plain) if few and results.input_kind == "smiles" else (promise,)


def task_tables(runs: Sequence[FinetunedRun]) -> list[ReportTable]:
    """Return a table for each task, in the order of the runs; CSV runs on other rows or labels have their own."""
    groups: dict[tuple[object, ...], list[FinetunedRun]] = {}
    for run in runs:
        results = run.results
        groups.setdefault((results.task, results.output_names, results.labels_sha256), []).append(run)
    tables = [_task_table(group) for group in groups.values()]
    names = number_repeated([table.name for table in tables])
    return [replace(table, name=name) for name, table in zip(names, tables, strict=True)]


def score_entry(spread: Spread, aggregate: Aggregate, *, missing: str = NOT_DEFINED) -> Number:
    """Return `0.8123 ± 0.0101` (sample standard deviation), or `0.8123 (0.8001 to 0.8201)` around a median."""
    center = spread.center(aggregate)
    write = partial(format_number, beside=center)
    if spread.num < 2 or aggregate == "mean":
        return Number(center, write, spread.std, missing=missing)
    return Number(center, write, low=spread.low, high=spread.high, missing=missing)


def percent_entry(spread: Spread, aggregate: Aggregate) -> Number:
    """Return a score as the paper prints it: `85.2 ± 0.4` in percent, or a median alone; a dash where there is none."""
    deviation = spread.std if aggregate == "mean" else math.nan
    return Number(100 * spread.center(aggregate), decimals(1), 100 * deviation)


def pretraining_budget(init: InitialWeights) -> str:
    """Return `4,000 steps, 13.1 M tokens`, or `none` for weights drawn from the seed."""
    if init.objective == "scratch":
        return "none"
    return f"{format_count(init.steps)} steps, {format_large(init.tokens)} tokens"


def _ordered(names: Iterable[str], results: RunResults) -> list[str]:
    """Return metrics with the one that chose the epoch first and the loss last."""
    return sorted(names, key=lambda name: (name != results.selection_metric, name == "loss"))


def _notes(run: FinetunedRun) -> list[str]:
    """Return notes on data and training; those of one split alone say so."""
    results, metric = run.results, run.results.selection_metric
    notes = [*results.notes]
    if results.grid_best is not None:
        chosen = ", ".join(f"{key}={value}" for key, value in results.grid_best.values.items())
        of_split = "first split: " if len(results.split_seeds) > 1 else ""
        notes.append(f"{of_split}best of {len(results.grid)} grid points: {chosen}")
    epochs = ", ".join(map(str, results.best_epochs))
    notes.append(f"best epochs by validation {metric}: {epochs}")
    if results.split_intervals:
        names = _ordered(results.split_intervals, results)
        shown = (
            f"{name} {format_number(bounds.low)} to {format_number(bounds.high)}"
            for name, bounds in sorted(results.split_intervals.items(), key=lambda one: names.index(one[0]))
        )
        notes.append(f"95 % intervals on {results.scored_split} over splits: {', '.join(shown)}")
    if (interval := results.rows_interval) is not None:
        ends = f"{format_number(interval.low)} to {format_number(interval.high)}"
        rows = format_number_of(interval.num, f"{results.scored_split} row")
        if len(results.split_seeds) > 1:
            rows += f" of {len(results.split_seeds)} splits, drawn within each"
        notes.append(f"95 % interval of {metric} over the {rows}, {NUM_RESAMPLES:,} resamples: {ends}")
    speed = f"{format_count(results.tokens_per_s)} tokens/s each"
    notes.append(f"trainings took {format_duration(results.elapsed_s)} together, at {speed}")
    return notes


def _task_table(runs: Sequence[FinetunedRun]) -> ReportTable:
    """Return a row for each metric and a column for each run of a task, then for each baseline and each mean of both.

    Scores of the seeds' mean predictions come first, those of single seeds below.
    """
    first = runs[0].results
    names = _ordered(dict.fromkeys(name for run in runs for name in run.scores.names(run.results.scored_split)), first)
    columns = ["metric", *(run.name for run in runs)]
    averages = [[_show_average(run, name) for name in names] for run in runs]
    alone = [[_show_seeds(run, name) for name in names] for run in runs]
    has_one_split = len(set(map(_splits_of, runs))) == 1
    shown = set()
    for run in runs:
        for model in run.scores.others:
            # a baseline is the same for all runs on the same rows; its mean with a model is of one run
            scored = (run.name if model == BOTH else _splits_of(run), model)
            if scored in shown:
                continue
            shown.add(scored)
            if model == BOTH:
                columns.append(OTHER_NAMES[BOTH].replace("model", run.name))
            else:
                columns.append(OTHER_NAMES[model] + ("" if has_one_split else f", rows of {run.name}"))
            averages.append([score_entry(run.average(name, model=model), "mean", missing=NO_VALUE) for name in names])
            alone.append([_show_seeds(run, name, model) for name in names])
    groups = [tuple(zip(names, *averages, strict=True))]
    if any(len(run.results.seeds) > 1 for run in runs):
        groups[0] = tuple(row for row in groups[0] if row[0] != "loss")
        groups.append(tuple(zip((f"{name}, {SINGLE_SEEDS}" for name in names), *alone, strict=True)))
    sizes = format_counts(first.split_sizes.values())
    return ReportTable(
        "scores-" + first.task.replace("/", "-"),
        f"{first.task}, {sizes} rows in {', '.join(first.split_sizes)}, scored on {first.scored_split}",
        tuple(columns),
        tuple(groups),
        (*_legend(runs), *map(_describe_run, runs), *_differences(runs, names[0])),
    )


def _show_average(run: FinetunedRun, name: str) -> Entry:
    """Return the score of the mean prediction; the loss of a run of one seed is that of the seed."""
    is_loss = name == "loss" and len(run.results.seeds) == 1
    return score_entry(run.seeds(name) if is_loss else run.average(name), "mean", missing=NO_VALUE)


def _show_seeds(run: FinetunedRun, name: str, model: str = MODEL) -> Entry:
    return score_entry(run.seeds(name, model=model), run.results.aggregate, missing=NO_VALUE)


def _describe_run(run: FinetunedRun) -> str:
    init = run.results.init
    return (
        f"{run.name}: {init.recipe} ({init.objective}), pre-training {pretraining_budget(init)}, "
        f"{format_parameters(run.results.parameters)} parameters, {_describe_seeds(run.results)}"
    )


def _describe_seeds(results: RunResults) -> str:
    num_seeds = len(results.seeds)
    if len(results.split_seeds) > 1:
        seeds = f"{num_seeds} seeds" if num_seeds > 1 else "a seed"
        return f"{len(results.split_seeds)} splits with {seeds} each"
    return f"{num_seeds} seeds" if num_seeds > 1 else f"seed {results.seeds[0]}"


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
    return run.results.split_sha256, len(run.results.split_seeds)


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


def _by_seed(run: FinetunedRun, metric: str) -> dict[str, float]:
    """Return the values of a metric by seed; none for those on several splits."""
    if len(run.scores.split_seeds) > 1:
        return {}
    rows = run.scores.by_seed(run.results.scored_split, metric)
    rows = rows[rows.value.notna()]
    return dict(zip(rows.seed.tolist(), rows.value.tolist(), strict=True))
