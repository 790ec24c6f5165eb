"""Metrics of predictions, named as in scikit-learn and SciPy; NaN where one is not defined.

Axes: K seeds, N rows, C labels (`binary`), classes (`classes`) or target columns (`regression`). A missing target is
NaN. scikit-learn takes seconds to import, so each function does it when it is called.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from exlm_cli.tasks.base import FloatArray, Loss

_THRESHOLD = 0.5
_BINARY_METRICS = ("roc_auc", "average_precision", "accuracy", "f1", "matthews_corrcoef")
_REGRESSION_METRICS = ("rmse", "mae", "r2", "pearsonr", "spearmanr")


def metric(name: str, targets: ArrayLike, predicted: ArrayLike) -> float:
    """Return one metric of N rows without missing targets; NaN where it is not defined.

    Args:
        name: `roc_auc`, `average_precision` of 0/1 targets: defined with both classes. `accuracy`: of one row or more.
            `f1` of class 1: defined with a positive target, 0 where nothing is predicted. `macro_f1`: mean over the
            classes that occur among the targets. `matthews_corrcoef`: defined with two classes, 0 for a constant
            prediction. `rmse`, `mae`: in the targets' unit. `r2`: defined for two different targets. `pearsonr`,
            `spearmanr`, ties at their mean rank: defined where neither side is constant.
        targets: (N,) classes or values.
        predicted: (N,) scores for the areas, classes or values for the others.
    """
    from scipy import stats
    from sklearn import metrics

    targets, predicted = np.asarray(targets), np.asarray(predicted)
    classes = np.unique(targets)
    varies = len(classes) >= 2
    match name:
        case "roc_auc" if varies:
            return float(metrics.roc_auc_score(targets, predicted))
        case "average_precision" if varies:
            return float(metrics.average_precision_score(targets, predicted))
        case "accuracy" if targets.size:
            return float((targets == predicted).mean())
        case "f1" if 1 in classes:
            return float(metrics.f1_score(targets, predicted, zero_division=0.0))
        case "macro_f1" if targets.size:
            return float(metrics.f1_score(targets, predicted, labels=classes, average="macro", zero_division=0.0))
        case "matthews_corrcoef" if varies:
            return float(metrics.matthews_corrcoef(targets, predicted))
        case "rmse" if targets.size:
            return float(np.sqrt(np.mean((predicted - targets) ** 2)))
        case "mae" if targets.size:
            return float(np.mean(np.abs(predicted - targets)))
        case "r2" if varies:
            return float(metrics.r2_score(targets, predicted))
        case "pearsonr" | "spearmanr" if varies and len(np.unique(predicted)) >= 2:
            return float(getattr(stats, name)(targets, predicted).statistic)
    return math.nan


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

    `binary`: each label is scored over the rows where it is known. `accuracy` counts a label with any such row, the
    other metrics one with both classes; `describe_unscorable` names the rest, never taken as 0. A probability of 0.5 is
    positive. `classes`: the most likely class is predicted. Of two, class 1 is the positive one; of more, `f1` is the
    mean over classes and there are no areas. `regression`: each column over the rows where it is known, in its unit.

    Args:
        loss: Loss of the task.
        predicted_NC: Result of `to_probabilities`.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
    """
    if loss == "classes":
        return _score_classes(predicted_NC, targets_NC[:, 0])
    names = _BINARY_METRICS if loss == "binary" else _REGRESSION_METRICS
    scores: dict[str, list[float]] = {name: [] for name in names}
    for predicted, targets in zip(predicted_NC.T, targets_NC.T, strict=True):
        is_known = ~np.isnan(targets)
        known, given = targets[is_known], predicted[is_known]
        for name, values in scores.items():
            if loss == "regression" or name in ("roc_auc", "average_precision"):
                values.append(metric(name, known, given))
            elif name == "accuracy" or len(np.unique(known)) == 2:
                values.append(metric(name, known, (given >= _THRESHOLD).astype(np.float64)))
    return {name: _mean_of_defined(values) for name, values in scores.items()}


def _score_classes(probabilities_NC: FloatArray, targets_N: FloatArray) -> dict[str, float]:
    is_known = ~np.isnan(targets_N)
    targets, probabilities = targets_N[is_known].astype(np.int64), probabilities_NC[is_known]
    predicted = probabilities.argmax(axis=1) if len(probabilities) else targets
    has_two = probabilities_NC.shape[1] == 2
    scores = {name: metric(name, targets, probabilities[:, 1]) for name in _BINARY_METRICS[:2] if has_two}
    scores |= {name: metric(name, targets, predicted) for name in ("accuracy", "matthews_corrcoef")}
    return scores | {"f1": metric("f1" if has_two else "macro_f1", targets, predicted)}


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


def _mean_of_defined(values: Iterable[float]) -> float:
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan
