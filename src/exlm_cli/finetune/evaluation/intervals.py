"""95 % intervals of scores: over seeds or splits by Student's t, over test rows by SciPy's paired bootstrap. No torch.

Axes: M models, N rows, C outputs, B resamples.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data import IntArray
from exlm_cli.tasks.base import FloatArray, Loss
from exlm_cli.tasks.metrics import metric_range

NUM_RESAMPLES = 2000
"""Tables of more than ten labels have fewer, as each resample is scored once for every label."""
RESAMPLED_METRICS = ("roc_auc", "accuracy", "matthews_corrcoef", "rmse", "standardised_rmse", "spearmanr")
"""What the bootstrap knows: every metric that chooses an epoch of a table or of GLUE."""
MIN_VALUES = 3
"""With fewer seeds or splits there is no interval over them."""
_RARE = 30
"""With fewer rows of a class, each resample keeps the number of rows of every class."""
_CELLS = 4_000_000
"""Rows of resamples that are held at once: 32 MB of each array."""

Bounds = tuple[float, float]


def mean_interval(values: Sequence[float], bounds: Bounds, overlap: float = 0.0) -> Bounds | None:
    """Return the 95 % interval of a mean over n values of seeds or splits: mean ± t · s · sqrt(1/n + o).

    The interval is cut to what the metric can be. That costs no coverage, since the mean that it is of lies there too;
    a percentile bootstrap of three or five values stays there by itself, but is far too narrow.

    Args:
        bounds: The range of the metric.
        overlap: o. Splits of the same rows share most of them, so their scores vary less than those of new rows would:
            with o = test rows / training rows the interval is that of Nadeau and Bengio (2003).

    Returns:
        None for fewer than three values: the interval of two is 12.7 standard errors to either side.
    """
    from scipy import stats

    known, num = np.array(values), len(values)
    if num < MIN_VALUES:
        return None
    half = stats.t.ppf(0.975, num - 1) * known.std(ddof=1) * math.sqrt(1 / num + overlap)
    low, high = (float(np.clip(known.mean() + side * half, *bounds)) for side in (-1, 1))
    return low, high


def gain_range(metric: str) -> Bounds:
    """Return the range of a difference between two scores."""
    low, high = metric_range(metric)
    return low - high, high - low


def percentile_interval(values_B: FloatArray) -> Bounds | None:
    """Return the 2.5th and 97.5th percentile of the resamples that are defined; None where none is."""
    known = values_B[np.isfinite(values_B)]
    if not len(known):
        return None
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return low, high


def resample_scores(
    metric: str,
    loss: Loss,
    predictions: Sequence[FloatArray],
    targets_NC: FloatArray,
    scale_C: FloatArray | None = None,
    *,
    seed: int = 0,
) -> FloatArray:
    """Return (M, B) scores of the models on resamples of the rows, drawn with replacement, the same for all models.

    A score over several labels or columns is the mean over those in which it is defined, as in `metrics.score_rows`;
    NaN where there is none. For `roc_auc`, where each row has one class and a class is rare, resamples keep the size of
    every class: without it many would have no row of that class, and no score.

    Args:
        metric: One of `RESAMPLED_METRICS`.
        predictions: M arrays of (N, C) probabilities or values.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
        scale_C: Standard deviations of the training targets of a regression.
        seed: Of the draws; rows of two splits are drawn independently.
    """
    from scipy.stats import ConstantInputWarning, DegenerateDataWarning, NearConstantInputWarning, bootstrap

    rows = np.flatnonzero(~np.isnan(targets_NC).all(axis=1))
    strata = _strata(metric, targets_NC, rows)
    fixed = [stratum for stratum in strata if len(stratum) < 2]  # a single row is in every resample once
    drawn = [stratum for stratum in strata if len(stratum) > 1]
    if not drawn:
        return np.full((len(predictions), 1), np.nan)
    scorers = [partial(_score, metric, loss, predicted_NC, targets_NC, scale_C) for predicted_NC in predictions]

    def score(*resampled: Any, axis: int = -1) -> FloatArray:
        del axis  # always the last
        one_each = [np.broadcast_to(rows, (*resampled[0].shape[:-1], len(rows))) for rows in fixed]
        index_BN = np.concatenate([*resampled, *one_each], axis=-1).astype(np.int64)
        return np.stack([scorer(index_BN) for scorer in scorers])

    num = max(200, NUM_RESAMPLES * 10 // max(10, targets_NC.shape[1]))
    batch = max(1, _CELLS // len(rows))
    with warnings.catch_warnings():  # where some resamples have no score
        for kind in (DegenerateDataWarning, ConstantInputWarning, NearConstantInputWarning):
            warnings.simplefilter("ignore", kind)
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        found = bootstrap(drawn, score, n_resamples=num, batch=batch, method="percentile", vectorized=True, rng=seed)
    return np.asarray(found.bootstrap_distribution)


def _strata(metric: str, targets_NC: FloatArray, rows: IntArray) -> list[IntArray]:
    """Return the rows that are resampled together."""
    if metric != "roc_auc" or targets_NC.shape[1] > 1:
        return [rows]
    classes, index_n, counts = np.unique(targets_NC[rows, 0], return_inverse=True, return_counts=True)
    if counts.min(initial=_RARE) >= _RARE:
        return [rows]
    return [rows[index_n == index] for index in range(len(classes))]


def _score(
    metric: str,
    loss: Loss,
    predicted_NC: FloatArray,
    targets_NC: FloatArray,
    scale_C: FloatArray | None,
    index_BN: IntArray,
) -> FloatArray:
    """Return (B,) scores of a model on the rows of each resample."""
    if metric == "roc_auc":
        predicted_NC = predicted_NC[:, 1:] if loss == "classes" else predicted_NC
        columns = zip(predicted_NC.T, targets_NC.T, strict=True)
        areas = [_area(predicted_N[index_BN], target_N[index_BN]) for predicted_N, target_N in columns]
        return np.asarray(np.nanmean(np.stack(areas, axis=-1), axis=-1))
    if metric == "spearmanr":
        return _rank_correlation(predicted_NC[index_BN, 0], targets_NC[index_BN, 0])
    if metric == "matthews_corrcoef":
        return _matthews(predicted_NC.argmax(axis=1)[index_BN], targets_NC[index_BN, 0], predicted_NC.shape[1])
    if metric == "accuracy":
        guess_NC = predicted_NC.argmax(axis=1)[:, None] if loss == "classes" else predicted_NC >= 0.5
        of_row_NC = np.where(np.isnan(targets_NC), np.nan, guess_NC == targets_NC)
        return np.asarray(np.nanmean(np.nanmean(of_row_NC[index_BN], axis=-2), axis=-1))
    assert metric in ("rmse", "standardised_rmse"), metric
    scale_C = np.ones(targets_NC.shape[1]) if metric == "rmse" or scale_C is None else scale_C
    squares_NC = ((predicted_NC - targets_NC) / scale_C) ** 2
    return np.asarray(np.nanmean(np.sqrt(np.nanmean(squares_NC[index_BN], axis=-2)), axis=-1))


def _area(score_BN: FloatArray, target_BN: FloatArray) -> FloatArray:
    """Return the area under the ROC curve, (B,), from Mann and Whitney's sum of ranks; unknown rows rank last."""
    from scipy.stats import rankdata

    is_positive_BN = target_BN == 1
    rank_BN = rankdata(np.where(np.isnan(target_BN), np.inf, score_BN), axis=-1)
    num_B, other_B = is_positive_BN.sum(axis=-1), (target_BN == 0).sum(axis=-1)
    wins_B = (rank_BN * is_positive_BN).sum(axis=-1) - num_B * (num_B + 1) / 2
    return np.asarray(np.divide(wins_B, num_B * other_B, out=np.full(num_B.shape, np.nan), where=num_B * other_B > 0))


def _matthews(guess_BN: NDArray[Any], target_BN: FloatArray, num_classes: int) -> FloatArray:
    """Return Matthews' correlation over classes, (B,); 0 where all guesses or all truths are of one class."""
    num = float(target_BN.shape[-1])
    shared_B = (guess_BN == target_BN).sum(axis=-1) * num
    guesses_B, truths_B = np.full(shared_B.shape, num**2), np.full(shared_B.shape, num**2)
    for index in range(num_classes):
        guess_B, truth_B = ((of == index).sum(axis=-1).astype(np.float64) for of in (guess_BN, target_BN))
        shared_B, guesses_B, truths_B = shared_B - guess_B * truth_B, guesses_B - guess_B**2, truths_B - truth_B**2
    spread_B = np.sqrt(guesses_B * truths_B)
    return np.asarray(np.divide(shared_B, spread_B, out=np.zeros_like(shared_B), where=spread_B > 0))


def _rank_correlation(predicted_BN: FloatArray, target_BN: FloatArray) -> FloatArray:
    """Return Spearman's correlation, (B,); NaN where all values are equal."""
    from scipy.stats import pearsonr, rankdata

    ranks = (rankdata(of, axis=-1) for of in (predicted_BN, target_BN))
    return np.asarray(pearsonr(*ranks, axis=-1).statistic)
