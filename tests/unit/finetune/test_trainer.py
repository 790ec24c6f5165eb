"""Scale of regression targets: by hand, and at the limits of floating point."""

import math

import numpy as np
import pytest

from exlm_cli.tasks.metrics import target_scale


def test_the_scale_of_targets_leaves_out_what_is_missing() -> None:
    targets = np.array([[1.0, math.nan, 5.0], [3.0, math.nan, 5.0], [math.nan, math.nan, 5.0]])
    mean, std = target_scale(targets)
    assert mean.tolist() == [2, 0, 5]
    assert std.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("targets", "mean", "std"),
    [
        # equal targets have a scale of 1, whatever is lost in rounding
        ([0.1, 0.1, 0.1], 0.1, 1),
        ([1e17 / 3] * 3, 1e17 / 3, 1),
        # it neither overflows nor vanishes
        ([1e-250, 3e-250], 2e-250, 1e-250),
        ([1e99, 3e99], 2e99, 1e99),
        # targets that differ in the last digit keep their scale
        ([1.0, 1.0 + 2**-50], 1.0 + 2**-51, 2**-51),
    ],
)
def test_the_scale_at_the_limits_of_floating_point(targets: list[float], mean: float, std: float) -> None:
    found = target_scale(np.array(targets)[:, None])
    assert (found[0][0], found[1][0]) == (pytest.approx(mean, rel=1e-15), pytest.approx(std, rel=1e-15))
