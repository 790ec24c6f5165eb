"""Every score equals a value worked out by hand, to 1e-9; what is not defined is NaN and stays out of means."""

import math

import numpy as np

from exlm_cli.tasks import metrics

NAN = math.nan
TARGETS = [0, 0, 1, 1]
SCORES = [0.1, 0.4, 0.35, 0.8]


def close(value: float, expected: float) -> bool:
    return abs(value - expected) < 1e-9


def test_class_scores_follow_from_the_confusion_matrix() -> None:
    targets, predicted = [1] * 4 + [0] * 6, [1, 1, 1, 0, 1, 0, 0, 0, 0, 0]  # tp 3, fn 1, fp 1, tn 5
    assert close(metrics.accuracy(targets, predicted), 8 / 10)
    assert close(metrics.f1(targets, predicted), 2 * 3 / (2 * 3 + 1 + 1))
    assert close(metrics.matthews_corrcoef(targets, predicted), (3 * 5 - 1 * 1) / math.sqrt(4 * 4 * 6 * 6))


def test_macro_f1_is_the_mean_over_classes_that_occur() -> None:
    # class 0: tp 1, fp 1, fn 1; class 1: tp 1, fp 1, fn 0; class 2: tp 1, fp 0, fn 1
    assert close(metrics.macro_f1([0, 0, 1, 2, 2], [0, 1, 1, 2, 0]), (1 / 2 + 2 / 3 + 2 / 3) / 3)
    # class 3 is predicted and does not occur: it has no F1 of its own
    assert close(metrics.macro_f1([0, 0], [0, 3]), 2 / 3)


def test_correlations_by_hand() -> None:
    # deviations (-1.5, -.5, .5, 1.5) and (-2, 0, -1, 3): products sum to 7, squares to 5 and 14
    assert close(metrics.pearsonr([1, 2, 3, 4], [1, 3, 2, 6]), 7 / math.sqrt(5 * 14))
    # ranks (1, 2, 3, 4) and (1, 3, 2, 4): 1 - 6 * 2 / (4 * 15)
    assert close(metrics.spearmanr([1, 2, 3, 4], [1, 3, 2, 60]), 0.8)
    # ties take the mean rank: (1, 2, 3) and (1.5, 1.5, 3)
    assert close(metrics.spearmanr([1, 2, 3], [5, 5, 6]), 1.5 / math.sqrt(2 * 1.5))


def test_errors_of_values_by_hand() -> None:
    targets, predicted = [1.0, 2.0, 4.0], [1.5, 2.0, 2.0]
    assert close(metrics.rmse(targets, predicted), math.sqrt((0.25 + 0 + 4) / 3))
    assert close(metrics.mae(targets, predicted), 2.5 / 3)
    assert close(metrics.r2(targets, predicted), 1 - 4.25 / (14 / 3))  # squares around the mean 7/3 sum to 14/3


def test_what_is_not_defined_is_nan_without_a_warning() -> None:
    for area in (metrics.roc_auc, metrics.average_precision):
        assert math.isnan(area([], []))
        assert math.isnan(area([1, 1], [0.2, 0.3]))
    assert all(map(math.isnan, metrics.score_binary(np.array([[0.5]]), np.array([[NAN]])).values()))
    assert math.isnan(metrics.accuracy([], []))
    assert math.isnan(metrics.f1([0, 0], [0, 1]))
    assert metrics.f1([0, 1], [0, 0]) == 0
    assert math.isnan(metrics.macro_f1([], []))
    assert math.isnan(metrics.matthews_corrcoef([1, 1], [0, 1]))
    assert metrics.matthews_corrcoef([0, 1], [1, 1]) == 0
    for correlation in (metrics.pearsonr, metrics.spearmanr):
        assert math.isnan(correlation([1, 1], [1, 2]))
        assert math.isnan(correlation([1, 2], [1, 1]))
        assert math.isnan(correlation([], []))
    assert math.isnan(metrics.rmse([], []))
    assert math.isnan(metrics.mae([], []))
    assert math.isnan(metrics.r2([3, 3], [1, 2]))


def test_labels_are_scored_where_known_and_averaged_where_both_classes_are() -> None:
    targets = np.array(
        [
            [0, 1, NAN, 0],
            [0, 1, NAN, NAN],
            [1, NAN, NAN, 1],
            [1, 1, NAN, NAN],
        ]
    )
    probabilities = np.column_stack([SCORES, [0.9, 0.2, 0.9, 0.9], SCORES, [0.9, 0.0, 0.6, 0.0]])
    scores = metrics.score_binary(probabilities, targets)
    # the second label has one class, the third none: neither counts in the areas
    assert close(scores["roc_auc"], (3 / 4 + 0) / 2)
    assert close(scores["average_precision"], (5 / 6 + 1 / 2) / 2)
    # accuracy counts the second label as well: 3 of 4, 2 of 3, 1 of 2
    assert close(scores["accuracy"], (3 / 4 + 2 / 3 + 1 / 2) / 3)
    # label 1: tp 1, fn 1; label 4: tp 1, fp 1
    assert close(scores["f1"], (2 / 3 + 2 / 3) / 2)
    assert metrics.describe_unscorable(targets, ["a", "b", "c", "d"]) == {
        "b": "is 1 in every row that has it",
        "c": "is missing in every row",
    }


def test_a_probability_of_one_half_is_positive() -> None:
    scores = metrics.score_binary(np.array([[0.5], [0.4]]), np.array([[1.0], [0.0]]))
    assert scores["accuracy"] == 1


def test_two_classes_have_the_areas_of_the_second() -> None:
    probabilities = np.array([[1 - p, p] for p in SCORES])
    scores = metrics.score_classes(probabilities, np.array(TARGETS, dtype=float))
    assert close(scores["roc_auc"], 3 / 4)
    assert close(scores["average_precision"], 5 / 6)
    assert close(scores["accuracy"], 3 / 4)
    assert close(scores["f1"], 2 / 3)


def test_three_classes_have_no_areas_and_a_mean_f1() -> None:
    probabilities = np.eye(3)[[0, 1, 1, 2, 0, 0]]
    scores = metrics.score_classes(probabilities, np.array([0, 0, 1, 2, 2, NAN]))
    assert set(scores) == {"accuracy", "matthews_corrcoef", "f1"}
    assert close(scores["accuracy"], 3 / 5)
    assert close(scores["f1"], (1 / 2 + 2 / 3 + 2 / 3) / 3)


def test_columns_of_values_are_scored_where_known() -> None:
    targets = np.array([[1.0, 10.0], [2.0, NAN], [4.0, 20.0]])
    values = np.array([[1.5, 11.0], [2.0, 0.0], [2.0, 21.0]])
    scores = metrics.score_regression(values, targets)
    assert close(scores["rmse"], (math.sqrt(4.25 / 3) + 1) / 2)
    assert close(scores["mae"], (2.5 / 3 + 1) / 2)
    assert close(scores["pearsonr"], (metrics.pearsonr(targets[:, 0], values[:, 0]) + 1) / 2)
