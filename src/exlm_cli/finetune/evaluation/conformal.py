"""Intervals of predicted values: residuals of validation rows, in units of the error that a row's signs let expect.

Axes: K seeds, N rows, C columns of values, F signs.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from exlm_cli.data import BoolArray
from exlm_cli.files import JsonModel, absent_if_none
from exlm_cli.tasks.base import FloatArray

MIN_SCALED_ROWS = 50
"""With fewer validation rows all intervals of a column are equally wide."""
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


def fit_residuals(residual_N: FloatArray, signs: ErrorSigns, index: int) -> ConformalResiduals:
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


def cover_thirds(
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
