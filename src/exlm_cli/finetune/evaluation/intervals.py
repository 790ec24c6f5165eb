"""95 % intervals of scores: over seeds or splits by Student's t, over test rows by a paired bootstrap. No torch.

Axes: M models, N rows, C outputs, B resamples, Q questions (labels, columns of values, or the one class of a row).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data import IntArray
from exlm_cli.tasks.base import FloatArray, Loss
from exlm_cli.tasks.metrics import metric_range

NUM_RESAMPLES = 2000
RESAMPLED_METRICS = ("roc_auc", "accuracy", "matthews_corrcoef", "rmse", "standardised_rmse", "spearmanr")
"""What the bootstrap knows: every metric that chooses an epoch of a table or of GLUE."""
_RARE = 30
"""With fewer rows of a class, each resample keeps the number of rows of every class."""
_CELLS = 4_000_000
"""Counts of rows that are held at once: 32 MB."""

Bounds = tuple[float, float]


def mean_interval(groups: Sequence[Sequence[float]], bounds: Bounds, overlap: float = 0.0) -> Bounds | None:
    """Return the 95 % interval of a mean over n groups of values, each averaged first: mean ± t · s · sqrt(1/n + o).

    The interval is cut to what the metric can be. That costs no coverage, since the mean that it is of lies there too;
    a percentile bootstrap of three or five values stays there by itself, but is far too narrow.

    Args:
        groups: Values of the seeds on each split, or one value of each seed or split.
        bounds: The range of the metric.
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
    low, high = (float(np.clip(means.mean() + side * half, *bounds)) for side in (-1, 1))
    return low, high


def gain_range(metric: str) -> Bounds:
    """Return the range of a difference between two scores."""
    low, high = metric_range(metric)
    return low - high, high - low


@dataclass(frozen=True)
class ScoredRows:
    """Predictions of several models for the same rows.

    Attributes:
        predictions: M arrays of (N, C) probabilities or values.
        targets: (N, C), NaN where missing; (N, 1) class index for `classes`.
        scale: (C,) standard deviations of the training targets of a regression.
    """

    loss: Loss
    predictions: Sequence[FloatArray]
    targets: FloatArray
    scale: FloatArray | None = None


def resample_scores(metric: str, rows: ScoredRows, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> FloatArray:
    """Return (M, B) scores of the models on resamples of the rows, drawn with replacement, the same for all models.

    A score over several labels or columns is the mean over those in which it is defined, as in `metrics.score_rows`;
    NaN where there is none. For `roc_auc`, where each row has one class and a class is rare, resamples keep the size of
    every class: without it many would have no row of that class, and no score.

    Args:
        metric: One of `RESAMPLED_METRICS`.
        num_resamples: B.
        seed: Decides the resamples.
    """
    statistics = [_statistic(metric, rows, predicted_NC) for predicted_NC in rows.predictions]
    strata = _strata(metric, rows)
    rng = np.random.default_rng(seed)
    parts = []
    block = max(1, _CELLS // max(1, len(rows.targets)))
    for start in range(0, num_resamples, block):
        size = min(block, num_resamples - start)
        counts_BN = np.zeros((size, len(rows.targets)))
        for stratum in strata:
            counts_BN[:, stratum] = _draw(len(stratum), size, rng)
        parts.append(np.stack([statistic(counts_BN) for statistic in statistics]))
    return np.concatenate(parts, axis=1)


def _draw(num_rows: int, num_resamples: int, rng: np.random.Generator) -> IntArray:
    """Return (B, N) how often each of N rows is drawn if N are drawn with replacement."""
    drawn_BN = rng.integers(num_rows, size=(num_resamples, num_rows))
    place_BN = drawn_BN + num_rows * np.arange(num_resamples)[:, None]
    return np.bincount(place_BN.ravel(), minlength=place_BN.size).reshape(place_BN.shape)


def percentile_interval(values_B: FloatArray) -> Bounds | None:
    """Return the 2.5th and 97.5th percentile of the resamples that are defined; None where none is."""
    known = values_B[np.isfinite(values_B)]
    if not len(known):
        return None
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return low, high


def _strata(metric: str, rows: ScoredRows) -> list[IntArray]:
    """Return the rows that are resampled together."""
    everything = [np.arange(len(rows.targets))]
    if metric != "roc_auc" or rows.targets.shape[1] > 1:
        return everything
    classes, index_N, counts = np.unique(rows.targets[:, 0], return_inverse=True, return_counts=True)
    if counts.min(initial=_RARE) >= _RARE:
        return everything
    return [np.flatnonzero(index_N == index) for index in range(len(classes))]


Statistic = Callable[[FloatArray], FloatArray]
"""(B, N) how often each row is drawn -> (B,) scores."""


def _statistic(metric: str, rows: ScoredRows, predicted_NC: FloatArray) -> Statistic:
    loss, targets_NC = rows.loss, rows.targets
    if loss == "classes":
        known_N1 = ~np.isnan(targets_NC)
        if metric == "roc_auc":
            return _mean_area(predicted_NC[:, 1:], targets_NC, known_N1)
        if metric == "matthews_corrcoef":
            return _matthews(predicted_NC.argmax(axis=1), targets_NC[:, 0], known_N1[:, 0])
        is_right_N1 = predicted_NC.argmax(axis=1)[:, None] == targets_NC
        return _mean_over_questions(is_right_N1.astype(np.float64), known_N1)
    known_NC = ~np.isnan(targets_NC)
    if metric == "roc_auc":
        return _mean_area(predicted_NC, targets_NC, known_NC)
    if metric == "accuracy":
        is_right_NC = (predicted_NC >= 0.5) == (targets_NC == 1)
        return _mean_over_questions(is_right_NC.astype(np.float64), known_NC)
    if metric == "spearmanr":
        return _rank_correlation(predicted_NC[:, 0], targets_NC[:, 0], known_NC[:, 0])
    assert metric in ("rmse", "standardised_rmse"), metric
    scale_C = np.ones(targets_NC.shape[1]) if metric == "rmse" or rows.scale is None else rows.scale
    squares_NC = np.where(known_NC, (predicted_NC - targets_NC) / scale_C, 0.0) ** 2
    return _mean_over_questions(squares_NC, known_NC, np.sqrt)


def _mean_over_questions(
    values_NQ: FloatArray, known_NQ: NDArray[np.bool_], then: Callable[[FloatArray], FloatArray] | None = None
) -> Statistic:
    """Return the mean over questions of the mean of each over its known rows."""

    def score(counts_BN: FloatArray) -> FloatArray:
        total_BQ, num_BQ = counts_BN @ np.where(known_NQ, values_NQ, 0.0), counts_BN @ known_NQ.astype(np.float64)
        mean_BQ = np.divide(total_BQ, num_BQ, out=np.full_like(total_BQ, np.nan), where=num_BQ > 0)
        return _mean_of_defined(mean_BQ if then is None else then(mean_BQ))

    return score


def _mean_area(predicted_NQ: FloatArray, targets_NQ: FloatArray, known_NQ: NDArray[np.bool_]) -> Statistic:
    """Return the mean area under the ROC curves of the questions whose rows have both answers."""
    columns = list(zip(predicted_NQ.T, targets_NQ.T, known_NQ.T, strict=True))

    def score(counts_BN: FloatArray) -> FloatArray:
        areas = [_area(p[known], t[known] == 1, counts_BN[:, known]) for p, t, known in columns]
        return _mean_of_defined(np.stack(areas, axis=1))

    return score


def _area(score_N: FloatArray, is_positive_N: NDArray[np.bool_], counts_BN: FloatArray) -> FloatArray:
    """Return (B,) the share of pairs of a positive and a negative row in which the positive scores higher; ties half.

    Rows of one score are a group; the pairs of a group are its positives with the negatives of all groups below.
    """
    if not len(score_N):
        return np.full(len(counts_BN), np.nan)
    order = np.argsort(score_N, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(score_N[order]) > 0])
    counts_BN, is_positive_N = counts_BN[:, order], is_positive_N[order]
    positive_BG = np.add.reduceat(counts_BN * is_positive_N, starts, axis=1)
    negative_BG = np.add.reduceat(counts_BN * ~is_positive_N, starts, axis=1)
    below_BG = negative_BG.cumsum(axis=1) - negative_BG / 2
    pairs_B = positive_BG.sum(axis=1) * negative_BG.sum(axis=1)
    wins_B = (positive_BG * below_BG).sum(axis=1)
    return np.asarray(np.divide(wins_B, pairs_B, out=np.full(len(pairs_B), np.nan), where=pairs_B > 0))


def _matthews(guess_N: NDArray[Any], target_N: FloatArray, known_N: NDArray[np.bool_]) -> Statistic:
    """Return Matthews' correlation over classes; 0 where all guesses or all truths are of one class."""
    classes = np.unique([guess_N[known_N], target_N[known_N]])
    guess_NK, true_NK = ((of[:, None] == classes) & known_N[:, None] for of in (guess_N, target_N))
    is_right_N = (guess_NK & true_NK).any(axis=1)

    def score(counts_BN: FloatArray) -> FloatArray:
        num_B, right_B, guess_BK, true_BK = (
            counts_BN @ of.astype(np.float64) for of in (known_N, is_right_N, guess_NK, true_NK)
        )
        shared_B = right_B * num_B - (guess_BK * true_BK).sum(axis=1)
        guesses_B, truths_B = (num_B**2 - (of_BK**2).sum(axis=1) for of_BK in (guess_BK, true_BK))
        spread_B = np.sqrt(guesses_B * truths_B)
        return np.asarray(np.divide(shared_B, spread_B, out=np.zeros_like(shared_B), where=spread_B > 0))

    return score


def _rank_correlation(predicted_N: FloatArray, target_N: FloatArray, known_N: NDArray[np.bool_]) -> Statistic:
    """Return Spearman's correlation; NaN where all values are equal."""

    def score(counts_BN: FloatArray) -> FloatArray:
        counts_BN = counts_BN[:, known_N]
        middle_B1 = (counts_BN.sum(axis=1, keepdims=True) + 1) / 2
        x_BN, y_BN = (_ranks(of[known_N], counts_BN) - middle_B1 for of in (predicted_N, target_N))
        shared_B, x_B, y_B = ((counts_BN * of).sum(axis=1) for of in (x_BN * y_BN, x_BN**2, y_BN**2))
        spread_B = np.sqrt(x_B * y_B)
        return np.asarray(np.divide(shared_B, spread_B, out=np.full(len(spread_B), np.nan), where=spread_B > 0))

    return score


def _ranks(values_N: FloatArray, counts_BN: FloatArray) -> FloatArray:
    """Return (B, N) the rank of each value in each resample; equal values share their mean rank."""
    values, group_N = np.unique(values_N, return_inverse=True)
    order = np.argsort(group_N, kind="stable")
    starts = np.searchsorted(group_N[order], np.arange(len(values)))
    num_BG = np.add.reduceat(counts_BN[:, order], starts, axis=1)
    return np.asarray((num_BG.cumsum(axis=1) - (num_BG - 1) / 2)[:, group_N])


def _mean_of_defined(values_BQ: FloatArray) -> FloatArray:
    num_B = np.count_nonzero(~np.isnan(values_BQ), axis=1)
    total_B = np.nansum(values_BQ, axis=1)
    return np.asarray(np.divide(total_B, num_B, out=np.full(len(num_B), np.nan), where=num_B > 0))
