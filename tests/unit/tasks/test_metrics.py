"""Every score equals a value worked out by hand, to 1e-9; what is not defined is NaN and stays out of means."""

import math
from fractions import Fraction

import numpy as np
import pytest

from exlm_cli.tasks.metrics import (
    count_telling_rows,
    describe_constant,
    describe_rare_classes,
    describe_unscorable,
    metric,
    row_weights,
    score_bounds,
    score_columns,
    score_rows,
    target_scale,
)

NAN = math.nan
SCORES = [0.1, 0.4, 0.35, 0.8]
CONFUSED = ([1] * 4 + [0] * 6, [1, 1, 1, 0, 1, 0, 0, 0, 0, 0])  # tp 3, fn 1, fp 1, tn 5
VALUES = ([1.0, 2.0, 4.0], [1.5, 2.0, 2.0])


@pytest.mark.parametrize(
    ("name", "targets", "predicted", "expected"),
    [
        ("accuracy", *CONFUSED, 8 / 10),
        ("f1", *CONFUSED, 2 * 3 / (2 * 3 + 1 + 1)),
        ("matthews_corrcoef", *CONFUSED, (3 * 5 - 1 * 1) / math.sqrt(4 * 4 * 6 * 6)),
        # class 0: tp 1, fp 1, fn 1; class 1: tp 1, fp 1, fn 0; class 2: tp 1, fp 0, fn 1
        ("macro_f1", [0, 0, 1, 2, 2], [0, 1, 1, 2, 0], Fraction(11, 18)),
        ("macro_f1", [0, 0], [0, 3], 2 / 3),  # class 3 is predicted and does not occur: it has no F1 of its own
        # deviations (-1.5, -.5, .5, 1.5) and (-2, 0, -1, 3): products sum to 7, squares to 5 and 14
        ("pearsonr", [1, 2, 3, 4], [1, 3, 2, 6], 7 / math.sqrt(5 * 14)),
        ("spearmanr", [1, 2, 3, 4], [1, 3, 2, 60], 0.8),  # ranks (1, 2, 3, 4) and (1, 3, 2, 4): 1 - 6 * 2 / (4 * 15)
        ("spearmanr", [1, 2, 3], [5, 5, 6], 1.5 / math.sqrt(2 * 1.5)),  # ties take the mean rank: (1.5, 1.5, 3)
        ("rmse", *VALUES, math.sqrt((0.25 + 0 + 4) / 3)),
        ("mae", *VALUES, 2.5 / 3),
        ("r2", *VALUES, 1 - 4.25 / (14 / 3)),  # squares around the mean 7/3 sum to 14/3
        ("f1", [0, 1], [0, 0], 0),
        ("f1", [0, 0], [0, 1], NAN),
        ("matthews_corrcoef", [1, 1], [0, 1], NAN),
        ("roc_auc", [1, 1], [0.2, 0.3], NAN),
        ("average_precision", [1, 1], [0.2, 0.3], NAN),
        ("pearsonr", [1, 1], [1, 2], NAN),
        ("spearmanr", [1, 2], [1, 1], NAN),
        ("r2", [3, 3], [1, 2], NAN),
    ],
)
def test_scores_by_hand(name, targets, predicted, expected):
    assert metric(name, targets, predicted) == pytest.approx(float(expected), abs=1e-9, nan_ok=True)
    assert math.isnan(metric(name, [], []))


def test_labels_are_scored_where_known_and_averaged_where_both_classes_are():
    targets = np.array([[0, 1, NAN, 0], [0, 1, NAN, NAN], [1, NAN, NAN, 1], [1, 1, NAN, NAN]])
    probabilities = np.column_stack([SCORES, [0.9, 0.2, 0.9, 0.9], SCORES, [0.9, 0.0, 0.5, 0.0]])
    scores = score_rows("binary", probabilities, targets)
    expected = {
        # the second label has one class, the third none: neither counts in the areas
        "roc_auc": (3 / 4 + 0) / 2,
        "average_precision": (5 / 6 + 1 / 2) / 2,
        # accuracy counts the second label as well: 3 of 4, 2 of 3, and 1 of 2, as a half is positive
        "accuracy": (3 / 4 + 2 / 3 + 1 / 2) / 3,
        "f1": (2 / 3 + 2 / 3) / 2,  # label 1: tp 1, fn 1; label 4: tp 1, fp 1
        "matthews_corrcoef": (1 / math.sqrt(3) + 0) / 2,  # label 1: tp 1, fn 1, tn 2; label 4: one class predicted
    }
    assert scores == pytest.approx(expected, abs=1e-9)
    assert describe_unscorable(targets, ["a", "b", "c", "d"]) == {
        "b": "is 1 in every row that has it",
        "c": "is missing in every row",
    }
    assert all(map(math.isnan, score_rows("binary", np.array([[0.5]]), np.array([[NAN]])).values()))


def test_labels_and_classes_with_fewer_than_ten_rows_are_named():
    """The counts are those of the columns below; a class without a row has no ROC-AUC, as another note says."""
    columns = [[0] + [1] * 20, [0] * 12 + [1] * 9, [0] * 11 + [1] * 10, [1] * 21, [0] + [1] * 3 + [NAN] * 17]
    targets = np.array(columns, dtype=float).T
    assert describe_rare_classes("binary", targets, ["a", "b", "c", "d", "e"]) == [
        "`a` has 1 negative row",
        "`b` has 9 positive rows",
        "`e` has 1 negative row",
    ]
    assert describe_rare_classes("classes", np.array([[0.0]] * 11 + [[1]] * 2), ["x", "y"]) == ["class `y` has 2 rows"]


def test_two_classes_have_the_areas_of_the_second_and_three_have_none():
    scores = score_rows("classes", np.array([[1 - p, p] for p in SCORES]), np.array([[0.0], [0], [1], [1]]))
    expected = {
        "roc_auc": 3 / 4, "average_precision": 5 / 6, "accuracy": 3 / 4, "f1": 2 / 3,
        "matthews_corrcoef": 1 / math.sqrt(3),
    }  # fmt: skip
    assert scores == pytest.approx(expected, abs=1e-9)
    scores = score_rows("classes", np.eye(3)[[0, 1, 1, 2, 0, 0]], np.array([[0], [0], [1], [2], [2], [NAN]]))
    assert set(scores) == {"accuracy", "matthews_corrcoef", "f1"}
    assert (scores["accuracy"], scores["f1"]) == pytest.approx((3 / 5, 11 / 18), abs=1e-9)


def test_columns_of_values_are_scored_where_known_and_their_errors_averaged_after_division_by_their_deviation():
    targets = np.array([[1.0, 10.0], [2.0, NAN], [4.0, 20.0]])
    predicted = np.array([[1.5, 11.0], [2.0, 0.0], [2.0, 21.0]])
    scores = score_rows("regression", predicted, targets)
    assert scores["pearsonr"] == pytest.approx((metric("pearsonr", *VALUES) + 1) / 2, abs=1e-9)
    assert not {"rmse", "mae", "standardised_rmse"} & scores.keys()  # of different units
    deviations = target_scale(targets)[1]
    scores = score_rows("regression", predicted, targets, deviations)
    by_hand = (math.sqrt(4.25 / 3) / np.std([1, 2, 4]) + 1 / np.std([10, 20])) / 2
    assert scores["standardised_rmse"] == pytest.approx(by_hand)
    assert [column["rmse"] for column in score_columns("regression", predicted, targets)] == pytest.approx(
        [math.sqrt(4.25 / 3), 1.0]
    )


@pytest.mark.parametrize(
    ("targets", "mean", "std"),
    [
        ([[1.0, NAN, 5.0], [3.0, NAN, 5.0], [NAN, NAN, 5.0]], [2, 0, 5], [1, 1, 1]),
        # equal targets have a scale of 1, whatever is lost in rounding
        ([[0.1], [0.1], [0.1]], [0.1], [1]),
        ([[1e-250], [3e-250]], [2e-250], [1e-250]),  # squares do not vanish
        # targets that differ in the last digit keep their scale
        ([[1.0], [1.0 + 2**-50]], [1.0 + 2**-51], [2**-51]),
    ],
)
def test_the_scale_of_targets_leaves_out_what_is_missing_and_never_loses_its_digits(targets, mean, std):
    found = target_scale(np.array(targets))
    assert found[0].tolist() == pytest.approx(mean, rel=1e-15)
    assert found[1].tolist() == pytest.approx(std, rel=1e-15)


HALF = np.array([[0.6], [0.7], [0.8]])


@pytest.mark.parametrize(
    ("loss", "predicted", "truth", "is_same"),
    [
        ("binary", HALF, [[0], [1], [1]], True),
        ("binary", [[0.6], [0.2], [0.8]], [[0], [1], [1]], False),
        ("binary", HALF, [[1], [1], [NAN]], False),  # as the truth is
        ("classes", np.hstack([HALF, 1 - HALF]), [[0], [1], [0]], True),
        ("classes", np.hstack([HALF, 1 - HALF]), [[0], [0], [NAN]], False),
        # values within a hundredth of the deviation of the truth are one
        ("regression", [[5.0], [5.0], [5.0 + 0.009 * np.std([1, 5, 9])]], [[1], [5], [9]], True),
        ("regression", [[5.0], [5.0], [5.0 + 0.011 * np.std([1, 5, 9])]], [[1], [5], [9]], False),
    ],
)
def test_the_same_answer_for_every_row_is_told_where_the_truth_differs(loss, predicted, truth, is_same):
    names = ("a", "b") if loss == "classes" else ("a",)
    assert bool(describe_constant(loss, np.array(predicted), np.array(truth, dtype=float), names)) == is_same


@pytest.mark.parametrize(
    ("loss", "targets", "num"),
    [
        ("binary", [[1, 0], [0, 0], [1, NAN], [0, 0]], 2),
        ("classes", [[0], [0], [0], [1], [2]], 2),
        ("regression", [[1.5, NAN], [1.5, 2.0], [2.5, NAN]], 3),
        ("binary", [[NAN], [NAN]], 0),
    ],
)
def test_rows_that_tell_models_apart_are_values_or_not_of_the_commonest_class(loss, targets, num):
    """Of several labels, those of the label with the most; a model that says one class is right on all others."""
    assert count_telling_rows(loss, np.array(targets, dtype=float)) == num


def test_errors_of_censored_values_are_those_beyond_their_bounds():
    """As chemprop's bounded metrics: a prediction on the right side counts as the bound itself."""
    predicted = np.array([[4.0, 1.0], [6.0, 1.0], [5.0, 1.0], [1.0, 1.0]])
    inf = np.inf
    bounds = np.array(
        [[[5, inf], [0, 0]], [[5, inf], [-inf, inf]], [[-inf, 2], [2, 2]], [[3, 3], [-inf, inf]]], dtype=float
    )
    first, second = score_bounds(predicted, bounds)
    assert first == pytest.approx({"rmse": math.sqrt((1 + 0 + 9 + 4) / 4), "mae": (1 + 0 + 3 + 2) / 4})
    assert second == pytest.approx({"rmse": 1.0, "mae": 1.0})
    (empty,) = score_bounds(predicted[:, :1], np.array([[[-inf, inf]]] * 4))
    assert all(map(math.isnan, empty.values()))


def test_weights_of_classes_and_rows_are_multiplied():
    target, own = np.array([0.0, 1.0, 1.0]), np.array([1.0, 2.0, 0.5])
    assert row_weights("classes", np.array([3.0, 5.0]), target, 0, own).tolist() == [3.0, 10.0, 2.5]
    assert row_weights("binary", np.array([9.0, 5.0]), target, 1, own).tolist() == [1.0, 10.0, 2.5]
    assert row_weights("regression", None, target, 0, own) is own
