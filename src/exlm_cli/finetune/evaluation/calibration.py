"""Calibration of a run: probabilities that agree with frequencies, and intervals of values, from its validation rows.

Axes: K seeds, N rows, C labels, classes or columns of values. Everything is fitted to the mean over the seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from exlm_cli.data import BoolArray
from exlm_cli.errors import CheckpointError, ConfigError
from exlm_cli.files import JsonModel, read_json
from exlm_cli.finetune.evaluation.conformal import (
    ConformalResiduals,
    Coverage,
    ErrorSigns,
    cover_thirds,
    error_signs,
    fit_residuals,
)
from exlm_cli.finetune.evaluation.curves import IsotonicCurve, PlattCurve, calibration_error, fit_curve
from exlm_cli.finetune.results import RunResults, read_split_outputs
from exlm_cli.finetune.scores import Predictor
from exlm_cli.run_dir import resume_command
from exlm_cli.tasks.base import FloatArray, Loss

CALIBRATION_FILE = "calibration.json"
"""Of the model; `calibration-<forest|tfidf|both>.json` are of the other predictors."""
DEFAULT_LEVEL = 0.9
"""Share of the true values that intervals should hold."""
MIN_OF_EACH = 10
"""A label with fewer rows of either answer is not calibrated: ten events per fitted number (Peduzzi et al. 1996)."""

OutputCalibration = Annotated[PlattCurve | IsotonicCurve | ConformalResiduals, Field(discriminator="method")]


class Calibration(JsonModel):
    """`calibration.json`: what was fitted on the validation rows, for each of C outputs in order. Spans have none.

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
        targets: As in `tasks.base.EncodedRows`.
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
                found[name] = cover_thirds(self.signs and self.signs.only(rows_N), index, is_inside_N, 2 * half_N)
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
            outputs.append(fit_residuals(np.abs(predicted_N - target_N), of_rows, index) if has_rows else None)
        else:
            has_enough = min(np.count_nonzero(target_N == answer) for answer in (0, 1)) >= MIN_OF_EACH
            outputs.append(fit_curve(predicted_N, target_N) if has_enough else None)
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


def _known_rows(loss: Loss, targets_NC: FloatArray, index: int) -> tuple[BoolArray, FloatArray]:
    """Return (N,) the rows where the truth of an output is known, and this truth; a class is 1 where it is right."""
    column_N = targets_NC[:, 0 if loss == "classes" else index]
    rows_N = ~np.isnan(column_N)
    target_N = column_N[rows_N]
    return rows_N, (target_N == index).astype(np.float64) if loss == "classes" else target_N
