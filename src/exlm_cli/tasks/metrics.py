"""Metrics of predictions, named as in scikit-learn and SciPy; NaN where one is not defined.

Axes: K seeds, N rows, C labels (`binary`), classes (`classes`) or target columns (`regression`). A missing target is
NaN. scikit-learn takes seconds to import, so each function does it when it is called.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exlm_cli.tasks.base import FloatArray, Loss

_THRESHOLD = 0.5

Score = Callable[[FloatArray, FloatArray], float]


def roc_auc(targets: ArrayLike, scores: ArrayLike) -> float:
    """Area under the ROC curve of 0/1 targets; NaN where there is one class only."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(targets, scores)) if len(np.unique(targets)) == 2 else math.nan


def average_precision(targets: ArrayLike, scores: ArrayLike) -> float:
    """Area under the precision-recall curve of 0/1 targets, as steps; NaN where there is one class only."""
    from sklearn.metrics import average_precision_score

    return float(average_precision_score(targets, scores)) if len(np.unique(targets)) == 2 else math.nan


def accuracy(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Share of rows whose class is right; NaN without rows."""
    right = np.asarray(targets) == np.asarray(predicted)
    return float(right.mean()) if right.size else math.nan


def f1(targets: ArrayLike, predicted: ArrayLike) -> float:
    """F1 of class 1 among 0/1 targets; 0 where nothing is predicted, NaN without a positive target."""
    from sklearn.metrics import f1_score

    return float(f1_score(targets, predicted, zero_division=0.0)) if np.any(np.asarray(targets) == 1) else math.nan


def macro_f1(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Mean over the classes that occur among the targets of each one's F1; NaN without rows."""
    from sklearn.metrics import f1_score

    classes = np.unique(targets)
    if not len(classes):
        return math.nan
    return float(f1_score(targets, predicted, labels=classes, average="macro", zero_division=0.0))


def matthews_corrcoef(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Matthews correlation of two or more classes; 0 for a constant prediction, NaN where the targets are one class."""
    from sklearn.metrics import matthews_corrcoef as matthews

    return float(matthews(targets, predicted)) if len(np.unique(targets)) >= 2 else math.nan


def pearsonr(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Linear correlation; NaN where either side is constant or has fewer than two rows."""
    from scipy import stats

    return _correlation(stats.pearsonr, targets, predicted)


def spearmanr(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Correlation of ranks, ties at their mean rank; NaN where either side is constant or has fewer than two rows."""
    from scipy import stats

    return _correlation(stats.spearmanr, targets, predicted)


def rmse(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Root of the mean squared error, in the targets' unit."""
    error = np.asarray(predicted, dtype=np.float64) - np.asarray(targets, dtype=np.float64)
    return float(np.sqrt(np.mean(error**2))) if error.size else math.nan


def mae(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Mean absolute error, in the targets' unit."""
    error = np.asarray(predicted, dtype=np.float64) - np.asarray(targets, dtype=np.float64)
    return float(np.mean(np.abs(error))) if error.size else math.nan


def r2(targets: ArrayLike, predicted: ArrayLike) -> float:
    """Share of variance explained; NaN where the targets are constant or fewer than two."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets, predicted)) if len(np.unique(targets)) >= 2 else math.nan


def to_probabilities(loss: Loss, outputs_NC: FloatArray) -> FloatArray:
    """Return probabilities of logits: one for each label (`binary`), or over the classes; values stay values."""
    from scipy import special

    if loss == "binary":
        return np.asarray(special.expit(outputs_NC))
    return np.asarray(special.softmax(outputs_NC, axis=1)) if loss == "classes" else outputs_NC


def probabilities_by_seed(loss: Loss, outputs: Sequence[Sequence[FloatArray]], num_outputs: int) -> FloatArray:
    """Return (K, N, C) probabilities or values, float64, from the outputs of each seed."""
    by_seed = np.zeros((len(outputs), len(outputs[0]), num_outputs))
    for index, of_seed in enumerate(outputs):
        if of_seed:
            by_seed[index] = to_probabilities(loss, np.stack(list(of_seed)))
    return by_seed


def score_rows(loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray) -> dict[str, float]:
    """Return the metrics of probabilities or values; means over the labels or columns in which each is defined.

    Args:
        loss: Loss of the task.
        predicted_NC: Result of `to_probabilities`.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
    """
    match loss:
        case "binary":
            return score_binary(predicted_NC, targets_NC)
        case "classes":
            return score_classes(predicted_NC, targets_NC[:, 0])
        case _:
            return score_regression(predicted_NC, targets_NC)


def score_binary(probabilities_NC: FloatArray, targets_NC: FloatArray) -> dict[str, float]:
    """Score independent 0/1 labels, each over the rows where it is known, and take the mean over labels.

    A label counts where both classes occur among its targets; for `accuracy`, where any is known. Other labels are left
    out of the mean, never taken as 0; `describe_unscorable` names them. The threshold of classes is 0.5.
    """

    def classes(score: Score) -> Score:
        return lambda targets, probabilities: score(targets, (probabilities >= _THRESHOLD).astype(np.float64))

    def with_both(score: Score) -> Score:
        return lambda targets, scores: score(targets, scores) if len(np.unique(targets)) == 2 else math.nan

    scores: dict[str, Score] = {
        "roc_auc": roc_auc,
        "average_precision": average_precision,
        "accuracy": classes(accuracy),
        "f1": with_both(classes(f1)),
        "matthews_corrcoef": with_both(classes(matthews_corrcoef)),
    }
    return {name: _mean_over_columns(score, probabilities_NC, targets_NC) for name, score in scores.items()}


def score_classes(probabilities_NC: FloatArray, targets_N: FloatArray) -> dict[str, float]:
    """Score one class of C for each row, the most likely one being predicted.

    With two classes, class 1 is the positive one of `roc_auc`, `average_precision` and `f1`; with more, `f1` is the
    mean over classes and the two areas are left out.
    """
    is_known = ~np.isnan(targets_N)
    targets, probabilities = targets_N[is_known].astype(np.int64), probabilities_NC[is_known]
    predicted = probabilities.argmax(axis=1) if len(probabilities) else targets
    general = {
        "accuracy": accuracy(targets, predicted),
        "matthews_corrcoef": matthews_corrcoef(targets, predicted),
    }
    if probabilities_NC.shape[1] > 2:
        return {**general, "f1": macro_f1(targets, predicted)}
    positive = probabilities[:, 1]
    areas = {"roc_auc": roc_auc(targets, positive), "average_precision": average_precision(targets, positive)}
    return {**areas, **general, "f1": f1(targets, predicted)}


def score_regression(values_NC: FloatArray, targets_NC: FloatArray) -> dict[str, float]:
    """Score values in the targets' own unit, each column over the rows where it is known; the mean over columns."""
    scores: dict[str, Score] = {"rmse": rmse, "mae": mae, "r2": r2, "pearsonr": pearsonr, "spearmanr": spearmanr}
    return {name: _mean_over_columns(score, values_NC, targets_NC) for name, score in scores.items()}


def describe_unscorable(targets_NC: FloatArray, names: Sequence[str]) -> dict[str, str]:
    """Return, by name, the 0/1 labels that have no ROC-AUC over these rows, and why: all missing, or one class only."""
    reasons = {}
    for name, targets in zip(names, targets_NC.T, strict=True):
        present = np.unique(targets[~np.isnan(targets)])
        if len(present) == 0:
            reasons[name] = "is missing in every row"
        elif len(present) == 1:
            reasons[name] = f"is {present[0]:g} in every row that has it"
    return reasons


def _mean_over_columns(score: Score, predictions_NC: FloatArray, targets_NC: FloatArray) -> float:
    """Mean of a score over the columns in which it is defined; NaN where there is none."""
    values = []
    for predictions, targets in zip(predictions_NC.T, targets_NC.T, strict=True):
        is_known = ~np.isnan(targets)
        value = score(targets[is_known], predictions[is_known]) if is_known.any() else math.nan
        if not math.isnan(value):
            values.append(value)
    return math.fsum(values) / len(values) if values else math.nan


def _correlation(statistic: Callable[..., Any], targets: ArrayLike, predicted: ArrayLike) -> float:
    first: NDArray[np.float64] = np.asarray(targets, dtype=np.float64)
    second: NDArray[np.float64] = np.asarray(predicted, dtype=np.float64)
    if len(np.unique(first)) < 2 or len(np.unique(second)) < 2:
        return math.nan
    return float(statistic(first, second).statistic)
