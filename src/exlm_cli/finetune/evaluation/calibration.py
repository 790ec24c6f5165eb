"""Calibration of a run: probabilities that agree with frequencies, and intervals of values, from its validation rows.

Axes: K seeds, N rows, C labels, classes or columns of values. Everything is fitted to the mean over the seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator
from scipy.special import expit, logit

from exlm_cli.data import BoolArray
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import JsonModel, absent_if_none, read_json
from exlm_cli.finetune.results import RunResults, best_cell_folder, read_logits, read_split_outputs
from exlm_cli.finetune.scores import Predictor
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import EncodedSplit, FloatArray, Loss

CALIBRATION_FILE = "calibration.json"
"""Of the model; `calibration-<forest|tfidf|both>.json` are of the other predictors."""
DEFAULT_LEVEL = 0.9
"""Share of the true values that intervals should hold."""
MIN_ISOTONIC_ROWS = 1000
"""With fewer rows isotonic regression follows their noise (scikit-learn's user guide, "Probability calibration")."""
MIN_OF_EACH = 10
"""A label with fewer rows of either answer is not calibrated: ten events per fitted number (Peduzzi et al. 1996)."""
MIN_SCALED_ROWS = 50
"""With fewer validation rows all intervals of a column are equally wide."""
NUM_BINS = 10
NUM_THIRDS = 3
"""Parts of the test rows, by their likeness to the training rows, in which coverage is counted."""
_NUM_FOLDS = 10
"""A validation row's expected error is that of a scale fitted without its fold, so residuals are those of new rows."""
_LEAST_SHARE = 0.1
"""Least expected error, as a share of the mean one: nothing is certain, not even for a training molecule."""
_WINDOW = 0.5
"""Half the width of the window of places, of which all validation rows fill 0 to 1."""
_MIN_NEAR = 50
"""The window is wider where there are few rows: so many, and at both ends half as many, count in it."""
_NUM_PLACES = 21
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


class ErrorScale(JsonModel):
    """Expected error of a row, `constant + per_distance * distance + per_spread * spread`.

    The distance of a molecule is 1 less its largest Tanimoto similarity to a training molecule; the spread is the
    standard deviation over the seeds.

    Attributes:
        neighbours_by: What makes a validation row count for a new row: to be as far from the training rows, or, where
            no distance is known, to have as wide a spread.
        rows: This distance or spread of each validation row, in the order of `ConformalResiduals.residuals`.
    """

    constant: float = Field(gt=0, allow_inf_nan=False)
    per_distance: float = Field(ge=0, allow_inf_nan=False)
    per_spread: float = Field(ge=0, allow_inf_nan=False)
    neighbours_by: Literal["distance", "spread"]
    rows: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]

    def apply(self, distance_N: FloatArray, spread_N: FloatArray) -> FloatArray:
        """Return the (N,) expected errors; NaN where a sign that the scale needs is not known."""
        terms = ((self.per_distance, distance_N), (self.per_spread, spread_N))
        return self.constant + sum((weight * sign_N for weight, sign_N in terms if weight), np.zeros(len(spread_N)))

    def places(self, distance_N: FloatArray, spread_N: FloatArray) -> FloatArray:
        """Return (N,) the share of validation rows that are nearer, or have less spread; equal ones count half."""
        sign_N, known = distance_N if self.neighbours_by == "distance" else spread_N, np.sort(self.rows)
        below_N, upto_N = (np.searchsorted(known, sign_N, side) for side in ("left", "right"))
        return np.where(np.isnan(sign_N), np.nan, (below_N + upto_N) / (2 * len(known)))


class ConformalResiduals(JsonModel):
    """Distances between true and predicted values, ascending, in their unit or that of `scale` (conformal prediction).

    Attributes:
        scale: Each residual is divided by the expected error of its row; None: intervals are equally wide for all rows.
    """

    method: Literal["conformal"] = "conformal"
    residuals: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = Field(min_length=1)
    scale: ErrorScale | None = absent_if_none()

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if list(self.residuals) != sorted(self.residuals):
            raise ValueError("`residuals` do not ascend")
        if self.scale is not None and len(self.scale.rows) != len(self.residuals):
            raise ValueError(f"`scale.rows` has {len(self.scale.rows)} values for {len(self.residuals)} residuals")
        return self

    def half_width(self, level: float) -> float:
        """Return the residual q that a new row exceeds with probability `1 - level` or less.

        It is that of rank ceil((n + 1) * level), so the bound holds for any n, not only for many rows, if the new row
        comes from where the n validation rows come from (Lei et al. 2018, section 2.2). Infinite where n is too small
        for the level: 90 % needs 9 rows.
        """
        return self._quantile(np.ones(len(self.residuals)), level)

    def half_widths(self, level: float, signs: "ErrorSigns", index: int) -> FloatArray:
        """Return (N,) such half-widths of new rows, in the unit of the values; NaN where there is none.

        With a scale, the residuals of validation rows like the new row count most: by a triangular window over their
        places, half as wide as all of them (Guan 2023, "Localized conformal prediction"). Where these are too few for
        the level, all count alike.

        Args:
            index: Column of the values.
        """
        whole, spread_N = self.half_width(level), signs.spread[:, index]
        if self.scale is None or math.isinf(whole):
            return np.full(len(spread_N), whole if math.isfinite(whole) else math.nan)
        place_n = self.scale.places(np.array(self.scale.rows), np.array(self.scale.rows))
        width, grid = max(_WINDOW, _MIN_NEAR / len(place_n)), np.linspace(0, 1, _NUM_PLACES)
        weights = (1 - np.abs(place_n - place) / width for place in grid)
        near = np.array([self._quantile(weight_n.clip(min=0), level) for weight_n in weights])
        near[np.isinf(near)] = whole
        distance_N = 1 - signs.similarity
        place_N = self.scale.places(distance_N, spread_N)
        return np.asarray(np.interp(place_N, grid, near) * self.scale.apply(distance_N, spread_N))

    def _quantile(self, weight_n: FloatArray, level: float) -> float:
        """Return the least residual up to which the weights make `level` of all; the new row's own weight, 1, lies
        beyond the largest residual, and is what makes the bound hold.
        """
        # rounded: 10 * 0.7 is a little more than 7 in floats
        rank = np.searchsorted(np.round(weight_n.cumsum(), 9), round((weight_n.sum() + 1) * level, 9))
        return self.residuals[rank] if rank < len(self.residuals) else math.inf


@dataclass(frozen=True)
class ErrorSigns:
    """What makes a large error of a row likely: it is unlike the training rows, or the seeds disagree.

    Attributes:
        similarity: (N,) largest Tanimoto similarity to a training molecule; NaN for texts.
        spread: (N, C) standard deviation over the seeds; NaN for one seed.
    """

    similarity: FloatArray
    spread: FloatArray

    def only(self, is_chosen_N: BoolArray) -> "ErrorSigns":
        """Return those of some rows."""
        return ErrorSigns(self.similarity[is_chosen_N], self.spread[is_chosen_N])


def error_signs(predicted_KNC: FloatArray, similarity_N: FloatArray | None, num_splits: int = 1) -> ErrorSigns:
    """Return the signs of N rows that K seeds predict; no similarity for texts.

    Of the seeds of several splits, one split after the other, the spread is the mean of those of each split, as that of
    the validation rows is.
    """
    num_models, num_rows, _ = predicted_KNC.shape
    by_split_SKNC = predicted_KNC.reshape(num_splits, num_models // num_splits, *predicted_KNC.shape[1:])
    unknown = np.full(predicted_KNC.shape[1:], math.nan)
    has_spread = by_split_SKNC.shape[1] > 1
    spread_NC = by_split_SKNC.std(axis=1, ddof=1).mean(axis=0) if has_spread else unknown
    return ErrorSigns(np.full(num_rows, math.nan) if similarity_N is None else similarity_N, spread_NC)


OutputCalibration = Annotated[PlattCurve | IsotonicCurve | ConformalResiduals, Field(discriminator="method")]


class Coverage(JsonModel):
    """How many rows are inside their intervals, of those between two values of a sign (`ErrorSigns`).

    Attributes:
        by: The sign; `rows` where there is none.
        least, most: Its ends; both 0 for `rows`.
    """

    by: Literal["similarity", "spread", "rows"]
    least: float
    most: float
    num_rows: int = Field(ge=1)
    num_inside: int = Field(ge=0)
    mean_width: float


class Calibration(JsonModel):
    """`calibration.json`: what was fitted on the validation rows, for each of C outputs in order; of spans, for each
    of the `tasks.base.AnswerProbabilities`.

    Attributes:
        outputs: None for a label or class with under `MIN_OF_EACH` rows of either answer, or a column without values.
        test: Scores of the calibration on the test split by output, then by name as in `score_calibration`; empty
            without a test split.
        coverage: Of values, how many of the test rows are in their intervals of `DEFAULT_LEVEL`, by output, in thirds
            of the rows, those most like the training rows first.
        similarity: Of values of molecules, largest Tanimoto similarity of each row of a split to a training molecule.
    """

    outputs: tuple[OutputCalibration | None, ...]
    test: dict[str, dict[str, float | None]] = Field(default={})
    coverage: dict[str, tuple[Coverage, ...]] = Field(default={})
    similarity: dict[str, tuple[Annotated[float, Field(ge=0, le=1)], ...]] = Field(default={})

    def calibrate(self, loss: Loss, probabilities_NC: FloatArray) -> FloatArray:
        """Return calibrated probabilities, (N, C), NaN in columns that have no calibration.

        Classes are calibrated one against the rest, and then divided by their sum; all columns are NaN if one is.
        """
        calibrated_NC = np.full_like(probabilities_NC, np.nan)
        for index, curve in enumerate(self.outputs):
            if isinstance(curve, PlattCurve | IsotonicCurve):
                calibrated_NC[:, index] = curve.apply(probabilities_NC[:, index])
        return calibrated_NC / calibrated_NC.sum(axis=1, keepdims=True) if loss == "classes" else calibrated_NC

    def half_widths(self, level: float, signs: ErrorSigns) -> FloatArray:
        """Return the (N, C) half-widths of intervals; NaN where there is none."""
        of_outputs = [
            output.half_widths(level, signs, index)
            if isinstance(output, ConformalResiduals)
            else np.full(len(signs.spread), math.nan)
            for index, output in enumerate(self.outputs)
        ]
        return np.stack(of_outputs, axis=1)

    def similarity_of(self, split: str, num_rows: int) -> FloatArray | None:
        """Return the similarity of the N rows of a split; None where it is not known.

        Raises:
            CheckpointError: It is that of another number of rows.
        """
        found = self.similarity.get(split)
        if found is not None and len(found) != num_rows:
            what = f"{CALIBRATION_FILE}: {len(found)} similarities for the {num_rows} rows of `{split}`"
            raise CheckpointError(what, "the run and its calibration do not belong together")
        return None if found is None else np.array(found)

    def has_intervals(self, level: float) -> list[bool]:
        """Return which of C outputs have intervals at a level."""
        return [
            isinstance(output, ConformalResiduals) and math.isfinite(output.half_width(level))
            for output in self.outputs
        ]


@dataclass(frozen=True)
class CalibratedRows:
    """Predictions of rows, their targets, and the calibration of the predictions.

    Attributes:
        names: C outputs.
        mean: (N, C) mean probabilities or values of the seeds.
        targets: As in `tasks.base.EncodedRows`, or of `AnswerProbabilities` for spans.
        signs: For values; None: nothing is known.
    """

    loss: Loss
    names: tuple[str, ...]
    mean: FloatArray
    targets: FloatArray
    calibration: Calibration
    level: float = DEFAULT_LEVEL
    signs: ErrorSigns | None = None

    @cached_property
    def calibrated(self) -> FloatArray:
        """(N, C) calibrated probabilities, as `Calibration.calibrate` returns them."""
        return self.calibration.calibrate(self.loss, self.mean)

    @cached_property
    def half_widths(self) -> FloatArray:
        """(N, C) half-widths of intervals; NaN where there is none."""
        unknown = ErrorSigns(np.full(len(self.mean), math.nan), np.full_like(self.mean, math.nan))
        return self.calibration.half_widths(self.level, self.signs or unknown)

    def of_output(self, index: int) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """Return prediction and truth of an output over known rows, and, unless there is none, for probabilities the
        calibrated one, for values half the width of the interval.
        """
        rows_N, target_N = _known_rows(self.loss, self.targets, index)
        more = self.half_widths if self.loss == "regression" else self.calibrated
        found_N = more[rows_N, index]
        return self.mean[rows_N, index], target_N, None if np.isnan(found_N).any() else found_N

    def only(self, is_chosen_N: BoolArray) -> "CalibratedRows":
        """Return some of the rows."""
        signs = self.signs and self.signs.only(is_chosen_N)
        return replace(self, mean=self.mean[is_chosen_N], targets=self.targets[is_chosen_N], signs=signs)

    def score(self) -> dict[str, float]:
        """Return the means of `score_calibration` but widths, each over the outputs in which it is defined."""
        scores = score_calibration(self)
        by_name = {name: [of_one[name] for of_one in scores] for name in scores[0] if name != "interval_width"}
        known = {name: [value for value in values if value is not None] for name, values in by_name.items()}
        return {name: float(np.mean(values)) for name, values in known.items() if values}

    def coverage(self) -> dict[str, tuple[Coverage, ...]]:
        """Return how many rows of each third are in their intervals, by output; outputs without intervals left out."""
        found = {}
        for index, name in enumerate(self.names):
            predicted_N, target_N, half_N = self.of_output(index)
            if half_N is not None and len(target_N):
                rows_N, _ = _known_rows(self.loss, self.targets, index)
                is_inside_N = np.abs(predicted_N - target_N) <= half_N
                found[name] = _cover_thirds(self.signs and self.signs.only(rows_N), index, is_inside_N, 2 * half_N)
        return found


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


def fit_calibration(
    loss: Loss, predicted_KNC: FloatArray, targets_NC: FloatArray, similarity_N: FloatArray | None = None
) -> Calibration:
    """Fit a calibration to the mean prediction of K seeds for validation rows.

    Probabilities: isotonic regression from `MIN_ISOTONIC_ROWS` rows on, Platt's method below; values: their residuals,
    from `MIN_SCALED_ROWS` rows on in units of the expected error.

    Args:
        loss: `binary`, `classes` or `regression`.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
        similarity_N: For values of molecules, as in `ErrorSigns`.
    """
    outputs: list[OutputCalibration | None] = []
    mean_NC, signs = predicted_KNC.mean(axis=0), error_signs(predicted_KNC, similarity_N)
    for index in range(mean_NC.shape[1]):
        rows_N, target_N = _known_rows(loss, targets_NC, index)
        predicted_N = mean_NC[rows_N, index]
        if loss == "regression":
            has_rows, of_rows = len(target_N) > 0, signs.only(rows_N)
            outputs.append(_fit_residuals(np.abs(predicted_N - target_N), of_rows, index) if has_rows else None)
        else:
            has_enough = min(np.count_nonzero(target_N == answer) for answer in (0, 1)) >= MIN_OF_EACH
            outputs.append(_fit_curve(predicted_N, target_N) if has_enough else None)
    return Calibration(outputs=tuple(outputs))


class ValidatedRows(NamedTuple):
    """Validation rows of one split.

    Attributes:
        predicted: (K, N, C) by the seeds.
        targets: NaN where missing; (N, 1) class index for `classes`.
        similarity: (N,) as in `ErrorSigns`; None for texts and probabilities.
    """

    predicted: FloatArray
    targets: FloatArray
    similarity: FloatArray | None


def calibration_file(predictor: Predictor) -> str:
    """Return the name of the file with the calibration of a predictor."""
    return CALIBRATION_FILE if predictor == "model" else f"calibration-{predictor}.json"


def calibrate_run(
    run: Path,
    results: RunResults,
    similarity: Mapping[str, FloatArray] | None = None,
    *,
    baseline: str | None = None,
    more: Sequence[ValidatedRows] = (),
) -> Calibration:
    """Fit a calibration to the validation predictions of a run's seeds, and score it on the first split's test rows.

    Args:
        baseline: Whose predictions; None: the model's.
        more: Validation rows of further splits, as the models of these predict them.
        similarity: For values of molecules, that of the rows of each split, as in `ErrorSigns`.

    Raises:
        CheckpointError: Predictions of the run are missing or altered.
    """
    similarity = similarity or {}
    _, valid_KNC, targets_NC = read_split_outputs(run, results, "valid", baseline=baseline)
    every = [ValidatedRows(valid_KNC, targets_NC, similarity.get("valid")), *more]
    near = [rows.similarity for rows in every if rows.similarity is not None]
    calibration = fit_calibration(
        results.loss,
        np.concatenate([rows.predicted for rows in every], axis=1),
        np.concatenate([rows.targets for rows in every]),
        np.concatenate(near) if near else None,
    )
    kept = {split: tuple(values.tolist()) for split, values in similarity.items()}
    calibration = calibration.model_copy(update={"similarity": kept})
    if "test" not in results.split_sizes:
        return calibration
    rows = _read_calibrated(run, results, "test", calibration, baseline)
    scores = dict(zip(results.output_names, score_calibration(rows), strict=True))
    coverage = rows.coverage() if results.loss == "regression" else {}
    return calibration.model_copy(update={"test": scores, "coverage": coverage})


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
    return _read_calibrated(run, results, results.scored_split, read_calibration(run))


def _read_calibrated(
    run: Path, results: RunResults, split: str, calibration: Calibration, baseline: str | None = None
) -> CalibratedRows:
    _, predicted_KNC, targets_NC = read_split_outputs(run, results, split, baseline=baseline)
    signs = error_signs(predicted_KNC, calibration.similarity_of(split, len(targets_NC)))
    names, mean_NC = results.output_names, predicted_KNC.mean(axis=0)
    return CalibratedRows(results.loss, names, mean_NC, targets_NC, calibration, signs=signs)


def read_calibration(run: Path, predictor: Predictor = "model") -> Calibration:
    """Return the calibration of what predicts in a finished run.

    Raises:
        CheckpointError: The file is missing or altered.
    """
    hint = f"`{resume_command('finetune', run)}` writes it again"
    return read_json(run / calibration_file(predictor), Calibration, hint=hint)


def score_calibration(rows: CalibratedRows) -> list[dict[str, float | None]]:
    """Return scores of each of C outputs; None where one is not defined.

    Probabilities: `brier`, their mean squared error, and `calibration_error`, the mean distance between probability and
    frequency over `NUM_BINS` bins of equally many rows (ECE); `..._calibrated` are those of calibrated probabilities.
    Values: `interval_coverage`, the share of true values in their intervals, and `interval_width`, the mean width.
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
                if len(target_N) and probabilities_N is not None and not np.isnan(probabilities_N).any():
                    brier = float(np.mean((probabilities_N - target_N) ** 2))
                    of_output |= dict(zip(names, (brier, calibration_error(probabilities_N, target_N)), strict=True))
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


def _known_rows(loss: Loss, targets_NC: FloatArray, index: int) -> tuple[BoolArray, FloatArray]:
    """Return (N,) the rows where the truth of an output is known, and this truth; a class is 1 where it is right."""
    column_N = targets_NC[:, 0 if loss == "classes" else index]
    rows_N = ~np.isnan(column_N)
    target_N = column_N[rows_N]
    return rows_N, (target_N == index).astype(np.float64) if loss == "classes" else target_N


def _fit_residuals(residual_N: FloatArray, signs: ErrorSigns, index: int) -> ConformalResiduals:
    """Fit the intervals of a column of values to one or more rows."""
    order = np.argsort(residual_N, kind="stable")
    plain = ConformalResiduals(residuals=tuple(residual_N[order].tolist()))
    found = {"distance": 1 - signs.similarity, "spread": signs.spread[:, index]}
    known = {name: sign_N for name, sign_N in found.items() if not np.isnan(sign_N).any() and sign_N.any()}
    if len(residual_N) < MIN_SCALED_ROWS or not known or not residual_N.any():
        return plain
    sign_NF = np.stack(list(known.values()), axis=1)
    fold_N = np.random.default_rng(0).permutation(len(residual_N)) % _NUM_FOLDS
    expected_N = np.empty_like(residual_N)
    for fold in range(_NUM_FOLDS):
        constant, weight_F = _fit_scale(residual_N[fold_N != fold], sign_NF[fold_N != fold])
        expected_N[fold_N == fold] = constant + sign_NF[fold_N == fold] @ weight_F
    constant, weight_F = _fit_scale(residual_N, sign_NF)
    weights = dict(zip(known, weight_F.tolist(), strict=True))
    neighbours_by: Literal["distance", "spread"] = "distance" if "distance" in known else "spread"
    scaled_N = residual_N / expected_N
    order = np.argsort(scaled_N, kind="stable")
    scale = ErrorScale(
        constant=constant,
        per_distance=weights.get("distance", 0.0),
        per_spread=weights.get("spread", 0.0),
        neighbours_by=neighbours_by,
        rows=tuple(known[neighbours_by][order].tolist()),
    )
    return ConformalResiduals(residuals=tuple(scaled_N[order].tolist()), scale=scale)


def _fit_scale(residual_N: FloatArray, sign_NF: FloatArray) -> tuple[float, FloatArray]:
    """Return the constant and the (F,) weights of signs, none negative, that are nearest to the residuals."""
    from scipy.optimize import nnls

    least, unit_F = _LEAST_SHARE * residual_N.mean(), sign_NF.mean(axis=0)
    unit_F = np.where(unit_F > 0, unit_F, 1)
    found, _ = nnls(np.column_stack([np.ones_like(residual_N), sign_NF / unit_F]), residual_N - least)
    return float(least + found[0]), found[1:] / unit_F


def _cover_thirds(
    signs: ErrorSigns | None, index: int, is_inside_N: BoolArray, width_N: FloatArray
) -> tuple[Coverage, ...]:
    """Count the rows inside their intervals in thirds, those most like the training rows first."""
    by: Literal["similarity", "spread", "rows"] = "rows"
    sign_N = np.zeros(len(width_N))
    if signs is not None and not np.isnan(signs.similarity).any():
        by, sign_N = "similarity", signs.similarity
    elif signs is not None and not np.isnan(signs.spread[:, index]).any():
        by, sign_N = "spread", signs.spread[:, index]
    order = np.argsort(-sign_N if by == "similarity" else sign_N, kind="stable")
    parts = [order] if by == "rows" else [part for part in np.array_split(order, NUM_THIRDS) if len(part)]
    return tuple(
        Coverage(
            by=by,
            least=float(sign_N[part].min()),
            most=float(sign_N[part].max()),
            num_rows=len(part),
            num_inside=int(is_inside_N[part].sum()),
            mean_width=float(width_N[part].mean()),
        )
        for part in parts
    )


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
