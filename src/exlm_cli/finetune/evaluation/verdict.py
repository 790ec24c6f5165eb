"""Verdict on a fine-tuned model: its scores beside the best baseline's, with intervals. No torch.

The model is the mean prediction of its seeds, which is what `exlm predict` gives, and so is a baseline.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from exlm_cli.config.tasks import SEEDED_SPLITS
from exlm_cli.files import finite_or_none
from exlm_cli.finetune.evaluation.intervals import (
    Bounds,
    gain_range,
    mean_interval,
    percentile_interval,
)
from exlm_cli.finetune.results import (
    Comparison,
    Interval,
    Over,
    Predictors,
    RunResults,
)
from exlm_cli.finetune.scores import BASELINE_NAMES, MODEL, PREDICTORS, Predictor, RunScores, first_best
from exlm_cli.format import format_count, format_number, format_number_of
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.metrics import FEW_ROWS, metric_range


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
    values = list(scores.by_split(results.scored_split, metric).values())
    bounds = mean_interval(values, metric_range(metric), results.test_share)
    return _interval(bounds, "splits", len(values))


@dataclass(frozen=True)
class Resampled:
    """Scores of the model and of its baseline on the same resamples of the scored rows.

    Attributes:
        by_model: (B,) scores by name in `scores.csv`; of several splits the mean, rows drawn within each.
        num_rows: Rows that are resampled, of all splits.
    """

    by_model: Mapping[str, FloatArray]
    num_rows: int

    @property
    def interval(self) -> Interval | None:
        """Of the model's own score."""
        return _interval(percentile_interval(self.by_model[MODEL]), "rows", self.num_rows)

    def gain(self, baseline: str, sign: int) -> Interval | None:
        """Return the interval of the model's gain over a baseline."""
        gains_B = sign * (self.by_model[MODEL] - self.by_model[baseline])
        return _interval(percentile_interval(gains_B), "rows", self.num_rows)


def compare(splits: Sequence[RunResults], scores: RunScores, resampled: Resampled | None) -> Comparison | None:
    """Compare the model with the baseline that is the best on the validation rows; None where no baseline was scored.

    Args:
        splits: Results on each split of the rows, the run's own first.
        scores: Of all splits.
        resampled: Of all splits; None where too few rows tell one from the other.
    """
    own, name = splits[0], best_baseline(scores, splits[0])
    if name is None:
        return None
    metric, part, sign = own.selection_metric, own.scored_split, 1 if own.is_greater_better else -1
    ours, theirs = (scores.by_split(part, metric, model) for model in (MODEL, name))
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs:
        return Comparison(baseline=name, metric=metric, split=part, of_model=None, of_baseline=None, gain=None)
    gains = [sign * (a - b) for a, b in pairs]
    over_splits = mean_interval(gains, gain_range(metric), own.test_share)
    intervals = [
        _interval(over_splits, "splits", len(gains)),
        None if resampled is None else resampled.gain(name, sign),
        None if len(splits) > 1 else _gain_over_seeds(own, scores, name, sign),
    ]
    of_model, of_baseline = (float(np.mean([pair[i] for pair in pairs])) for i in (0, 1))
    return Comparison(
        baseline=name,
        metric=metric,
        split=part,
        of_model=of_model,
        of_baseline=of_baseline,
        gain=float(np.mean(gains)),
        intervals=tuple(found for found in intervals if found is not None),
    )


def best_baseline(scores: RunScores, own: RunResults) -> str | None:
    """Return the baseline that is the best on the validation rows, the first of equals; None without any."""
    names = scores.baselines
    values = [scores.average("valid", own.selection_metric, model=name).mean for name in names]
    return names[first_best(values, is_greater_better=own.is_greater_better)] if names else None


def _gain_over_seeds(own: RunResults, scores: RunScores, baseline: str, sign: int) -> Interval | None:
    by_model = [
        scores.by_seed(own.scored_split, own.selection_metric, model=model).set_index("seed").value
        for model in (MODEL, baseline)
    ]
    gains = (sign * (by_model[0] - by_model[1])).dropna().tolist()
    found = mean_interval(gains, gain_range(own.selection_metric))
    return _interval(found, "seeds", len(gains))


def _interval(bounds: Bounds | None, over: Over, num: int) -> Interval | None:
    return None if bounds is None else Interval(low=bounds[0], high=bounds[1], over=over, num=num)


def choose_predictor(splits: Sequence[RunResults], scores: RunScores) -> Predictors | None:
    """Return what predicts in a run over its splits, and which of it is best in validation; None without baselines.

    Where fewer than `FEW_ROWS` validation rows tell one from another, the mean of model and baseline predicts: the best
    on so few is the best by chance.

    Args:
        splits, scores: As in `compare`; each split has a baseline of its own.
    """
    found = [of_split.predictors for of_split in splits if of_split.predictors is not None]
    if len(found) < len(splits):
        return None
    valid = {name: _predictor_score(name, "valid", splits, scores) for name in PREDICTORS}
    num_telling = sum(one.num_telling for one in found)
    best = PREDICTORS[first_best(list(valid.values()), is_greater_better=splits[0].is_greater_better)]
    if num_telling < FEW_ROWS:
        best = "both"
    return Predictors(
        baselines=tuple(baseline for one in found for baseline in one.baselines),
        valid=finite_or_none(valid),
        num_telling=num_telling,
        best=best,
    )


def _predictor_score(name: Predictor, part: str, splits: Sequence[RunResults], scores: RunScores) -> float:
    """Return the mean over the splits of what model, chosen baseline or both score; NaN where it is not defined."""
    values = []
    for of_split, seed in zip(splits, scores.split_seeds, strict=True):
        model = of_split.scored_as(name)
        values.append(scores.by_split(part, of_split.selection_metric, model).get(seed, math.nan))
    return float(np.mean(values))


def describe_verdict(splits: Sequence[RunResults], scores: RunScores, comparison: Comparison | None) -> tuple[str, ...]:
    """Return sentences: what to predict new rows with, the command first; its scores; whether a difference is clear.

    Args:
        splits, scores: As in `compare`.
    """
    beside = [] if comparison is None else [_beside_baseline(comparison)]
    is_open = len(splits) == 1 and comparison is not None and comparison.gain is not None
    more = "`exlm finetune --resume RUN --num-replicates 5` tries five"
    few = [f"Two splits are too few for an interval over splits: {more}."] if len(splits) == 2 else []
    own = splits[0]
    scored = {"test": "test", "valid": "validation"}[own.scored_split]
    like = [f"The {scored} rows imitate {own.imitates}."] if own.imitates else []
    return tuple(_what_to_use(splits, scores) + beside + like + few + ([_what_is_left_open(own)] if is_open else []))


def _what_to_use(splits: Sequence[RunResults], scores: RunScores) -> list[str]:
    """Return the command for new rows and what it uses, and what each predictor scores."""
    found, own = choose_predictor(splits, scores), splits[0]
    command = "Predict new rows with `exlm predict RUN FILE`"
    if found is None:
        return [f"{command}."]
    names = {"model": "the model", "baseline": "the baseline", "both": "the mean of both"}
    others = [name for name in PREDICTORS if name != found.best]
    rows = f"the {format_count(own.split_sizes['valid'])} validation rows"
    if found.num_telling < FEW_ROWS:
        of = "" if own.loss == "regression" else " of the rarer class"
        why = f"as {format_number_of(found.num_telling, 'validation row')}{of} cannot tell which is best"
    elif found.valid[found.best] is None:
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
    return {"model": "the model", "both": f"the mean of the model and {baselines}"}.get(name, baselines)


def _beside_baseline(comparison: Comparison) -> str:
    metric, part, name = comparison.metric, comparison.split, BASELINE_NAMES[comparison.baseline]
    if comparison.gain is None:
        return f"{metric} is not defined on these {part} rows, so the model cannot be compared with {name}."
    assert comparison.of_model is not None and comparison.of_baseline is not None, "there is a gain"  # noqa: PT018
    more = comparison.of_model - comparison.of_baseline
    detail = f"the model's {metric} is {format_number(abs(more))} {'lower' if more < 0 else 'higher'}"
    if comparison.intervals:
        shown = (
            f"{format_number(found.low)} to {format_number(found.high)} {_describe_over(found)}"
            for found in comparison.intervals
        )
        detail += f", and the 95 % interval of its gain is {' and '.join(shown)}"
    deciding = comparison.intervals[0] if comparison.intervals else None
    here = "" if deciding is not None and deciding.over == "splits" else f" on these {part} rows"
    if deciding is None:
        sentence = f"These {part} rows are too few to tell the model from {name}: {detail}."
    elif deciding.low > 0:
        sentence = f"The model is better than {name}{here}: {detail}."
    elif deciding.high < 0:
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
    if own.split in SEEDED_SPLITS:
        tries.append("`exlm finetune --resume RUN --num-replicates 5` tries five splits")
    elif own.split.startswith("scaffold"):  # files, a column or a split file leave no other split
        tries.append("a new run with `--split scaffold-balanced --num-replicates 5` tries five splits")
    advice = f": {', and '.join(tries)}" if tries else ""
    return f"This is {seeds} on one split with {num_rows}, and another may reverse it{advice}."
