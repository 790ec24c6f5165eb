"""Calibration of a run: probabilities that agree with frequencies, and intervals of values, from its validation rows.

Axes: K seeds, N rows, C labels, classes or columns of values. Everything is fitted to the mean over the seeds.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from scipy.special import expit, logit

from exlm_cli.errors import ConfigError
from exlm_cli.files import JsonModel, read_json
from exlm_cli.finetune.results import RunResults, best_cell_folder, read_logits, read_split_outputs
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import EncodedSplit, FloatArray, Loss

CALIBRATION_FILE = "calibration.json"
DEFAULT_LEVEL = 0.9
"""Share of the true values that intervals should hold."""
MIN_ISOTONIC_ROWS = 1000
"""With fewer rows isotonic regression follows their noise (scikit-learn's user guide, "Probability calibration")."""
MIN_OF_EACH = 10
"""A label with fewer rows of either answer is not calibrated: ten events per fitted number (Peduzzi et al. 1996)."""
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


class ConformalResiduals(JsonModel):
    """Distances between true and predicted values, ascending, in their unit (split conformal prediction)."""

    method: Literal["conformal"] = "conformal"
    residuals: tuple[float, ...]

    def half_width(self, level: float) -> float:
        """Return q so that `predicted - q .. predicted + q` holds a new true value with probability `level` or more.

        It is the residual of rank ceil((n + 1) * level), so the bound holds for any n, not only for many rows, if the
        new row comes from where the n validation rows come from (Lei et al. 2018, section 2.2). Infinite where n is too
        small for the level: 90 % needs 9 rows.
        """
        # rounded: 10 * 0.7 is a little more than 7 in floats; a level that rounds to 0 still has the smallest residual
        rank = max(1, math.ceil(round((len(self.residuals) + 1) * level, 9)))
        return self.residuals[rank - 1] if rank <= len(self.residuals) else math.inf


OutputCalibration = Annotated[PlattCurve | IsotonicCurve | ConformalResiduals, Field(discriminator="method")]


class Calibration(JsonModel):
    """`calibration.json`: what was fitted on the validation rows, for each of C outputs in order; of spans, for each
    of the `tasks.base.AnswerProbabilities`.

    Attributes:
        outputs: None for a label or class with under `MIN_OF_EACH` rows of either answer, or a column without values.
        test: Scores of the calibration on the test split by output, then by name as in `score_calibration`; empty
            without a test split.
    """

    outputs: tuple[OutputCalibration | None, ...]
    test: dict[str, dict[str, float | None]] = Field(default={})

    def calibrate(self, loss: Loss, probabilities_NC: FloatArray) -> FloatArray:
        """Return calibrated probabilities, (N, C), NaN in columns that have no calibration.

        Classes are calibrated one against the rest, and then divided by their sum; all columns are NaN if one is.
        """
        calibrated_NC = np.full_like(probabilities_NC, np.nan)
        for index, curve in enumerate(self.outputs):
            if isinstance(curve, PlattCurve | IsotonicCurve):
                calibrated_NC[:, index] = curve.apply(probabilities_NC[:, index])
        return calibrated_NC / calibrated_NC.sum(axis=1, keepdims=True) if loss == "classes" else calibrated_NC

    def half_widths(self, level: float) -> FloatArray:
        """Return the (C,) half-widths of intervals; NaN in columns that have none."""
        widths = (output.half_width(level) if isinstance(output, ConformalResiduals) else math.nan
                  for output in self.outputs)  # fmt: skip
        return np.array([width if math.isfinite(width) else math.nan for width in widths])


@dataclass(frozen=True)
class CalibratedRows:
    """Predictions of rows, their targets, and the calibration of the predictions.

    Attributes:
        names: C outputs.
        mean: (N, C) mean probabilities or values of the seeds.
        targets: As in `tasks.base.EncodedRows`, or of `AnswerProbabilities` for spans.
    """

    loss: Loss
    names: tuple[str, ...]
    mean: FloatArray
    targets: FloatArray
    calibration: Calibration
    level: float = DEFAULT_LEVEL

    def of_output(self, index: int) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """Return prediction, truth and, unless there is none, calibrated probability of an output, over known rows."""
        predicted_N, target_N = _columns(self.loss, self.mean, self.targets)[index]
        if self.loss == "regression":
            return predicted_N, target_N, None
        calibrated_NC = self.calibration.calibrate(self.loss, self.mean)
        calibrated_N, _ = _columns(self.loss, calibrated_NC, self.targets)[index]
        return predicted_N, target_N, None if np.isnan(calibrated_N).any() else calibrated_N

    def score(self) -> dict[str, float]:
        """Return the means of `score_calibration` but widths, each over the outputs in which it is defined."""
        scores = score_calibration(self.calibration, self.loss, self.mean, self.targets, self.level)
        by_name = {name: [of_one[name] for of_one in scores] for name in scores[0] if name != "interval_width"}
        known = {name: [value for value in values if value is not None] for name, values in by_name.items()}
        return {name: float(np.mean(values)) for name, values in known.items() if values}


def check_level(level: float, loss: Loss, run: Path) -> None:
    """Check the share of the true values that the intervals of a run should hold.

    Raises:
        ConfigError: It is not between 0 and 1, or given for a run that predicts no values.
    """
    if not 0 < level < 1:
        raise ConfigError(f"`interval_level={level:g}`: accepted: above 0 and below 1", "for example 0.9")
    if loss != "regression" and level != DEFAULT_LEVEL:
        what = f"`interval_level={level:g}` is for predicted values; {run} predicts none"
        raise ConfigError(what, "leave it out")


def fit_calibration(loss: Loss, predicted_KNC: FloatArray, targets_NC: FloatArray) -> Calibration:
    """Fit a calibration to the mean prediction of K seeds for validation rows.

    Probabilities: isotonic regression from `MIN_ISOTONIC_ROWS` rows on, Platt's method below; values: their residuals.

    Args:
        loss: `binary`, `classes` or `regression`.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
    """
    outputs: list[OutputCalibration | None] = []
    for predicted_N, target_N in _columns(loss, predicted_KNC.mean(axis=0), targets_NC):
        if loss == "regression":
            residuals = tuple(np.sort(np.abs(predicted_N - target_N)).tolist())
            outputs.append(ConformalResiduals(residuals=residuals) if residuals else None)
        else:
            has_enough = min(np.count_nonzero(target_N == answer) for answer in (0, 1)) >= MIN_OF_EACH
            outputs.append(_fit_curve(predicted_N, target_N) if has_enough else None)
    return Calibration(outputs=tuple(outputs))


def calibrate_run(run: Path, results: RunResults) -> Calibration:
    """Fit a calibration to the validation predictions of a run's seeds, and score it on the test split.

    Raises:
        CheckpointError: Predictions of the run are missing or altered.
    """
    _, valid_KNC, targets_NC = read_split_outputs(run, results, "valid")
    calibration = fit_calibration(results.loss, valid_KNC, targets_NC)
    if "test" not in results.split_sizes:
        return calibration
    _, test_KNC, targets_NC = read_split_outputs(run, results, "test")
    scores = score_calibration(calibration, results.loss, test_KNC.mean(axis=0), targets_NC)
    return calibration.model_copy(update={"test": dict(zip(results.output_names, scores, strict=True))})


def calibrate_answers(run: Path, results: RunResults, valid: EncodedSplit) -> Calibration:
    """Fit a calibration to the answers of the seeds' mean logits for the validation rows of a span task.

    It has no outputs if the task has no `answer_probabilities`.

    Raises:
        CheckpointError: Logits of the run are missing or altered.
    """
    lengths = [len(ids) for ids in valid.token_ids]
    outputs = [read_logits(best_cell_folder(run, results, seed), lengths) for seed in results.seeds]
    found = valid.answer_probabilities(outputs)
    return Calibration(outputs=()) if found is None else fit_calibration("binary", found.values[None], found.targets)


def read_scored_split(run: Path, results: RunResults) -> CalibratedRows:
    """Return the reported split of a run whose outputs are not spans, with its calibration.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    _, predicted_KNC, targets_NC = read_split_outputs(run, results, results.scored_split)
    mean_NC = predicted_KNC.mean(axis=0)
    return CalibratedRows(results.loss, results.output_names, mean_NC, targets_NC, read_calibration(run))


def read_calibration(run: Path) -> Calibration:
    """Return the calibration of a finished run.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    return read_json(run / CALIBRATION_FILE, Calibration, hint=f"`{resume_command('finetune', run)}` writes it again")


def score_calibration(
    calibration: Calibration, loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray, level: float = DEFAULT_LEVEL
) -> list[dict[str, float | None]]:
    """Return scores of each of C outputs; None where one is not defined.

    Probabilities: `brier`, their mean squared error, and `calibration_error`, the mean distance between probability and
    frequency over `NUM_BINS` bins of equally many rows (ECE); `..._calibrated` are those of calibrated probabilities.
    Values: `interval_coverage`, the share of true values in their intervals, and `interval_width`.

    Args:
        predicted_NC: Mean over the seeds.
        targets_NC: As for `fit_calibration`.
    """
    scores: list[dict[str, float | None]] = []
    if loss == "regression":
        for half, (predicted_N, target_N) in zip(
            calibration.half_widths(level), _columns(loss, predicted_NC, targets_NC), strict=True
        ):
            is_scored = len(target_N) > 0 and not math.isnan(half)
            inside = float(np.mean(np.abs(predicted_N - target_N) <= half)) if is_scored else None
            scores.append({"interval_coverage": inside, "interval_width": 2 * half if is_scored else None})
        return scores
    calibrated_NC = calibration.calibrate(loss, predicted_NC)
    for (before_N, target_N), (after_N, _) in zip(
        _columns(loss, predicted_NC, targets_NC), _columns(loss, calibrated_NC, targets_NC), strict=True
    ):
        of_output: dict[str, float | None] = {}
        for end, probabilities_N in (("", before_N), ("_calibrated", after_N)):
            is_scored = len(target_N) > 0 and not np.isnan(probabilities_N).any()
            error = calibration_error(probabilities_N, target_N) if is_scored else None
            of_output[f"brier{end}"] = float(np.mean((probabilities_N - target_N) ** 2)) if is_scored else None
            of_output[f"calibration_error{end}"] = error
        scores.append(of_output)
    return scores


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


def _columns(loss: Loss, predicted_NC: FloatArray, targets_NC: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
    """Return prediction and truth of each output over the rows where it is known; a class is 1 where it is right."""
    if loss == "classes":
        rows = ~np.isnan(targets_NC[:, 0])
        classes = targets_NC[rows, 0]
        return [(column[rows], (classes == index).astype(np.float64)) for index, column in enumerate(predicted_NC.T)]
    known = ~np.isnan(targets_NC)
    return [(predicted_NC[rows, index], targets_NC[rows, index]) for index, rows in enumerate(known.T)]


def _fit_curve(probabilities_N: FloatArray, target_N: FloatArray) -> PlattCurve | IsotonicCurve:
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


def _logit(probabilities_N: FloatArray) -> FloatArray:
    return np.asarray(logit(probabilities_N.clip(_CERTAIN, 1 - _CERTAIN)))
