"""Curves from a model's probabilities to frequencies, fitted on validation rows, and how far both are apart.

Axes: N rows, B bins.
"""

from typing import Literal

import numpy as np
from scipy.special import expit, logit

from exlm_cli.files import JsonModel
from exlm_cli.tasks.base import FloatArray

MIN_ISOTONIC_ROWS = 1000
"""With fewer rows isotonic regression follows their noise (scikit-learn's user guide, "Probability calibration")."""
NUM_BINS = 10
_CERTAIN = 1e-12
"""A probability may round to 0 or 1; its logit must be finite."""


class PlattCurve(JsonModel):
    """`expit(slope * logit(p) + intercept)` of a probability p (Platt 1999); the slope is never negative.

    It is constant below `least` and above `most`, the ends of the probabilities that it was fitted to: a model that has
    learned little has a narrow range and a steep slope.
    """

    method: Literal["platt"] = "platt"
    num_rows: int
    least: float
    most: float
    slope: float
    intercept: float

    def apply(self, probabilities_N: FloatArray) -> FloatArray:
        """Return calibrated probabilities."""
        return np.asarray(expit(self.slope * _logit(probabilities_N.clip(self.least, self.most)) + self.intercept))


class IsotonicCurve(JsonModel):
    """Isotonic regression: straight lines between knots, constant beyond the outer ones."""

    method: Literal["isotonic"] = "isotonic"
    num_rows: int
    probabilities: tuple[float, ...]
    calibrated: tuple[float, ...]

    def apply(self, probabilities_N: FloatArray) -> FloatArray:
        """Return calibrated probabilities."""
        return np.interp(probabilities_N, self.probabilities, self.calibrated)


def fit_curve(probabilities_N: FloatArray, target_N: FloatArray) -> PlattCurve | IsotonicCurve:
    """Fit the curve of one label that has both answers; bounds or smoothed targets keep it from claiming certainty."""
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    num_rows, num_positive = len(target_N), int(target_N.sum())
    if num_rows >= MIN_ISOTONIC_ROWS:
        least = 1 / (num_rows + 2)
        isotonic = IsotonicRegression(y_min=least, y_max=1 - least).fit(probabilities_N, target_N)
        knots = (tuple(isotonic.X_thresholds_.tolist()), tuple(isotonic.y_thresholds_.tolist()))
        return IsotonicCurve(num_rows=num_rows, probabilities=knots[0], calibrated=knots[1])
    # Platt's targets: a positive row counts as one with probability (n+ + 1) / (n+ + 2), a negative with 1 / (n- + 2)
    share_N = np.where(target_N == 1, (num_positive + 1) / (num_positive + 2), 1 / (num_rows - num_positive + 2))
    logit_2N = np.tile(_logit(probabilities_N), 2)[:, None]
    model = LogisticRegression(C=np.inf, tol=1e-8).fit(
        logit_2N, np.repeat([1, 0], num_rows), sample_weight=np.concatenate([share_N, 1 - share_N])
    )
    slope, intercept = float(model.coef_[0, 0]), float(model.intercept_[0])
    if slope <= 0:  # the model orders these rows no better than chance: their frequency is all that is known
        slope, intercept = 0.0, float(logit(share_N.mean()))
    least, most = float(probabilities_N.min()), float(probabilities_N.max())
    return PlattCurve(num_rows=num_rows, least=least, most=most, slope=slope, intercept=intercept)


def reliability(probabilities_N: FloatArray, target_N: FloatArray) -> FloatArray:
    """Return (B, 3) mean probability, frequency of the positive answer and number of rows of at most `NUM_BINS` bins.

    Bins hold equally many rows, in the order of their probabilities; equal probabilities stay together.
    """
    edges = np.quantile(probabilities_N, np.linspace(0, 1, NUM_BINS + 1)[1:-1])
    bin_N = np.searchsorted(np.unique(edges), probabilities_N, side="left")
    return np.array([
        (probabilities_N[bin_N == b].mean(), target_N[bin_N == b].mean(), np.count_nonzero(bin_N == b))
        for b in np.unique(bin_N)
    ])  # fmt: skip


def calibration_error(probabilities_N: FloatArray, target_N: FloatArray) -> float:
    """Return the mean distance between probability and frequency over the bins of `reliability`, weighted by rows."""
    mean_B, share_B, num_B = reliability(probabilities_N, target_N).T
    return float(np.average(np.abs(mean_B - share_B), weights=num_B))


def _logit(probabilities_N: FloatArray) -> FloatArray:
    return np.asarray(logit(probabilities_N.clip(_CERTAIN, 1 - _CERTAIN)))
