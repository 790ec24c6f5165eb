"""Verdict on a fine-tuned model: its scores beside the better baseline's and beside a guess, with intervals. No torch.

The model is the mean prediction of its seeds, which is what `exlm predict` gives, and so is a baseline.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from exlm_cli.files import finite_or_none
from exlm_cli.finetune.evaluation.intervals import (
    RESAMPLED_METRICS,
    Bounds,
    ScoredRows,
    gain_range,
    mean_interval,
    percentile_interval,
    resample_scores,
)
from exlm_cli.finetune.results import (
    Comparison,
    Interval,
    KnownRows,
    Over,
    Predictors,
    RunResults,
    read_split_outputs,
)
from exlm_cli.finetune.scores import BASELINE_NAMES, BOTH, MODEL, Predictor, RunScores, predictors_with
from exlm_cli.format import format_count, format_number, format_number_of, format_percent
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.metrics import metric_range

_CHANCE = {"roc_auc": 0.5, "matthews_corrcoef": 0.0, "r2": 0.0, "pearsonr": 0.0, "spearmanr": 0.0}
"""What a guess scores on average; R² of the mean of the training rows is about 0."""


def join_splits(splits: Sequence[RunResults], scores: RunScores) -> RunResults:
    """Return the results of a run over its splits: those of the first, with what is known of all of them.

    Args:
        splits: Results on each split of the rows, the run's own first.
        scores: Of all splits.
    """
    if len(splits) == 1:
        return splits[0]
    first, shared = splits[0], set(splits[0].notes).intersection(*(of_split.notes for of_split in splits))
    own = (f"split {one.split_seeds[0]}: {note}" for one in splits for note in one.notes if note not in shared)
    found = {metric: _split_interval(first, scores, metric) for metric in scores.names(first.scored_split)}
    joined = {
        "split_seeds": tuple(seed for of_split in splits for seed in of_split.split_seeds),
        "points": tuple(point for of_split in splits for point in of_split.points),
        "best_epochs": tuple(epoch for of_split in splits for epoch in of_split.best_epochs),
        "elapsed_s": round(sum(of_split.elapsed_s for of_split in splits), 3),
        "tokens_per_s": round(sum(of_split.tokens_per_s for of_split in splits) / len(splits), 1),
        "outside_model_share": round(sum(of_split.outside_model_share for of_split in splits) / len(splits), 4),
        "notes": (*(note for note in first.notes if note in shared), *own),
        "split_intervals": {metric: interval for metric, interval in found.items() if interval is not None},
    }
    return first.model_copy(update=joined)


def _split_interval(results: RunResults, scores: RunScores, metric: str) -> Interval | None:
    values = scores.by_split(results.scored_split, metric).values()
    bounds = mean_interval([[value] for value in values], metric_range(metric), results.test_share)
    return _interval(bounds, "splits", len(values))


def read_scored_rows(
    run: Path, results: RunResults, num_rows: int, scale_C: FloatArray | None, baselines: Sequence[str]
) -> ScoredRows:
    """Return the mean predictions of the seeds, and of those of each baseline, for the rows of the scored split.

    Args:
        num_rows: Rows that the main metrics are over, the first ones.
        scale_C: As in `ScoredRows`.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    split = results.scored_split
    found = [read_split_outputs(run, results, split, baseline=name) for name in (None, *baselines)]
    predictions = [by_seed.mean(axis=0)[:num_rows] for _, by_seed, _ in found]
    return ScoredRows(results.loss, predictions, found[0][2][:num_rows], scale_C)


def interval_over_rows(results: RunResults, rows: ScoredRows) -> Interval | None:
    """Return the interval of the model's own score over the rows; None for a metric that is not resampled."""
    if results.selection_metric not in RESAMPLED_METRICS:
        return None
    own = replace(rows, predictions=rows.predictions[:1])
    return _interval(percentile_interval(resample_scores(results.selection_metric, own)[0]), "rows", len(rows.targets))


def compare(splits: Sequence[RunResults], scores: RunScores, rows: ScoredRows | None) -> Comparison | None:
    """Compare the model with the baseline that is better on the validation rows; None where no baseline was scored.

    Args:
        splits: Results on each split of the rows, the run's own first.
        scores: Of all splits.
        rows: Of the run's own split, baselines in the order of `scores`; used where it is the only one.
    """
    own, names = splits[0], scores.baselines
    if not names:
        return None
    metric, part, sign = own.selection_metric, own.scored_split, 1 if own.is_greater_better else -1
    in_validation = [scores.average("valid", metric, model=name).mean for name in names]
    best = first_best(in_validation, is_greater_better=own.is_greater_better)
    ours, theirs = (scores.by_split(part, metric, model) for model in (MODEL, names[best]))
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs:
        return Comparison(baseline=names[best], metric=metric, split=part, of_model=None, of_baseline=None, gain=None)
    gains = [sign * (a - b) for a, b in pairs]
    if len(splits) > 1:
        over_splits = mean_interval([[gain] for gain in gains], gain_range(metric), own.test_share)
        intervals = [_interval(over_splits, "splits", len(gains))]
    else:
        intervals = [_gain_over_rows(metric, rows, 1 + best, sign), _gain_over_seeds(own, scores, names[best], sign)]
    of_model, of_baseline = (float(np.mean([pair[i] for pair in pairs])) for i in (0, 1))
    return Comparison(
        baseline=names[best],
        metric=metric,
        split=part,
        of_model=of_model,
        of_baseline=of_baseline,
        gain=float(np.mean(gains)),
        intervals=tuple(found for found in intervals if found is not None),
    )


def _gain_over_rows(metric: str, rows: ScoredRows | None, index: int, sign: int) -> Interval | None:
    if rows is None or metric not in RESAMPLED_METRICS:
        return None
    of_model_B, of_baseline_B = resample_scores(
        metric, replace(rows, predictions=[rows.predictions[0], rows.predictions[index]])
    )
    return _interval(percentile_interval(sign * (of_model_B - of_baseline_B)), "rows", len(rows.targets))


def _gain_over_seeds(own: RunResults, scores: RunScores, baseline: str, sign: int) -> Interval | None:
    by_model = [
        scores.by_seed(own.scored_split, own.selection_metric, model=model).set_index("seed").value
        for model in (MODEL, baseline)
    ]
    gains = (sign * (by_model[0] - by_model[1])).dropna().tolist()
    found = mean_interval([[gain] for gain in gains], gain_range(own.selection_metric))
    return _interval(found, "seeds", len(gains))


def _interval(bounds: Bounds | None, over: Over, num: int) -> Interval | None:
    return None if bounds is None else Interval(low=bounds[0], high=bounds[1], over=over, num=num)


def first_best(values: Sequence[float], *, is_greater_better: bool) -> int:
    """Return the place of the best value; the first of equals, and where none is defined."""
    ranked = np.array(values) if is_greater_better else -np.array(values)
    return int(np.argmax(np.where(np.isnan(ranked), -np.inf, ranked)))


def choose_predictor(splits: Sequence[RunResults], scores: RunScores) -> Predictors | None:
    """Return what predicts in a run over its splits, and which of it is best in validation; None without baselines.

    Args:
        splits, scores: As in `compare`; each split has a baseline and a share of its own.
    """
    found = [of_split.predictors for of_split in splits if of_split.predictors is not None]
    if len(found) < len(splits):
        return None
    names = predictors_with(found[0].baselines[0])
    valid = {name: _predictor_score(name, "valid", splits, scores) for name in names}
    best = names[first_best(list(valid.values()), is_greater_better=splits[0].is_greater_better)]
    return Predictors(
        baselines=tuple(baseline for one in found for baseline in one.baselines),
        shares=tuple(share for one in found for share in one.shares),
        valid=finite_or_none(valid),
        best=best,
    )


def _predictor_score(name: Predictor, part: str, splits: Sequence[RunResults], scores: RunScores) -> float:
    """Return the mean over the splits of what model, chosen baseline or both score; NaN where it is not defined."""
    values = []
    for of_split, seed in zip(splits, scores.split_seeds, strict=True):
        assert of_split.predictors is not None, "the caller has looked"
        model = {"model": MODEL, "both": BOTH}.get(name, of_split.predictors.baselines[0])
        values.append(scores.by_split(part, of_split.selection_metric, model).get(seed, math.nan))
    return float(np.mean(values))


def describe_verdict(splits: Sequence[RunResults], scores: RunScores, comparison: Comparison | None) -> tuple[str, ...]:
    """Return sentences: what to predict new rows with, the command first; its scores; whether a difference is clear.

    Args:
        splits, scores: As in `compare`.
    """
    own = splits[0]
    beside = [] if comparison is None else [_beside_baseline(comparison, len(splits))]
    doubts = _beside_chance(splits, scores)
    is_open = len(splits) == 1 and (bool(doubts) or (comparison is not None and comparison.gain is not None))
    left_open = [_what_is_left_open(own)] if is_open else []
    return tuple(_what_to_use(splits, scores) + beside + doubts + left_open)


def _what_to_use(splits: Sequence[RunResults], scores: RunScores) -> list[str]:
    """Return the command for new rows and what it uses, and what each predictor scores."""
    found, own = choose_predictor(splits, scores), splits[0]
    command = "Predict new rows with `exlm predict RUN FILE`"
    if found is None:
        return [f"{command}."]
    names = {"model": "the model", "forest": "the forest", "tfidf": "TF-IDF", "both": "the mean of both"}
    others = [name for name in found.distinct if name != found.best]
    rows = f"the {format_count(own.split_sizes['valid'])} validation rows"
    if found.valid[found.best] is None:
        why = f"as {own.selection_metric} is not defined on {rows}"
    else:
        why = f"the best on {rows if len(splits) == 1 else 'the validation rows'}"
    by_part = [
        f"on {part} rows: "
        + ", ".join(
            f"{names[name]} {format_number(finite_or_none(_predictor_score(name, part, splits, scores)))}"
            for name in (found.best, *others)
        )
        for part in dict.fromkeys(("valid", own.scored_split))
    ]
    options = " or ".join(f"`--with {name}`" for name in others)
    return [
        f"{command}. It uses {describe_predictor(found.best, found)}, {why}; {options} takes another.",
        f"{own.selection_metric} {'; '.join(by_part)}.".replace("valid rows", "validation rows"),
    ]


def describe_predictor(name: Predictor, predictors: Predictors) -> str:
    """Return what predicts, in words."""
    baselines = " or ".join(dict.fromkeys(BASELINE_NAMES[baseline] for baseline in predictors.baselines))
    if name == "model":
        return "the model"
    if name != "both":
        return baselines
    share = sum(predictors.shares) / len(predictors.shares)
    return f"the mean of the model ({format_percent(share)}) and {baselines} ({format_percent(1 - share)})"


def _beside_baseline(comparison: Comparison, num_splits: int) -> str:
    metric, part, name = comparison.metric, comparison.split, BASELINE_NAMES[comparison.baseline]
    if comparison.gain is None:
        return f"{metric} is not defined on these {part} rows, so the model cannot be compared with {name}."
    detail = f"the model's gain in {metric} is {format_number(comparison.gain)}"
    if comparison.intervals:
        shown = (
            f"{format_number(found.low)} to {format_number(found.high)} {_describe_over(found)}"
            for found in comparison.intervals
        )
        detail += f", with a 95 % interval of {' and '.join(shown)}"
    here = f" on these {part} rows" if num_splits == 1 else ""
    deciding = comparison.intervals[0] if comparison.intervals else None
    low, high = (comparison.gain,) * 2 if deciding is None else (deciding.low, deciding.high)
    if low > 0:
        sentence = f"The model is better than {name}{here}: {detail}."
    elif high < 0:
        sentence = f"{name} is better than the model{here}: {detail}."
    else:
        sentence = f"There is no clear difference between the model and {name}{here}: {detail}."
    if part == "valid":
        sentence += " The best epoch of the model was chosen on these rows, which favours the model."
    return sentence


def _describe_over(interval: Interval) -> str:
    if interval.over == "rows":
        return f"over the {format_number_of(interval.num, 'row')}"
    if interval.over == "seeds":
        return f"for a single one of {interval.num} seeds"
    return f"over {interval.num} splits"


def _what_is_left_open(own: RunResults) -> str:
    """Return what may reverse a verdict from one split of the rows, and how to find out."""
    num_rows = format_number_of(own.split_sizes[own.scored_split], f"{own.scored_split} row")
    seeds = "one seed" if len(own.seeds) == 1 else f"{len(own.seeds)} seeds"
    tries = ["`exlm finetune --resume RUN --seeds 1,2,3` trains more seeds"] if len(own.seeds) == 1 else []
    if own.split in ("random", "scaffold-balanced"):
        tries.append("`exlm finetune --resume RUN --num-replicates 5` tries five splits")
    elif own.split.startswith("scaffold"):  # files, a column or a split file leave no other split
        tries.append("a new run with `--split scaffold-balanced --num-replicates 5` tries five splits")
    advice = f": {', and '.join(tries)}" if tries else ""
    return f"This is {seeds} on one split with {num_rows}, and another may reverse it{advice}."


def _beside_chance(splits: Sequence[RunResults], scores: RunScores) -> list[str]:
    own = splits[0]
    part, names = own.scored_split, scores.names(own.scored_split)
    metric = "r2" if "r2" in names else own.selection_metric
    if metric == "accuracy":  # that of a guess depends on the rows
        metric = "matthews_corrcoef"
    if metric not in _CHANCE or metric not in names:
        return []
    by_split = scores.by_split(part, metric)
    values = list(by_split.values())
    if not values:
        return []
    scored = (of_split for of_split, seed in zip(splits, scores.split_seeds, strict=True) if seed in by_split)
    known, chance, mean = next(scored).known_rows[part], _CHANCE[metric], float(np.mean(values))
    if len(values) > 1:
        interval = mean_interval([[value] for value in values], metric_range(metric), own.test_share)
    else:
        alone = scores.by_seed(part, metric).value.dropna().tolist()
        interval = mean_interval([[value] for value in alone], metric_range(metric))
    luck = _luck(metric, known)
    # seeds of one split share its test rows, so their interval leaves out the luck of these
    may_be_luck = len(values) == 1 and mean - luck <= chance
    if not may_be_luck and (interval is None or interval[0] > chance):
        return []
    guess = "the mean of the training rows" if metric == "r2" else "a random guess"
    sentence = f"The model is not clearly better than {guess}: it has {part} {metric} {format_number(mean)}, "
    sentence += f"{guess} has {chance:g}"
    if may_be_luck and luck:
        lucky = format_number(min(1.0, chance + luck))
        sentence += f", and on {_describe_rows(metric, known)}, chance alone may reach {lucky}"
    return [f"{sentence}."]


def _luck(metric: str, known: KnownRows) -> float:
    """Return two standard deviations of what a guess scores on rows with known targets; 0 where that is not known.

    ROC-AUC: its variance is (n + m + 1) / 12nm with n rows of a class and m others (Mann and Whitney, 1947). A
    correlation over N rows: 1 / (N - 1); that of Matthews with more than two classes: at most that. R² is never above
    the square of the correlation.

    Of a mean over labels: the mean of their deviations. It is exact where all labels agree, and too large where they
    do not; labels of one table often agree.
    """
    if metric == "roc_auc":
        pairs = [(count, sum(counts) - count) for counts in known for count in counts]
        lucks = [2 * math.sqrt((n + m + 1) / (12 * n * m)) for n, m in pairs if n and m]
    else:
        defined = [sum(counts) for counts in known if len(counts) == 1 or np.count_nonzero(counts) > 1]
        lucks = [2 / math.sqrt(num_rows - 1) for num_rows in defined if num_rows > 1]
        lucks = [luck**2 for luck in lucks] if metric == "r2" else lucks
    return math.fsum(lucks) / max(1, len(lucks))


def _describe_rows(metric: str, known: KnownRows) -> str:
    num_rows = format_count(sum(map(sum, known)) / len(known))
    if len(known) > 1:
        return f"{num_rows} rows for each column on average"
    rarest = f", {format_count(min(filter(None, known[0])))} of them of the rarest class" if metric == "roc_auc" else ""
    return f"{num_rows} rows{rarest}"
