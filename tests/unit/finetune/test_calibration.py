"""Calibration on synthetic predictions whose truth is known: coverage in closed form, Platt's and isotonic curves."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit, logit

from exlm_cli.finetune.calibration import (
    MIN_ISOTONIC_ROWS,
    MIN_OF_EACH,
    Calibration,
    ConformalResiduals,
    IsotonicCurve,
    PlattCurve,
    fit_calibration,
    reliability,
    score_calibration,
)
from exlm_cli.tasks.base import FloatArray

NAN = math.nan


def binary(probabilities: FloatArray, targets: FloatArray) -> Calibration:
    return fit_calibration("binary", probabilities[None, :, None], targets[:, None])


@pytest.mark.parametrize(
    ("num", "level", "rank"), [(9, 0.9, 9), (8, 0.9, None), (99, 0.9, 90), (9, 0.7, 7), (19, 0.95, 19), (9, 1e-12, 1)]
)
def test_the_half_width_is_the_residual_of_the_finite_sample_rank(num, level, rank):
    """ceil((n + 1) * level), which no n may miss by a rounding error; without such a rank the interval is infinite."""
    residuals = tuple(float(i) for i in range(1, num + 1))
    assert ConformalResiduals(residuals=residuals).half_width(level) == (math.inf if rank is None else rank)
    width = Calibration(outputs=(ConformalResiduals(residuals=residuals), None)).half_widths(level)
    np.testing.assert_array_equal(width, [NAN if rank is None else rank, NAN])


@pytest.mark.parametrize("num", [9, 25, 200])
def test_coverage_of_new_rows_has_the_distribution_that_theory_gives(num):
    """For continuous residuals the coverage, given the validation rows, is Beta(r, n + 1 - r) with r the rank
    (Vovk 2012), whatever the residuals' distribution: its mean is r / (n + 1), at least the level. Residuals here are
    exponential, so the coverage of each draw is exact, 1 - exp(-q), and Kolmogorov's test compares 2,000 draws.
    """
    rng, level = np.random.default_rng(num), 0.9
    covered = []
    for signed_N in rng.exponential(size=(2000, num)) * rng.choice([-1, 1], size=(2000, num)):
        target_N = rng.normal(size=num)
        fitted = fit_calibration("regression", (target_N + signed_N)[None, :, None], target_N[:, None])
        covered.append(1 - math.exp(-fitted.half_widths(level)[0]))
    rank = math.ceil((num + 1) * level)
    assert stats.kstest(covered, stats.beta(rank, num + 1 - rank).cdf).pvalue > 0.01
    assert np.mean(covered) == pytest.approx(rank / (num + 1), abs=0.01)


def test_values_are_calibrated_column_by_column_over_known_rows():
    """The mean over the seeds is 1 above the first column's truth; the second is known in no row."""
    predicted_KNC = np.array([[[1.0, 0.0], [2.0, 0.0]], [[3.0, 0.0], [4.0, 0.0]]])
    fitted = fit_calibration("regression", predicted_KNC, np.array([[1.0, NAN], [NAN, NAN]]))
    assert fitted.outputs == (ConformalResiduals(residuals=(1.0,)), None)
    assert fitted.half_widths(0.5).tolist()[0] == 1.0
    scores = score_calibration(
        fitted, "regression", np.array([[0.0, 0.0], [5.0, 0.0]]), np.array([[1, 1], [3, 1]]), 0.5
    )
    assert scores == [
        {"interval_coverage": 0.5, "interval_width": 2.0}, {"interval_coverage": None, "interval_width": None},
    ]  # fmt: skip


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
    (scores,) = score_calibration(fitted, "binary", claimed_N[:, None], target_N[:, None])
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
    fitted = fit_calibration("classes", predicted[None], targets[:, None])
    unscaled = np.stack([c.apply(p) for c, p in zip(fitted.outputs, predicted.T, strict=True)])  # type: ignore[union-attr]
    np.testing.assert_allclose(unscaled.sum(axis=0), 1, atol=1e-3)
    np.testing.assert_allclose(fitted.calibrate("classes", predicted).sum(axis=1), 1, atol=1e-12)
    only_first = fit_calibration("classes", predicted[None], np.zeros((300, 1)))
    assert np.isnan(only_first.calibrate("classes", predicted)).all()
    assert score_calibration(only_first, "classes", predicted, targets[:, None])[1]["brier_calibrated"] is None


def test_reliability_bins_hold_equally_many_rows():
    bins_B3 = reliability(np.linspace(0, 1, 50), np.repeat([0.0, 1.0], 25))
    np.testing.assert_array_equal(bins_B3[:, 2], 5)
    np.testing.assert_array_equal(bins_B3[:, 1], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(bins_B3[0, 0], np.linspace(0, 1, 50)[:5].mean())
    np.testing.assert_array_equal(reliability(np.full(7, 0.25), np.array([1, 0, 0, 0, 0, 0, 0])), [[0.25, 1 / 7, 7]])
