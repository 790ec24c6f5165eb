"""The draws of the study of intervals: coverage as theory has it, whatever the residuals are divided by."""

import numpy as np
import pytest

import prediction_intervals as study


@pytest.mark.parametrize("scale", [None, 0.0, 1.0])
def test_the_mean_coverage_of_exchanged_rows_is_the_rank_over_n_plus_1(scale):
    """The rank is 90 of 99: whatever the divisor, a new row is covered with probability 90 / 100."""
    rng = np.random.default_rng(0)
    spread_N = rng.random(2000) + 0.5
    residual_N = rng.exponential(size=2000) * spread_N
    own, width, mean, deviation, least, most = study.measure_draws(residual_N, spread_N, 99, 0.9, scale)
    assert mean == pytest.approx(0.9, abs=4 * deviation / np.sqrt(study.NUM_DRAWS))
    assert 0 < own < 1
    assert width > 0
    # residuals grow with the spread: only intervals that do so cover both quarters alike
    assert (abs(least - most) < 0.03) == (scale == 0.0)
