"""The mean of a model's and a forest's predictions, weighted on validation rows. No torch.

Axes: N rows, C outputs.
"""

import numpy as np

from exlm_cli.tasks.base import FloatArray, Loss


def best_share(loss: Loss, model_NC: FloatArray, forest_NC: FloatArray, targets_NC: FloatArray) -> float:
    """Return the share of the model with which the mean of both has the least squared error, from 0 to 1.

    Probabilities are compared with 0 and 1 (the error is then the Brier score), values in standard deviations of their
    known targets. All known targets count the same. A half where both predict the same.

    Args:
        model_NC, forest_NC: Probabilities or values.
        targets_NC: NaN where missing; (N, 1) class index for `classes`.
    """
    truth_NC = targets_NC
    if loss == "classes":
        is_right_NC = targets_NC == np.arange(model_NC.shape[1])
        truth_NC = np.where(np.isnan(targets_NC), np.nan, is_right_NC.astype(np.float64))
    is_known_NC = ~np.isnan(truth_NC)
    scale_C = np.ones(model_NC.shape[1])
    if loss == "regression":
        known = [column[is_known] for column, is_known in zip(truth_NC.T, is_known_NC.T, strict=True)]
        scale_C = np.array([of_column.std() if len(of_column) else 0.0 for of_column in known])
        scale_C[scale_C == 0] = 1
    apart, missed = (
        (np.where(is_known_NC, wanted_NC - forest_NC, 0.0) / scale_C).ravel() for wanted_NC in (model_NC, truth_NC)
    )
    squared = float(apart @ apart)
    return 0.5 if squared == 0 else min(1.0, max(0.0, float(apart @ missed) / squared))


def blend(share: float, model: FloatArray, forest: FloatArray) -> FloatArray:
    """Return the weighted mean of predictions of the same shape."""
    return share * model + (1 - share) * forest
