"""Calibration on synthetic predictions whose truth is known: coverage in closed form, Platt's and isotonic curves."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit, logit

from exlm_cli.errors import CheckpointError
from exlm_cli.files import write_json
from exlm_cli.finetune.evaluation.calibration import (
    CALIBRATION_FILE,
    MIN_OF_EACH,
    CalibratedRows,
    Calibration,
    fit_calibration,
    read_calibration,
    score_calibration,
)
from exlm_cli.finetune.evaluation.conformal import (
    MIN_SCALED_ROWS,
    ConformalResiduals,
    Coverage,
    ErrorScale,
    ErrorSigns,
    error_signs,
)
from exlm_cli.finetune.evaluation.curves import MIN_ISOTONIC_ROWS, IsotonicCurve, PlattCurve, reliability
from exlm_cli.tasks.base import FloatArray

NAN = math.nan


def unknown(num_rows: int, num_outputs: int = 1) -> ErrorSigns:
    """Rows of texts that one seed predicts."""
    return error_signs(np.zeros((1, num_rows, num_outputs)), None)


def binary(probabilities: FloatArray, targets: FloatArray) -> Calibration:
    return fit_calibration("binary", probabilities[None, :, None], targets[:, None])


@pytest.mark.parametrize(
    ("num", "level", "rank"), [(9, 0.9, 9), (8, 0.9, None), (99, 0.9, 90), (9, 0.7, 7), (19, 0.95, 19), (9, 1e-12, 1)]
)
def test_the_half_width_is_the_residual_of_the_finite_sample_rank(num, level, rank):
    """ceil((n + 1) * level), which no n may miss by a rounding error; without such a rank the interval is infinite."""
    residuals = tuple(float(i) for i in range(1, num + 1))
    assert ConformalResiduals(residuals=residuals).half_width(level) == (math.inf if rank is None else rank)
    calibration = Calibration(outputs=(ConformalResiduals(residuals=residuals), None))
    width_NC = calibration.half_widths(level, unknown(3, 2))
    np.testing.assert_array_equal(width_NC, [[NAN if rank is None else rank, NAN]] * 3)
    assert calibration.has_intervals(level) == [rank is not None, False]


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
        covered.append(1 - math.exp(-fitted.half_widths(level, unknown(1))[0, 0]))
    rank = math.ceil((num + 1) * level)
    assert stats.kstest(covered, stats.beta(rank, num + 1 - rank).cdf).pvalue > 0.01
    assert np.mean(covered) == pytest.approx(rank / (num + 1), abs=0.01)


def test_values_are_calibrated_column_by_column_over_known_rows():
    """The mean over the seeds is 1 above the first column's truth; the second is known in no row."""
    predicted_KNC = np.array([[[1.0, 0.0], [2.0, 0.0]], [[3.0, 0.0], [4.0, 0.0]]])
    fitted = fit_calibration("regression", predicted_KNC, np.array([[1.0, NAN], [NAN, NAN]]))
    assert fitted.outputs == (ConformalResiduals(residuals=(1.0,)), None)
    assert fitted.half_widths(0.5, unknown(1, 2)).tolist()[0][0] == 1.0
    mean, targets = np.array([[0.0, 0.0], [5.0, 0.0]]), np.array([[1.0, 1.0], [3.0, 1.0]])
    scored = CalibratedRows("regression", ("a", "b"), mean, targets, fitted, 0.5)
    assert score_calibration(scored) == [
        {"interval_coverage": 0.5, "interval_width": 2.0}, {"interval_coverage": None, "interval_width": None},
    ]  # fmt: skip


def noisy(num: int, seed: int, num_seeds: int = 3) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return predictions of seeds, (K, N, 1), truth, (N, 1), and similarity, (N,).

    The error is normal with deviation (0.2 + distance) * u, and the seeds' deviation is u / 4, within sampling.
    """
    rng = np.random.default_rng(seed)
    similarity_N, level_N = rng.uniform(0.1, 1, num), rng.choice([0.5, 2.0], num)
    seeds_KN = level_N / 4 * rng.standard_normal((num_seeds, num))
    target_N = seeds_KN.mean(axis=0) + (1.2 - similarity_N) * level_N * rng.standard_normal(num)
    return seeds_KN[..., None], target_N[:, None], similarity_N


def covered_thirds(knows_distance: bool, knows_spread: bool, sign: str, num_fits: int = 20) -> FloatArray:
    """Return the mean coverage of each third of 2,000 new rows by a sign, of calibrations on 300 rows each."""
    found, num_seeds = [], 3 if knows_spread else 1
    for seed in range(num_fits):
        parts = [noisy(num, 100 * seed + num, num_seeds) for num in (300, 2000)]
        (predicted_KNC, target_NC, near_N), (new_KNC, true_NC, new_near_N) = parts
        fitted = fit_calibration("regression", predicted_KNC, target_NC, near_N if knows_distance else None)
        signs = error_signs(new_KNC, new_near_N if knows_distance else None)
        half_N = fitted.half_widths(0.9, signs)[:, 0]
        is_inside_N = np.abs(new_KNC.mean(axis=0) - true_NC)[:, 0] <= half_N
        order = np.argsort(new_near_N if sign == "similarity" else signs.spread[:, 0])
        found.append([is_inside_N[part].mean() for part in np.array_split(order, 3)])
    return np.mean(found, axis=0)


@pytest.mark.parametrize(
    ("knows_distance", "knows_spread", "sign"),
    [(True, True, "similarity"), (True, False, "similarity"), (False, True, "spread")],
)
def test_intervals_hold_what_they_promise_in_each_third_of_the_sign_that_they_know(knows_distance, knows_spread, sign):
    """Plain intervals hold over 95 % of the near third and under 85 % of the far one; see the next test."""
    np.testing.assert_allclose(covered_thirds(knows_distance, knows_spread, sign), 0.9, atol=0.03)


def test_plain_intervals_hold_too_much_near_the_training_rows_and_too_little_far_away():
    far, _, near = covered_thirds(knows_distance=False, knows_spread=False, sign="similarity")
    assert far < 0.85 < 0.95 < near


def test_coverage_of_scaled_intervals_is_at_least_the_level_on_average():
    """60 validation rows, 400 fits: the mean coverage of all new rows, with its own error of under 0.5 %."""
    covered = []
    for seed in range(400):
        predicted_KNC, target_NC, near_N = noisy(160, seed)
        fitted = fit_calibration("regression", predicted_KNC[:, :60], target_NC[:60], near_N[:60])
        half_N = fitted.half_widths(0.9, error_signs(predicted_KNC[:, 60:], near_N[60:]))[:, 0]
        covered.append(np.mean(np.abs(predicted_KNC.mean(axis=0) - target_NC)[60:, 0] <= half_N))
    assert 0.895 < np.mean(covered) < 0.95


def test_few_rows_or_no_signs_give_one_width():
    predicted_KNC, target_NC, near_N = noisy(MIN_SCALED_ROWS, 0)
    fewer = MIN_SCALED_ROWS - 1
    one_seed = predicted_KNC[:1]
    for fitted in (
        fit_calibration("regression", predicted_KNC[:, :fewer], target_NC[:fewer], near_N[:fewer]),
        fit_calibration("regression", one_seed, target_NC),
        fit_calibration("regression", one_seed, target_NC, np.ones(MIN_SCALED_ROWS)),
        fit_calibration("regression", one_seed, one_seed[0], near_N),
    ):
        (output,) = fitted.outputs
        assert isinstance(output, ConformalResiduals)
        assert output.scale is None
        assert "scale" not in fitted.as_json()["outputs"][0]
        assert len(np.unique(fitted.half_widths(0.9, error_signs(predicted_KNC, near_N)))) == 1
    scaled = fit_calibration("regression", predicted_KNC, target_NC, near_N)
    assert len(np.unique(scaled.half_widths(0.9, error_signs(predicted_KNC, near_N)))) == MIN_SCALED_ROWS
    assert Calibration.model_validate_json(scaled.model_dump_json()) == scaled


def test_a_scale_without_what_it_needs_gives_no_interval_and_never_a_width_of_zero():
    predicted_KNC, target_NC, near_N = noisy(200, 1)
    fitted = fit_calibration("regression", predicted_KNC, target_NC, near_N)
    assert np.isnan(fitted.half_widths(0.9, unknown(4))).all()
    certain = ErrorSigns(np.ones(1), np.zeros((1, 1)))
    assert fitted.half_widths(0.9, certain)[0, 0] > 0.05
    # few rows count at the ends: there 99 % takes all rows, of which 99 are enough
    assert np.isfinite(fitted.half_widths(0.99, error_signs(predicted_KNC, near_N))).all()
    assert np.isnan(fitted.half_widths(0.999, error_signs(predicted_KNC, near_N))).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"residuals": [2.0, 1.0]},
        {"residuals": []},
        {"residuals": [-1.0, 1.0]},
        {"rows": [0.5]},
        {"constant": 0.0},
        {"per_distance": -1.0},
        {"neighbours_by": "weight"},
    ],
)
def test_residuals_that_do_not_fit_their_scale_are_refused_on_load(tmp_path, changes):
    scale = {"constant": 0.5, "per_distance": 1.0, "per_spread": 0.0, "neighbours_by": "distance", "rows": [0.1, 0.2]}
    output = {"method": "conformal", "residuals": [1.0, 2.0], "scale": scale}
    write_json(tmp_path / CALIBRATION_FILE, {"outputs": [output]})
    assert isinstance(read_calibration(tmp_path).outputs[0].scale, ErrorScale)
    scale |= {name: value for name, value in changes.items() if name in scale}
    output |= {name: value for name, value in changes.items() if name in output}
    write_json(tmp_path / CALIBRATION_FILE, {"outputs": [output]})
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        read_calibration(tmp_path)


def test_coverage_counts_the_rows_of_each_third_that_are_inside():
    """Nine rows with intervals of half-width 1: the nearest third is inside, the farthest outside; of one more row the
    truth is unknown.
    """
    residuals = ConformalResiduals(residuals=(1.0,) * 20)
    near_N = np.arange(1, 11) / 10
    targets = np.array([5.0, 5.0, 5.0, 5.0, 0.5, 0.5, 0.5, 0.5, 0.5, NAN])[:, None]
    signs = ErrorSigns(near_N, np.full((10, 1), NAN))
    calibration = Calibration(outputs=(residuals,))
    rows = CalibratedRows("regression", ("a",), np.zeros((10, 1)), targets, calibration, signs=signs)
    assert rows.coverage() == {
        "a": tuple(
            Coverage(by="similarity", least=least, most=most, num_rows=3, num_inside=inside, mean_width=2.0)
            for least, most, inside in ((0.7, 0.9, 3), (0.4, 0.6, 2), (0.1, 0.3, 0))
        )
    }
    (whole,) = CalibratedRows("regression", ("a",), np.zeros((10, 1)), targets, calibration).coverage()["a"]
    assert (whole.by, whole.num_rows, whole.num_inside) == ("rows", 9, 5)


def test_many_labels_are_calibrated_once(monkeypatch):
    rng, num_labels = np.random.default_rng(0), 30
    curve = PlattCurve(num_rows=9, least=0.0, most=1.0, slope=0.5, intercept=0.0)
    mean, targets = rng.random((8, num_labels)), np.ones((8, num_labels))
    rows = CalibratedRows("binary", ("a",) * num_labels, mean, targets, Calibration(outputs=(curve,) * num_labels))
    applied, apply = [], PlattCurve.apply
    monkeypatch.setattr(PlattCurve, "apply", lambda *given: applied.append(1) or apply(*given))
    for index in range(num_labels):
        np.testing.assert_allclose(rows.of_output(index)[2], apply(curve, mean[:, index]))
    rows.score()
    assert len(applied) == num_labels


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
    (scores,) = score_calibration(CalibratedRows("binary", ("a",), claimed_N[:, None], target_N[:, None], fitted))
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
    rows = CalibratedRows("classes", ("a", "b"), predicted, targets[:, None], only_first)
    assert score_calibration(rows)[1]["brier_calibrated"] is None


def test_reliability_bins_hold_equally_many_rows():
    bins_B3 = reliability(np.linspace(0, 1, 50), np.repeat([0.0, 1.0], 25))
    np.testing.assert_array_equal(bins_B3[:, 2], 5)
    np.testing.assert_array_equal(bins_B3[:, 1], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(bins_B3[0, 0], np.linspace(0, 1, 50)[:5].mean())
    np.testing.assert_array_equal(reliability(np.full(7, 0.25), np.array([1, 0, 0, 0, 0, 0, 0])), [[0.25, 1 / 7, 7]])
