"""Metrics of predictions, named as in scikit-learn and SciPy; NaN where one is not defined.

Axes: K seeds, N rows, C labels (`binary`), classes (`classes`) or target columns (`regression`). A missing target is
NaN. scikit-learn takes seconds to import, so functions import it when they are called.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from exlm_cli.format import format_number_of, name_some
from exlm_cli.tasks.base import FloatArray, Loss, SeedOutputs

FEW_ROWS = 10
"""With fewer rows of a class, one row moves ROC-AUC and average precision a lot; with fewer values, RMSE."""

_THRESHOLD = 0.5
_CONSTANT_SHARE = 0.01
"""Values that differ by less than this share of the truth's standard deviation count as the same."""
_BINARY_METRICS = ("roc_auc", "average_precision", "accuracy", "f1", "matthews_corrcoef")
_RANKING_METRICS = ("roc_auc", "average_precision")
_REGRESSION_METRICS = ("rmse", "mae", "r2", "pearsonr", "spearmanr")
_SHARES = ("roc_auc", "average_precision", "accuracy", "f1", "macro_f1", "exact_match")
_CORRELATIONS = ("matthews_corrcoef", "pearsonr", "spearmanr")
_ERRORS = ("rmse", "standardised_rmse", "mae", "loss")


def metric_range(name: str) -> tuple[float, float]:
    """Return the least and the greatest value that a metric can have; that of MNLI's mismatched rows has the same."""
    name = name.removeprefix("mismatched_")
    if name in _SHARES:
        return 0.0, 1.0
    if name in _CORRELATIONS:
        return -1.0, 1.0
    if name in _ERRORS:
        return 0.0, math.inf
    return -math.inf, 1.0 if name == "r2" else math.inf


def metric(name: str, targets: ArrayLike, predicted: ArrayLike) -> float:
    """Return one metric of N rows without missing targets; NaN where it is not defined.

    Args:
        name: `roc_auc`, `average_precision` of 0/1 targets: defined with both classes. `accuracy`: defined with a row.
            `f1` of class 1: defined with a positive target, 0 if no row is predicted positive. `macro_f1`: mean over
            the classes that occur among the targets. `matthews_corrcoef`: defined with two classes, 0 for a constant
            prediction. `rmse`, `mae`: in the targets' unit. `r2`: defined for two different targets. `pearsonr`,
            `spearmanr`, ties at their mean rank: defined where neither side is constant.
        targets: (N,) classes or values.
        predicted: (N,) scores for `roc_auc` and `average_precision`, classes or values for the others.
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
            with warnings.catch_warnings():  # of values that hardly vary; their correlation is still defined
                warnings.simplefilter("ignore", stats.NearConstantInputWarning)
                return float(getattr(stats, name)(targets, predicted).statistic)
    return math.nan


def to_probabilities(loss: Loss, outputs_NC: FloatArray) -> FloatArray:
    """Return probabilities of logits: one for each label (`binary`), or over the classes; values stay values."""
    from scipy import special

    if loss == "binary":
        return np.asarray(special.expit(outputs_NC))
    return np.asarray(special.softmax(outputs_NC, axis=1)) if loss == "classes" else outputs_NC


def to_predictions(loss: Loss, outputs: Sequence[FloatArray], num_outputs: int) -> FloatArray | Sequence[FloatArray]:
    """Return what a model's outputs of N examples predict: (N, C) probabilities or values, float64; logits of spans."""
    if loss == "span":
        return outputs
    stacked_NC = np.stack(list(outputs)) if outputs else np.zeros((0, num_outputs))
    return to_probabilities(loss, stacked_NC).astype(np.float64)


def join_seeds(by_seed: Sequence[Any]) -> SeedOutputs:
    """Return what each of K seeds predicts, as `to_predictions` gives it, together."""
    return np.stack(by_seed) if isinstance(by_seed[0], np.ndarray) else by_seed


def score_rows(
    loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray, scale_C: FloatArray | None = None
) -> dict[str, float]:
    """Return the metrics of probabilities or values; means over the labels or columns in which each is defined.

    `binary`: each label is scored over the rows where it is known. `accuracy` needs one such row, the other metrics
    both classes; other labels are left out of the mean, not counted as 0. A probability of 0.5 is positive. `classes`:
    the most likely class is predicted. With two, class 1 is the positive one; with more, `f1` is the mean over classes,
    and there is no `roc_auc` or `average_precision`. `regression`: each column is scored over the rows where it is
    known. Several columns differ in units: they have no `rmse` or `mae`, but `standardised_rmse` if `scale_C` is given.

    Args:
        predicted_NC: Result of `to_probabilities`.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
        scale_C: Standard deviation of each column's training targets (`target_scale`).
    """
    if loss == "classes":
        return _score_classes(predicted_NC, targets_NC[:, 0])
    columns = score_columns(loss, predicted_NC, targets_NC)
    scores = {name: mean_of_defined(column[name] for column in columns) for name in columns[0]}
    if loss == "regression" and len(columns) > 1:
        del scores["rmse"], scores["mae"]
        if scale_C is not None:
            errors = (column["rmse"] / scale for column, scale in zip(columns, scale_C, strict=True))
            scores["standardised_rmse"] = mean_of_defined(errors)
    return scores


def score_columns(loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray) -> list[dict[str, float]]:
    """Return the metrics of each label (`binary`) or value (`regression`) over the rows where it is known."""
    names = _BINARY_METRICS if loss == "binary" else _REGRESSION_METRICS
    columns = []
    for predicted, targets in zip(predicted_NC.T, targets_NC.T, strict=True):
        is_known = ~np.isnan(targets)
        known, given = targets[is_known], predicted[is_known]
        guessed = given if loss == "regression" else (given >= _THRESHOLD).astype(np.float64)
        if loss == "binary" and len(np.unique(known)) < 2:
            columns.append(dict.fromkeys(names, math.nan) | {"accuracy": metric("accuracy", known, guessed)})
        else:
            columns.append(
                {name: metric(name, known, given if name in _RANKING_METRICS else guessed) for name in names}
            )
    return columns


def score_labels(
    loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray, names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the metrics of each label or value by its name; nothing for classes or a single one."""
    if loss == "classes" or len(names) == 1:
        return {}
    return dict(zip(names, score_columns(loss, predicted_NC, targets_NC), strict=True))


def errors_beyond(predicted_NC: FloatArray, bounds_NC2: FloatArray) -> FloatArray:
    """Return (N, C) how far each prediction is beyond the bounds of its value, 0 between them; NaN without a bound."""
    low_NC, high_NC = np.moveaxis(bounds_NC2, 2, 0)
    is_known_NC = np.isfinite(bounds_NC2).any(axis=2)
    return np.where(is_known_NC, predicted_NC - predicted_NC.clip(low_NC, high_NC), np.nan)


def score_bounds(predicted_NC: FloatArray, bounds_NC2: FloatArray) -> list[dict[str, float]]:
    """Return `rmse` and `mae` of each column over all rows with a value or a bound, as `errors_beyond` counts them."""
    columns = [column[~np.isnan(column)] for column in errors_beyond(predicted_NC, bounds_NC2).T]
    return [{name: metric(name, np.zeros(len(column)), column) for name in ("rmse", "mae")} for column in columns]


def target_scale(targets_NC: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each column of training targets, (C,) each.

    A column without targets has 0 and 1, one of equal targets a deviation of 1. Squares neither overflow nor vanish.
    """
    is_present = ~np.isnan(targets_NC)
    num_C = np.maximum(is_present.sum(0), 1)
    # compared, not subtracted: the mean of three times 0.1 is not 0.1, and 1e-17 would become the divisor
    differs_C = np.where(is_present, targets_NC, -np.inf).max(0) > np.where(is_present, targets_NC, np.inf).min(0)
    mean_C = np.where(is_present, targets_NC, 0.0).sum(0) / num_C
    off_NC = np.where(is_present, targets_NC - mean_C, 0.0)
    largest_C = np.where(differs_C, np.abs(off_NC).max(0), 1.0)
    std_C = largest_C * np.sqrt(((off_NC / largest_C) ** 2).sum(0) / num_C)
    return mean_C, np.where(differs_C & (std_C > 0), std_C, 1.0)


def row_weights(
    loss: Loss, class_weights: FloatArray | None, target_N: FloatArray, index: int, own_N: FloatArray | None = None
) -> FloatArray | None:
    """Return (N,) what each row weighs in a loss with class weights; None: all the same.

    Args:
        class_weights: (C,) of each class, or of each label's positives.
        target_N: Known targets of a label, or classes.
        index: The label.
        own_N: Weights of the rows themselves, which these are multiplied by; None: all the same.
    """
    if class_weights is None:
        return own_N
    of_class_N = (
        class_weights[target_N.astype(int)] if loss == "classes" else np.where(target_N == 1, class_weights[index], 1.0)
    )
    return of_class_N if own_N is None else of_class_N * own_N


def describe_constant(loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray, names: Sequence[str]) -> list[str]:
    """Return in words which outputs are the same in every row although the truth differs between rows."""
    if loss == "classes":
        predicted = np.unique(predicted_NC.argmax(axis=1))
        known = targets_NC[~np.isnan(targets_NC[:, 0]), 0]
        if len(predicted) == 1 and len(np.unique(known)) > 1:
            return [f"class `{names[int(predicted[0])]}` is predicted for every row"]
        return []
    same = []
    for name, predicted, targets in zip(names, predicted_NC.T, targets_NC.T, strict=True):
        is_known = ~np.isnan(targets)
        known, given = targets[is_known], predicted[is_known]
        if len(np.unique(known)) < 2:
            continue
        if loss == "regression" and np.ptp(given) < _CONSTANT_SHARE * known.std():
            same.append(f"`{name}` is about {given.mean():.4g}")
        elif loss == "binary" and len(np.unique(given >= _THRESHOLD)) == 1:
            same.append(f"`{name}` is {int(given[0] >= _THRESHOLD)}")
    if not same:
        return []
    return [f"the same answer is predicted for every row: {name_some(same)}"]


def _score_classes(probabilities_NC: FloatArray, targets_N: FloatArray) -> dict[str, float]:
    is_known = ~np.isnan(targets_N)
    targets, probabilities = targets_N[is_known].astype(np.int64), probabilities_NC[is_known]
    predicted = probabilities.argmax(axis=1) if len(probabilities) else targets
    has_two = probabilities_NC.shape[1] == 2
    scores = {name: metric(name, targets, probabilities[:, 1]) for name in _RANKING_METRICS if has_two}
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


def describe_rare_classes(loss: Loss, targets_NC: FloatArray, names: Sequence[str]) -> list[str]:
    """Return in words which labels or classes have some rows, but fewer than `FEW_ROWS`; of a label its rarer class."""
    if loss == "classes":
        counts = [int(np.count_nonzero(targets_NC[:, 0] == index)) for index in range(len(names))]
        found = [(count, f"class `{name}`", "row") for count, name in zip(counts, names, strict=True)]
    else:
        positives, negatives = (np.count_nonzero(targets_NC == label, axis=0).tolist() for label in (1, 0))
        found = [
            min((positive, f"`{name}`", "positive row"), (negative, f"`{name}`", "negative row"))
            for name, positive, negative in zip(names, positives, negatives, strict=True)
        ]
    return [f"{name} has {format_number_of(count, row)}" for count, name, row in found if 0 < count < FEW_ROWS]


def count_telling_rows(loss: Loss, targets_NC: FloatArray) -> int:
    """Return how many rows can tell one model from another: known values, or rows of any class but the commonest.

    Of several columns, it is that with the most.
    """
    found = [0]
    for target_N in targets_NC.T:
        known = target_N[~np.isnan(target_N)]
        common = 0 if loss == "regression" else max(np.unique(known, return_counts=True)[1], default=0)
        found.append(len(known) - int(common))
    return max(found)


def mean_of_defined(values: Iterable[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan
