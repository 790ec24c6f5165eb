"""Verdict on a fine-tuned model: intervals over seeds and splits, and its scores beside the baseline's. No torch."""

import math
from collections.abc import Sequence

import numpy as np

from exlm_cli.finetune.results import (
    BaselineResult,
    KnownRows,
    Replication,
    RunResults,
    Summaries,
    Summary,
    summarise_values,
)
from exlm_cli.format import format_count, format_number

_CHANCE = {"roc_auc": 0.5, "matthews_corrcoef": 0.0, "r2": 0.0, "pearsonr": 0.0, "spearmanr": 0.0}
"""What a guess scores on average; R² of the mean of the training rows is about 0."""


def mean_interval(groups: Sequence[Sequence[float]], overlap: float = 0.0) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean over n groups of values, each averaged first: mean ± t · s · sqrt(1/n + o).

    Args:
        groups: Values of the seeds on each split, or one value of each seed.
        overlap: o. Splits of the same rows share most of them, so their scores vary less than those of new rows would:
            with o = test rows / training rows the interval is that of Nadeau and Bengio (2003).

    Returns:
        None for fewer than two groups.
    """
    from scipy import stats

    means = np.array([np.mean(group) for group in groups])
    num = len(means)
    if num < 2:
        return None
    half = stats.t.ppf(0.975, num - 1) * means.std(ddof=1) * math.sqrt(1 / num + overlap)
    return float(means.mean() - half), float(means.mean() + half)


def summarise_splits(splits: Sequence[RunResults], split_seeds: tuple[int, ...]) -> Replication:
    """Return the scores over the splits of a run, the run's own first."""
    metrics = _joined([of_split.metrics for of_split in splits])
    overlap = _overlap(splits[0])
    intervals = {
        part: {name: _interval([of_split.metrics[part][name] for of_split in splits], overlap) for name in scores}
        for part, scores in metrics.items()
    }
    labels = {part: _joined([of_split.labels[part] for of_split in splits]) for part in splits[0].labels}
    baselines = [of_split.baseline for of_split in splits if of_split.baseline is not None]
    joined = None
    if baselines:
        own = {part: _joined([one.labels[part] for one in baselines]) for part in baselines[0].labels}
        scores = _joined([one.metrics for one in baselines])
        joined = BaselineResult(name=baselines[0].name, seeds=baselines[0].seeds, metrics=scores, labels=own)
    return Replication(
        split_seeds=split_seeds,
        best_epochs=tuple(epoch for of_split in splits for epoch in of_split.best_epochs),
        elapsed_s=round(sum(of_split.elapsed_s for of_split in splits), 3),
        tokens_per_s=round(sum(of_split.tokens_per_s for of_split in splits) / len(splits), 1),
        outside_model_share=round(sum(of_split.outside_model_share for of_split in splits) / len(splits), 4),
        metrics=metrics,
        labels=labels,
        intervals=intervals,
        baseline=joined,
    )


def describe_verdict(splits: Sequence[RunResults]) -> tuple[str, ...]:
    """Return sentences: how the model compares with the baseline, and whether it beats a guess.

    Args:
        splits: Results on each split, the run's own first.
    """
    own = splits[0]
    sentences = [_beside_baseline(splits)] if own.baseline is not None else []
    return tuple(sentences + _beside_chance(splits))


def _beside_baseline(splits: Sequence[RunResults]) -> str:
    own = splits[0]
    metric, part = own.selection_metric, own.scored_split
    pairs = [
        [
            (a, b)
            for a, b in zip(
                of_split.metrics[part][metric].values, of_split.baseline.metrics[part][metric].values, strict=True
            )
            if a is not None and b is not None
        ]
        for of_split in splits
        if of_split.baseline is not None
    ]
    pairs = [of_split for of_split in pairs if of_split]
    assert own.baseline is not None, "the caller has checked"
    name = own.baseline.name
    if not pairs:
        return f"{metric} is not defined on these {part} rows, so the model cannot be compared with {name}."
    sign = 1 if own.is_greater_better else -1
    gains = [[sign * (a - b) for a, b in of_split] for of_split in pairs]
    of_model, of_baseline = (np.mean([np.mean([pair[i] for pair in of_split]) for of_split in pairs]) for i in (0, 1))
    scores = f"{part} {metric} {format_number(float(of_model))} against {format_number(float(of_baseline))}"
    bias = " The best epoch of the model was chosen on these rows, which favours the model." if part == "valid" else ""
    groups, over = _groups(gains)
    interval = mean_interval(groups, _overlap(own) if len(gains) > 1 else 0.0)
    if interval is None:
        better = "The model scores better" if gains[0][0] > 0 else f"{name[0].upper()}{name[1:]} scores better"
        first = "Both score the same" if gains[0][0] == 0 else better
        return f"{first} here: {scores}.{bias} One seed of one split has no interval; `--seeds 1,2,3` gives one."
    low, high = interval
    detail = f"{scores}; 95 % interval of the gain {format_number(low)} to {format_number(high)} over {over}"
    rows = f" on these {part} rows" if len(gains) == 1 else ""
    if low > 0:
        sentence = f"The model is better than {name}{rows}: {detail}."
    elif high < 0:
        sentence = f"{name} is better than the model{rows}: {detail}. Use it, or a checkpoint with more pre-training."
    else:
        sentence = f"No clear difference between the model and {name}{rows}: {detail}."
    sentence += bias
    if len(gains) > 1:
        return sentence
    # the seeds share these rows, so their interval leaves out the luck of the rows
    other_splits = _options_of_splits(own)
    if not other_splits:
        return f"{sentence} Other rows may reverse this."
    return f"{sentence} Another split may reverse this; `{other_splits}` tries five."


def _beside_chance(splits: Sequence[RunResults]) -> list[str]:
    own = splits[0]
    part = own.scored_split
    metric = "r2" if "r2" in own.metrics[part] else own.selection_metric
    if metric == "accuracy":  # that of a guess depends on the rows
        metric = "matthews_corrcoef"
    if metric not in _CHANCE or metric not in own.metrics[part]:
        return []
    by_split = ([v for v in of_split.metrics[part][metric].values if v is not None] for of_split in splits)
    scored = [(of_split, values) for of_split, values in zip(splits, by_split, strict=True) if values]
    if not scored:
        return []
    values, known = [of_split for _, of_split in scored], scored[0][0].known_rows[part]
    chance = _CHANCE[metric]
    groups, _ = _groups(values)
    interval = mean_interval(groups, _overlap(own) if len(values) > 1 else 0.0)
    mean, luck = float(np.mean([np.mean(group) for group in groups])), _luck(metric, known)
    # seeds of one split share its test rows, so their interval leaves out the luck of these
    may_be_luck = len(values) == 1 and mean - luck <= chance
    if not may_be_luck and (interval is None or interval[0] > chance):
        return []
    guess = "the mean of the training rows" if metric == "r2" else "a random guess"
    sentence = f"The model is not clearly better than {guess}: {part} {metric} {format_number(mean)}"
    sentence += f"; {guess} scores {chance:g}."
    if may_be_luck and luck:
        lucky = format_number(min(1.0, chance + luck))
        more = "--seeds 1,2,3" if interval is None else _options_of_splits(own)
        advice = f"`{more}` gives more evidence" if more else "more rows give more evidence"
        sentence += f" On {_describe_rows(metric, known)}, chance alone may reach {lucky}; {advice}."
    return [sentence]


def _options_of_splits(results: RunResults) -> str:
    """Return options that try five splits, or nothing: files, a column or a split file leave no other split."""
    if not results.split.startswith(("scaffold", "random")):
        return ""
    split = "" if results.split in ("random", "scaffold-balanced") else "--split scaffold-balanced "
    return f"{split}--num-replicates 5"


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


def _groups(values: Sequence[Sequence[float]]) -> tuple[Sequence[Sequence[float]], str]:
    """Return the groups that an interval is over: splits, or the seeds of the only split; and their name."""
    if len(values) > 1:
        return values, f"{len(values)} splits"
    return [[value] for value in values[0]], f"{len(values[0])} seeds of one split"


def _overlap(results: RunResults) -> float:
    return results.split_sizes[results.scored_split] / results.split_sizes["train"]


def _interval(summaries: Sequence[Summary], overlap: float) -> tuple[float, float] | None:
    groups = [[value for value in summary.values if value is not None] for summary in summaries]
    return mean_interval([group for group in groups if group], overlap)


def _joined(splits: Sequence[Summaries]) -> Summaries:
    """Return summaries over the values of several splits."""
    return {
        part: {
            name: summarise_values(value for of_split in splits for value in of_split[part][name].values)
            for name in scores
        }
        for part, scores in splits[0].items()
    }
