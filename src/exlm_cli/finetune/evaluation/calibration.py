"""Calibration of a run: probabilities that agree with frequencies, and intervals of values, from its validation rows.

Axes: K seeds, N rows, C labels, classes or columns of values. Everything is fitted to the mean over the seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from scipy.special import expit, logit

from exlm_cli.data import BoolArray
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import JsonModel, read_json
from exlm_cli.finetune.predictions import ROWS_FILE, ROWS_HINT, PartRows, join_rows, read_predictor, read_rows
from exlm_cli.finetune.results import RunResults
from exlm_cli.finetune.scores import Predictor
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import FloatArray, Loss

CALIBRATION_FILE = "calibration.json"
"""Of the model; `calibration-<baseline|both>.json` are of the other predictors."""
DEFAULT_LEVEL = 0.9
"""Share of the true values that intervals should hold."""
MIN_OF_EACH = 10
"""A label with fewer rows of either answer is not calibrated: ten events per fitted number (Peduzzi et al. 1996)."""
MIN_ISOTONIC_ROWS = 1000
"""With fewer rows isotonic regression follows their noise (scikit-learn's user guide, "Probability calibration")."""
MIN_THIRDS_ROWS = 50
"""With fewer validation rows all intervals of a column are equally wide."""
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
    """Distances between true and predicted values of validation rows, by how far these are from the training rows.

    Attributes:
        residuals: Of each group of rows, ascending: thirds of the rows, the nearest first, or one group of all.
        cuts: Distances that part the groups; a row at a cut is in the nearer one. The distance of a molecule is 1 less
            its largest Tanimoto similarity to a training molecule.
    """

    method: Literal["conformal"] = "conformal"
    residuals: tuple[
        Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Field(min_length=1)], ...
    ]
    cuts: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()

    @model_validator(mode="after")
    def _check_cuts(self) -> Self:
        if len(self.cuts) + 1 != len(self.residuals):
            raise ValueError(f"{len(self.cuts)} `cuts` do not part the groups of `residuals`")
        return self

    def half_width(self, level: float) -> float:
        """Return the half-width for all rows together; infinite where there are too few for the level."""
        return _conformal_quantile(sorted(value for of_group in self.residuals for value in of_group), level)

    def half_widths(self, level: float, distance_N: FloatArray) -> FloatArray:
        """Return (N,) half-widths of new rows; NaN where there is none.

        A row has the width of its third. Where a third has too few rows for the level, all rows count alike.
        """
        widths = np.array([_conformal_quantile(of_group, level) for of_group in self.residuals])
        if not self.cuts or np.isinf(widths).any():
            whole = self.half_width(level)
            return np.full(len(distance_N), whole if math.isfinite(whole) else math.nan)
        return np.where(np.isnan(distance_N), math.nan, widths[np.searchsorted(self.cuts, distance_N)])


def _conformal_quantile(residuals: Sequence[float], level: float) -> float:
    """Return the residual of rank ceil((n + 1) level), which a new row exceeds with probability `1 - level` or less.

    The bound holds for any n if the new row comes from where the n rows come from, and these have chosen nothing else
    (Lei et al. 2018, section 2.2; in groups, Vovk et al. 2003). Here the same validation rows have also chosen the
    epoch and what predicts, so their residuals are a little small, and the coverage of new rows may be a little below
    the level. Infinite where n is too small for the level: 90 % needs 9 rows.
    """
    # rounded: 10 * 0.7 is a little more than 7 in floats
    rank = max(1, math.ceil(round((len(residuals) + 1) * level, 9)))
    return residuals[rank - 1] if rank <= len(residuals) else math.inf


class Coverage(JsonModel):
    """How many rows are inside their intervals, of those between two similarities to the training rows.

    Attributes:
        least, most: Its ends; None of texts, where all rows are one part.
    """

    least: float | None
    most: float | None
    num_rows: int = Field(ge=1)
    num_inside: int = Field(ge=0)
    mean_width: float


OutputCalibration = Annotated[PlattCurve | IsotonicCurve | ConformalResiduals, Field(discriminator="method")]


class Calibration(JsonModel):
    """`calibration.json`: what was fitted on the validation rows, for each of C outputs in order. Spans have none.

    Attributes:
        outputs: None for a label or class with under `MIN_OF_EACH` rows of either answer, or a column without values.
        test: Scores of the calibration on the test split by output, then by name as in `score_calibration`; empty
            without a test split.
        coverage: Of values, how many of the test rows are in their intervals of `DEFAULT_LEVEL`, by output, in thirds
            of the rows, those most like the training rows first.
    """

    outputs: tuple[OutputCalibration | None, ...]
    test: dict[str, dict[str, float | None]] = Field(default={})
    coverage: dict[str, tuple[Coverage, ...]] = Field(default={})

    def calibrate(self, loss: Loss, probabilities_NC: FloatArray) -> FloatArray:
        """Return calibrated probabilities, (N, C), NaN in columns that have no calibration.

        Classes are calibrated one against the rest, and then divided by their sum; all columns are NaN if one is.
        """
        calibrated_NC = np.full_like(probabilities_NC, np.nan)
        for index, curve in enumerate(self.outputs):
            if isinstance(curve, PlattCurve | IsotonicCurve):
                calibrated_NC[:, index] = curve.apply(probabilities_NC[:, index])
        return calibrated_NC / calibrated_NC.sum(axis=1, keepdims=True) if loss == "classes" else calibrated_NC

    def half_widths(self, level: float, distance_N: FloatArray) -> FloatArray:
        """Return the (N, C) half-widths of intervals; NaN where there is none.

        Args:
            distance_N: From the training rows, as in `ConformalResiduals`; NaN where it is not known, as of texts.
        """
        unknown_N = np.full(len(distance_N), math.nan)
        return np.stack(
            [
                output.half_widths(level, distance_N) if isinstance(output, ConformalResiduals) else unknown_N
                for output in self.outputs
            ],
            axis=1,
        )

    def has_intervals(self, level: float) -> list[bool]:
        """Return which of C outputs have intervals at a level."""
        return [
            isinstance(output, ConformalResiduals) and math.isfinite(output.half_width(level))
            for output in self.outputs
        ]

    @property
    def of_one_width(self) -> list[int]:
        """Outputs whose intervals are equally wide for all rows, as there are few validation rows."""
        return [
            index
            for index, output in enumerate(self.outputs)
            if isinstance(output, ConformalResiduals) and sum(map(len, output.residuals)) < MIN_THIRDS_ROWS
        ]


@dataclass(frozen=True, kw_only=True)
class PredictedRows(PartRows):
    """Rows with what the seeds of a run predict, and the calibration of the seeds' mean.

    Attributes:
        names: C outputs.
        by_seed: (K, N, C) probabilities or values.
        level: Share of the true values that intervals should hold.
    """

    loss: Loss
    names: tuple[str, ...]
    by_seed: FloatArray
    calibration: Calibration
    level: float = DEFAULT_LEVEL

    @cached_property
    def mean(self) -> FloatArray:
        """(N, C) mean probabilities or values of the seeds."""
        return np.asarray(self.by_seed.mean(axis=0))

    @cached_property
    def calibrated(self) -> FloatArray:
        """(N, C) calibrated probabilities, as `Calibration.calibrate` returns them."""
        return self.calibration.calibrate(self.loss, self.mean)

    @cached_property
    def half_widths(self) -> FloatArray:
        """(N, C) half-widths of intervals; NaN where there is none."""
        return self.calibration.half_widths(self.level, self.distance)

    def of_output(self, index: int) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """Return prediction and truth of an output over known rows, and, unless there is none, for probabilities the
        calibrated one, for values half the width of the interval.
        """
        rows_N, target_N = known_rows(self.loss, self.targets, index)
        more = self.half_widths if self.loss == "regression" else self.calibrated
        found_N = more[rows_N, index]
        return self.mean[rows_N, index], target_N, None if np.isnan(found_N).any() else found_N

    def only(self, is_chosen_N: BoolArray) -> Self:
        """Return some of the rows."""
        return replace(super().only(is_chosen_N), by_seed=self.by_seed[:, is_chosen_N])

    def score(self) -> dict[str, float]:
        """Return the means of `score_calibration` but widths, each over the outputs in which it is defined."""
        scores = score_calibration(self)
        by_name = {name: [of_one[name] for of_one in scores] for name in scores[0] if name != "interval_width"}
        known = {name: [value for value in values if value is not None] for name, values in by_name.items()}
        return {name: float(np.mean(values)) for name, values in known.items() if values}

    def coverage(self) -> dict[str, tuple[Coverage, ...]]:
        """Return how many rows of each third are in their intervals, by output; outputs without intervals left out.

        Thirds are those of the rows here, the most similar to the training rows first; of texts all rows are one part.
        """
        found = {}
        for index, name in enumerate(self.names):
            predicted_N, target_N, half_N = self.of_output(index)
            if half_N is None or not len(target_N):
                continue
            is_inside_N, near_N, parts = np.abs(predicted_N - target_N) <= half_N, None, [np.arange(len(target_N))]
            if self.similarity is not None:
                near_N = self.similarity[known_rows(self.loss, self.targets, index)[0]]
                parts = np.array_split(np.argsort(-near_N, kind="stable"), 3)
            found[name] = tuple(
                Coverage(
                    least=None if near_N is None else float(near_N[part].min()),
                    most=None if near_N is None else float(near_N[part].max()),
                    num_rows=len(part),
                    num_inside=int(is_inside_N[part].sum()),
                    mean_width=float(2 * half_N[part].mean()),
                )
                for part in parts
                if len(part)
            )
        return found


def check_level(level: float, loss: Loss, run: Path) -> None:
    """Check the share of the true values that the intervals of a run should hold.

    Raises:
        ConfigError: It is not between 0 and 1, or given for a run that predicts no values.
    """
    if not 0 < level < 1:
        raise ConfigError(f"`--interval-level {level:g}`: accepted: above 0 and below 1", "for example 0.9")
    if loss != "regression" and level != DEFAULT_LEVEL:
        what = f"`--interval-level {level:g}` is for predicted values; {run} predicts none"
        raise ConfigError(what, "leave it out")


def fit_calibration(loss: Loss, mean_NC: FloatArray, rows: PartRows) -> Calibration:
    """Fit a calibration to the mean prediction of the seeds for validation rows.

    Probabilities: isotonic regression from `MIN_ISOTONIC_ROWS` rows on, Platt's method below; values: their residuals,
    from `MIN_THIRDS_ROWS` rows on in thirds by the distance from the training rows.

    Args:
        rows: Those of one or more splits, each as near to the training rows as its own split has them.
    """
    outputs: list[OutputCalibration | None] = []
    for index in range(mean_NC.shape[1]):
        rows_N, target_N = known_rows(loss, rows.targets, index)
        predicted_N = mean_NC[rows_N, index]
        if loss == "regression":
            residual_N, distance_N = np.abs(predicted_N - target_N), rows.distance[rows_N]
            outputs.append(_fit_residuals(residual_N, distance_N) if rows_N.any() else None)
        else:
            has_enough = min(np.count_nonzero(target_N == answer) for answer in (0, 1)) >= MIN_OF_EACH
            outputs.append(_fit_curve(predicted_N, target_N) if has_enough else None)
    return Calibration(outputs=tuple(outputs))


def _fit_residuals(residual_N: FloatArray, distance_N: FloatArray) -> ConformalResiduals:
    cuts = np.quantile(distance_N, [1 / 3, 2 / 3], method="inverted_cdf")
    group_N = np.searchsorted(cuts, distance_N)
    has_thirds = len(residual_N) >= MIN_THIRDS_ROWS and not np.isnan(distance_N).any() and len(np.unique(group_N)) == 3
    if not has_thirds:
        return ConformalResiduals(residuals=(tuple(np.sort(residual_N).tolist()),))
    groups = tuple(tuple(np.sort(residual_N[group_N == group]).tolist()) for group in range(3))
    return ConformalResiduals(residuals=groups, cuts=tuple(cuts.tolist()))


def _fit_curve(probabilities_N: FloatArray, target_N: FloatArray) -> PlattCurve | IsotonicCurve:
    """Fit the curve of one label that has both answers; bounds or smoothed targets keep it from claiming certainty."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator
    from sklearn.isotonic import IsotonicRegression

    num_rows = len(target_N)
    if num_rows >= MIN_ISOTONIC_ROWS:
        least = 1 / (num_rows + 2)
        isotonic = IsotonicRegression(y_min=least, y_max=1 - least).fit(probabilities_N, target_N)
        knots = (tuple(isotonic.X_thresholds_.tolist()), tuple(isotonic.y_thresholds_.tolist()))
        return IsotonicCurve(num_rows=num_rows, probabilities=knots[0], calibrated=knots[1])
    every = np.arange(num_rows)
    fitted = CalibratedClassifierCV(FrozenEstimator(_logit_classifier()), method="sigmoid", cv=[(every, every)])
    fitted.fit(_logit(probabilities_N)[:, None], target_N)
    (sigmoid,) = fitted.calibrated_classifiers_[0].calibrators  # Platt's: 1 / (1 + exp(a x + b))
    slope, intercept = -float(sigmoid.a_), -float(sigmoid.b_)
    if slope <= 0:  # the model orders these rows no better than chance: their frequency is all that is known
        slope, intercept = 0.0, float(logit(target_N.mean()))
    least, most = float(probabilities_N.min()), float(probabilities_N.max())
    return PlattCurve(num_rows=num_rows, least=least, most=most, slope=slope, intercept=intercept)


def _logit_classifier() -> Any:
    """Return a classifier of scikit-learn whose decision function is its only feature."""
    from sklearn.linear_model import LogisticRegression

    classifier = LogisticRegression()
    classifier.classes_, classifier.n_features_in_ = np.array([0.0, 1.0]), 1
    classifier.coef_, classifier.intercept_ = np.ones((1, 1)), np.zeros(1)
    return classifier


def calibration_file(predictor: Predictor) -> str:
    """Return the name of the file with the calibration of a predictor."""
    return CALIBRATION_FILE if predictor == "model" else f"calibration-{predictor}.json"


def read_calibration(run: Path, predictor: Predictor = "model") -> Calibration:
    """Return the calibration of what predicts in a finished run.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    hint = f"`{resume_command('finetune', run)}` writes it again"
    return read_json(run / calibration_file(predictor), Calibration, hint=hint)


def read_scored_split(run: Path, results: RunResults) -> PredictedRows:
    """Return the rows of the reported part of all splits of a run whose outputs are not spans, each row once.

    Predictions and calibration are those of what predicts new rows (`RunResults.predictor`). A row that several splits
    test is as the first of them predicts it. Test rows of further splits that the calibration was fitted to are left
    out.

    Raises:
        CheckpointError: A file is missing or altered.
    """
    loss, names, part = results.loss, results.output_names, results.scored_split
    splits = read_rows(run, loss, names)
    if not all({part, "valid"} <= splits.get(seed, {}).keys() for seed in results.split_seeds):
        raise CheckpointError(f"{run / ROWS_FILE}: it lacks rows of a split", ROWS_HINT)
    fitted = np.concatenate([splits[seed]["valid"].rows for seed in results.split_seeds])
    taken, chosen, predicted = np.zeros(0, dtype=np.int64), [], []
    for number, of_split in enumerate(results.of_splits):
        rows = splits[of_split.split_seeds[0]][part]
        is_chosen_N = ~np.isin(rows.rows, np.concatenate([taken, fitted]) if number else taken)
        by_seed_KNC = read_predictor(run, of_split, {part: rows.rows}, results.predictor)[part]
        predicted.append(by_seed_KNC[:, is_chosen_N])
        chosen.append(rows.only(is_chosen_N))
        taken = np.concatenate([taken, rows.rows])
    return PredictedRows(
        **vars(join_rows(chosen)),
        loss=loss,
        names=names,
        by_seed=np.concatenate(predicted, axis=1),
        calibration=read_calibration(run, results.predictor),
    )


def with_scores(calibration: Calibration, rows: PredictedRows) -> Calibration:
    """Return a calibration with its scores on test rows."""
    scores = dict(zip(rows.names, score_calibration(rows), strict=True))
    coverage = rows.coverage() if rows.loss == "regression" else {}
    return calibration.model_copy(update={"test": scores, "coverage": coverage})


def score_calibration(rows: PredictedRows) -> list[dict[str, float | None]]:
    """Return scores of each of C outputs; None where one is not defined.

    Probabilities: `brier`, their mean squared error, and `calibration_error`; `..._calibrated` are those of calibrated
    probabilities. Values: `interval_coverage`, the share of true values in their intervals, and `interval_width`, the
    mean width.
    """
    scores: list[dict[str, float | None]] = []
    for index in range(len(rows.names)):
        before_N, target_N, more_N = rows.of_output(index)
        of_output: dict[str, float | None] = {}
        if rows.loss == "regression":
            of_output = dict.fromkeys(("interval_coverage", "interval_width"))
            if len(target_N) and more_N is not None:
                inside = float(np.mean(np.abs(before_N - target_N) <= more_N))
                of_output = {"interval_coverage": inside, "interval_width": float(2 * more_N.mean())}
        else:
            for end, probabilities_N in (("", before_N), ("_calibrated", more_N)):
                names = (f"brier{end}", f"calibration_error{end}")
                of_output |= dict.fromkeys(names)
                if len(target_N) and probabilities_N is not None:
                    brier = float(np.mean((probabilities_N - target_N) ** 2))
                    of_output |= dict(zip(names, (brier, calibration_error(probabilities_N, target_N)), strict=True))
        scores.append(of_output)
    return scores


def calibration_error(probabilities_N: FloatArray, target_N: FloatArray) -> float:
    """Return the mean distance between probability and frequency over at most `NUM_BINS` bins, weighted by rows (ECE).

    Bins hold equally many rows in the order of their probabilities, as scikit-learn's `calibration_curve` with
    `strategy="quantile"` makes them; equal probabilities stay together.
    """
    edges = np.quantile(probabilities_N, np.linspace(0, 1, NUM_BINS + 1)[1:-1])
    off_B = np.bincount(np.searchsorted(edges, probabilities_N), probabilities_N - target_N)
    return float(np.abs(off_B).sum() / len(target_N))


def known_rows(loss: Loss, targets_NC: FloatArray, index: int) -> tuple[BoolArray, FloatArray]:
    """Return (N,) the rows where the truth of an output is known, and this truth; a class is 1 where it is right."""
    column_N = targets_NC[:, 0 if loss == "classes" else index]
    rows_N = ~np.isnan(column_N)
    target_N = column_N[rows_N]
    return rows_N, (target_N == index).astype(np.float64) if loss == "classes" else target_N


def _logit(probabilities_N: FloatArray) -> FloatArray:
    return np.asarray(logit(probabilities_N.clip(_CERTAIN, 1 - _CERTAIN)))
