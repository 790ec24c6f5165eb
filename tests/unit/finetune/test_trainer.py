"""Scale of regression targets: by hand, and at the limits of floating point."""

import math

import numpy as np
import pytest

from exlm_cli.finetune.trainer import target_scale


def test_the_scale_of_targets_leaves_out_what_is_missing() -> None:
    targets = np.array([[1.0, math.nan, 5.0], [3.0, math.nan, 5.0], [math.nan, math.nan, 5.0]])
    mean, std = target_scale(targets)
    assert mean.tolist() == [2, 0, 5]
    assert std.tolist() == [1, 1, 1]


@pytest.mark.parametrize("value", [0.1, 1e17 / 3])
def test_the_scale_of_equal_targets_is_1_whatever_is_lost_in_rounding(value: float) -> None:
    mean, std = target_scale(np.array([[value]] * 3))
    assert std.tolist() == [1]
    assert mean[0] == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("unit", [1e-250, 1.0, 1e99])
def test_the_scale_of_targets_neither_overflows_nor_vanishes(unit: float) -> None:
    mean, std = target_scale(np.array([[1.0], [3.0]]) * unit)
    assert (mean[0], std[0]) == (pytest.approx(2 * unit, rel=1e-15), pytest.approx(unit, rel=1e-15))


def test_the_scale_of_targets_that_differ_in_the_last_digit_is_kept() -> None:
    assert target_scale(np.array([[1.0], [1.0 + 2**-50]]))[1].tolist() == [2**-51]
