"""Calibration on synthetic predictions whose truth is known: coverage in closed form, Platt's and isotonic curves."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit, logit
from sklearn.calibration import calibration_curve

from exlm_cli.errors import CheckpointError
from exlm_cli.files import write_json
from exlm_cli.finetune.evaluation.calibration import (
    CALIBRATION_FILE,
    MIN_ISOTONIC_ROWS,
    MIN_OF_EACH,
    MIN_THIRDS_ROWS,
    Calibration,
    ConformalResiduals,
    Coverage,
    IsotonicCurve,
    PlattCurve,
    PredictedRows,
    calibration_error,
    fit_calibration,
    read_calibration,
    score_calibration,
)
from exlm_cli.finetune.predictions import PartRows
from exlm_cli.tasks.base import FloatArray, Loss
from tests.unit.report.results import predicted_rows

NAN = math.nan


UNKNOWN = np.full(1, NAN)
"""Distance of a text."""


def fit(loss: Loss, mean: FloatArray, targets: FloatArray, similarity: FloatArray | None = None) -> Calibration:
    return fit_calibration(loss, mean, PartRows(np.arange(len(mean)), targets, similarity=similarity))


def binary(probabilities: FloatArray, targets: FloatArray) -> Calibration:
    return fit("binary", probabilities[:, None], targets[:, None])


def rows_of(loss: Loss, mean: FloatArray, targets: FloatArray, calibration: Calibration, **more: Any) -> PredictedRows:
    names = tuple("ab"[: mean.shape[1]])
    return predicted_rows(loss, names, np.stack([mean / 2, 3 * mean / 2]), targets, calibration, **more)


@pytest.mark.parametrize(
    ("num", "level", "rank"), [(9, 0.9, 9), (8, 0.9, None), (99, 0.9, 90), (9, 0.7, 7), (19, 0.95, 19), (9, 1e-12, 1)]
)
def test_the_half_width_is_the_residual_of_the_finite_sample_rank(num, level, rank):
    """ceil((n + 1) * level), which no n may miss by a rounding error; without such a rank there is no interval."""
    residuals = tuple(float(i) for i in range(1, num + 1))
    calibration = Calibration(outputs=(ConformalResiduals(residuals=(residuals,)), None))
    width_NC = calibration.half_widths(level, np.full(3, NAN))
    np.testing.assert_array_equal(width_NC, [[NAN if rank is None else rank, NAN]] * 3)
    assert calibration.has_intervals(level) == [rank is not None, False]


@pytest.mark.parametrize("num", [9, 25])
def test_coverage_of_new_rows_has_the_distribution_that_theory_gives(num):
    """For continuous residuals the coverage, given the validation rows, is Beta(r, n + 1 - r) with r the rank
    (Vovk 2012), whatever the residuals' distribution: its mean is r / (n + 1), at least the level. Residuals here are
    exponential, so the coverage of each draw is exact, 1 - exp(-q), and Kolmogorov's test compares 2,000 draws.
    """
    rng, level = np.random.default_rng(num), 0.9
    covered = []
    for signed_N in rng.exponential(size=(2000, num)) * rng.choice([-1, 1], size=(2000, num)):
        target_N = rng.normal(size=num)
        fitted = fit("regression", (target_N + signed_N)[:, None], target_N[:, None])
        covered.append(1 - math.exp(-fitted.half_widths(level, UNKNOWN)[0, 0]))
    rank = math.ceil((num + 1) * level)
    assert stats.kstest(covered, stats.beta(rank, num + 1 - rank).cdf).pvalue > 0.01
    assert np.mean(covered) == pytest.approx(rank / (num + 1), abs=0.01)


def test_values_are_calibrated_column_by_column_over_known_rows():
    """The first column's mean is 1 above its truth; the second is known in no row."""
    fitted = fit("regression", np.array([[2.0, 0.0], [3.0, 0.0]]), np.array([[1.0, NAN], [NAN, NAN]]))
    assert fitted.outputs == (ConformalResiduals(residuals=((1.0,),)), None)
    mean, targets = np.array([[0.0, 0.0], [5.0, 0.0]]), np.array([[1.0, 1.0], [3.0, 1.0]])
    assert score_calibration(rows_of("regression", mean, targets, fitted, level=0.5)) == [
        {"interval_coverage": 0.5, "interval_width": 2.0}, {"interval_coverage": None, "interval_width": None},
    ]  # fmt: skip


def noisy(num: int, seed: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return predictions, (N, 1), truth, (N, 1), and similarity, (N,); the error's deviation is 0.2 + distance."""
    rng = np.random.default_rng(seed)
    similarity_N = rng.uniform(0.1, 1, num)
    target_N = (1.2 - similarity_N) * rng.standard_normal(num)
    return np.zeros((num, 1)), target_N[:, None], similarity_N


def test_intervals_hold_what_they_promise_in_each_third():
    """2,000 new rows, the farthest first, of 20 calibrations on 300 rows."""
    found = []
    for seed in range(20):
        (mean, targets, near_N), (new, truth, new_near_N) = (noisy(num, 100 * seed + num) for num in (300, 2000))
        half_N = fit("regression", mean, targets, near_N).half_widths(0.9, 1 - new_near_N)[:, 0]
        is_inside_N = np.abs(new - truth)[:, 0] <= half_N
        found.append([is_inside_N[part].mean() for part in np.array_split(np.argsort(new_near_N), 3)])
    np.testing.assert_allclose(np.mean(found, axis=0), 0.9, atol=0.02)


def test_coverage_of_thirds_is_at_least_the_level_on_average_also_over_several_splits():
    """60 validation rows of two splits, 400 fits: the mean coverage of all new rows, with its error of under 0.5 %.

    The two have residuals of the same law, whatever the predictions: that of the second is 100 higher.
    """
    covered = []
    for seed in range(400):
        mean, targets, near_N = noisy(160, seed)
        shift = np.repeat([0.0, 100.0], 30)[:, None]
        half_N = fit("regression", mean[:60] + shift, targets[:60] + shift, near_N[:60]).half_widths(
            0.9, 1 - near_N[60:]
        )[:, 0]
        covered.append(np.mean(np.abs(mean - targets)[60:, 0] <= half_N))
    assert 0.895 < np.mean(covered) < 0.95


def test_few_rows_or_no_distances_give_one_width():
    mean, targets, near_N = noisy(MIN_THIRDS_ROWS, 0)
    fitted = fit("regression", mean, targets, near_N)
    assert [len(of_group) for of_group in fitted.outputs[0].residuals] == [17, 17, 16]
    assert len(np.unique(fitted.half_widths(0.9, 1 - near_N))) == 3
    assert Calibration.model_validate_json(fitted.model_dump_json()) == fitted
    few = fit("regression", mean[1:], targets[1:], near_N[1:])
    assert (few.of_one_width, fitted.of_one_width) == ([0], [])
    for alike in (few, fit("regression", mean, targets), fit("regression", mean, targets, np.ones(MIN_THIRDS_ROWS))):
        assert len(alike.outputs[0].residuals) == 1


def test_a_row_has_the_width_of_its_third_and_one_at_a_cut_that_of_the_nearer():
    output = ConformalResiduals(residuals=((1.0,) * 9, (2.0,) * 9, (3.0,) * 9), cuts=(0.25, 0.5))
    distance_N = np.array([0.0, 0.25, 0.26, 0.5, 0.51, 1.0, NAN])
    np.testing.assert_array_equal(output.half_widths(0.9, distance_N), [1, 1, 2, 2, 3, 3, NAN])
    # 95 % needs 19 rows, which all have together; 97 % needs 33
    np.testing.assert_array_equal(output.half_widths(0.95, distance_N), [3.0] * 7)
    assert np.isnan(output.half_widths(0.97, distance_N)).all()


def test_residuals_that_do_not_fit_their_cuts_are_refused_on_load(tmp_path):
    """An interval would be looked up beyond the groups."""
    output = {"method": "conformal", "residuals": [[1.0, 2.0], [1.0], [1.0]], "cuts": [0.2, 0.5]}
    write_json(tmp_path / CALIBRATION_FILE, {"outputs": [output]})
    assert isinstance(read_calibration(tmp_path).outputs[0], ConformalResiduals)
    write_json(tmp_path / CALIBRATION_FILE, {"outputs": [output | {"residuals": [[1.0], [1.0]]}]})
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        read_calibration(tmp_path)


def test_coverage_counts_the_rows_of_each_third_that_are_inside():
    """Nine rows with intervals of half-width 1: the nearest third is inside, the farthest outside; of one more row the
    truth is unknown.
    """
    near_N = np.arange(1, 11) / 10
    targets = np.array([5.0, 5.0, 5.0, 5.0, 0.5, 0.5, 0.5, 0.5, 0.5, NAN])[:, None]
    calibration = Calibration(outputs=(ConformalResiduals(residuals=((1.0,) * 20,)),))
    rows = rows_of("regression", np.zeros((10, 1)), targets, calibration, similarity=near_N)
    assert rows.coverage() == {
        "a": tuple(
            Coverage(least=least, most=most, num_rows=3, num_inside=inside, mean_width=2.0)
            for least, most, inside in ((0.7, 0.9, 3), (0.4, 0.6, 2), (0.1, 0.3, 0))
        )
    }
    (whole,) = rows_of("regression", np.zeros((10, 1)), targets, calibration).coverage()["a"]
    assert (whole.least, whole.num_rows, whole.num_inside) == (None, 9, 5)


@pytest.mark.parametrize(("num", "kind"), [(MIN_ISOTONIC_ROWS - 1, PlattCurve), (20_000, IsotonicCurve)])
def test_overconfident_probabilities_become_frequencies(num, kind):
    """The model's logit is three times the true one. Platt's slope must be 1/3 (within four standard errors of a
    logistic regression); either curve must bring the known true probability back.
    """
    rng = np.random.default_rng(1)
    true_N = expit(rng.normal(size=num))
    claimed_N, target_N = expit(3 * logit(true_N)), (rng.random(num) < true_N).astype(float)
    fitted = binary(claimed_N, target_N)
    (curve,) = fitted.outputs
    assert isinstance(curve, kind)
    if isinstance(curve, PlattCurve):
        assert curve.slope == pytest.approx(1 / 3, abs=4 * 0.03)
    calibrated_N = fitted.calibrate("binary", claimed_N[:, None])[:, 0]
    assert np.abs(calibrated_N - true_N).mean() < 0.03 < np.abs(claimed_N - true_N).mean()
    assert (calibrated_N.min() > 0) & (calibrated_N.max() < 1)
    assert (np.diff(calibrated_N[np.argsort(claimed_N)]) >= 0).all()
    (scores,) = score_calibration(rows_of("binary", claimed_N[:, None], target_N[:, None], fitted))
    assert scores["brier"] == pytest.approx(np.mean((claimed_N - target_N) ** 2))
    assert scores["calibration_error_calibrated"] < scores["calibration_error"] / 2
    assert Calibration.model_validate_json(fitted.model_dump_json()) == fitted


def test_separable_rows_stay_finite_and_a_wrong_order_gives_the_frequency():
    """Platt's targets keep a perfect order from an infinite slope: with ten rows each they are 11/12 and 1/12."""
    probabilities, targets = np.repeat([0.2, 0.8], MIN_OF_EACH), np.repeat([0.0, 1.0], MIN_OF_EACH)
    perfect = binary(probabilities, targets).calibrate("binary", probabilities[:, None])[:, 0]
    np.testing.assert_allclose(perfect, np.repeat([1 / 12, 11 / 12], MIN_OF_EACH), atol=1e-5)
    beyond = binary(probabilities, targets).calibrate("binary", np.array([[0.01], [0.99]]))
    np.testing.assert_allclose(beyond[:, 0], [1 / 12, 11 / 12], atol=1e-5)
    wrong = binary(probabilities, 1 - targets).calibrate("binary", probabilities[:, None])
    np.testing.assert_allclose(wrong, 0.5, atol=1e-12)
    assert binary(probabilities[1:], targets[1:]).outputs == (None,)


def test_classes_sum_to_one_or_have_no_calibration():
    """Two classes are mirror images of each other, so their sum is one before it is divided by."""
    rng = np.random.default_rng(2)
    second_N = rng.random(300)
    predicted = np.stack([1 - second_N, second_N], axis=1)
    targets = (rng.random(300) < second_N**2).astype(float)
    targets[0] = NAN
    fitted = fit("classes", predicted, targets[:, None])
    unscaled = np.stack([c.apply(p) for c, p in zip(fitted.outputs, predicted.T, strict=True)])  # type: ignore[union-attr]
    np.testing.assert_allclose(unscaled.sum(axis=0), 1, atol=1e-3)
    np.testing.assert_allclose(fitted.calibrate("classes", predicted).sum(axis=1), 1, atol=1e-12)
    only_first = fit("classes", predicted, np.zeros((300, 1)))
    assert np.isnan(only_first.calibrate("classes", predicted)).all()
    rows = rows_of("classes", predicted, targets[:, None], only_first)
    assert score_calibration(rows)[1]["brier_calibrated"] is None


@pytest.mark.parametrize("num_distinct", [3, 50])
def test_the_calibration_error_is_over_the_bins_of_scikit_learn(num_distinct):
    """Its `calibration_curve` gives the means of each bin, and a count of the rows their weights."""
    rng = np.random.default_rng(3)
    claimed_N = rng.choice(np.linspace(0.05, 0.95, num_distinct), 200)
    target_N = (rng.random(200) < claimed_N**2).astype(float)
    share_B, mean_B = calibration_curve(target_N, claimed_N, n_bins=10, strategy="quantile")
    edges = np.unique(np.quantile(claimed_N, np.arange(1, 10) / 10))
    num_B = np.unique(np.searchsorted(edges, claimed_N), return_counts=True)[1]
    wanted = np.average(np.abs(share_B - mean_B), weights=num_B)
    assert calibration_error(claimed_N, target_N) == pytest.approx(wanted, rel=1e-12)
    assert calibration_error(target_N, target_N) == 0
