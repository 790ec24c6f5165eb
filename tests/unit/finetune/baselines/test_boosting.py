"""Boosted trees as arrays predict what scikit-learn's do, for values, labels and classes, known or not."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from exlm_cli.finetune.baselines.boosting import SETTINGS, grow_boosting
from exlm_cli.finetune.baselines.forests import TrainingRows
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import Loss
from exlm_cli.tasks.metrics import to_probabilities
from exlm_cli.tasks.rows.task import LabelledRows, RowTask
from tests.unit.finetune.synthetic import grow_little

RNG = np.random.default_rng(1)
ROWS = RNG.lognormal(sigma=2, size=(150, 7)).astype(np.float32)
ROWS[:, 3] = ROWS[:, 3] > 1  # a bit
ROWS[:, 5] = np.arange(150) < 3  # which parts too few rows for any leaf
NEW = RNG.lognormal(sigma=2, size=(400, 7)).astype(np.float32)
VALUE = np.log(ROWS[:, 0]) + ROWS[:, 3] + RNG.normal(size=150)
CLASSES = np.digitize(VALUE, [0, 1]).astype(float)


def scores(loss: Loss, targets: Any, names: int, class_weights: Any = None) -> Any:
    """Return (N, L) what the arrays give for new rows."""
    task = RowTask("csv", loss, tuple(map(str, range(names))), {"train": LabelledRows([], targets, np.arange(150))})
    task.class_weights = class_weights
    fill = np.zeros(7, dtype=np.float32)
    with pytest.MonkeyPatch.context() as patch:
        grow_little(patch, num_rounds=20)
        found = grow_boosting("", TrainingRows(task, ROWS, fill, 3, SilentProgress(), 1))
    return found.predict(NEW)[:, :, 0]


def fitted(kind: Any, targets: Any, weights: Any = None) -> Any:
    """Return what scikit-learn learns of the features that can part five rows from the others."""
    booster = kind(max_iter=20, early_stopping=False, random_state=3, **SETTINGS)
    return booster.fit(np.delete(ROWS, 5, axis=1), targets, sample_weight=weights)


def test_values_are_those_of_scikit_learn():
    found = scores("regression", np.stack([VALUE, np.full(150, 7.0), np.full(150, math.nan)], axis=1), 3)
    wanted = fitted(HistGradientBoostingRegressor, VALUE).predict(np.delete(NEW, 5, axis=1))
    np.testing.assert_allclose(found[:, 0], wanted, rtol=1e-12)
    assert np.ptp(wanted) > 1
    np.testing.assert_allclose(found[:, 1:], [[7.0, 0.0]] * 400, rtol=1e-12)


def test_probabilities_of_labels_are_those_of_scikit_learn_with_the_weights_of_the_loss():
    """Of labels that are always or never 1, and of one that is not known."""
    label = (VALUE > 0).astype(float)
    label[::7] = math.nan
    targets = np.stack([label, np.ones(150), np.zeros(150), np.full(150, math.nan)], axis=1)
    found = to_probabilities("binary", scores("binary", targets, 4, np.array([3.0, 1, 1, 1])))
    known = ~np.isnan(label)
    booster = HistGradientBoostingClassifier(max_iter=20, early_stopping=False, random_state=3, **SETTINGS)
    booster.fit(np.delete(ROWS, 5, axis=1)[known], label[known], sample_weight=np.where(label[known] == 1, 3.0, 1.0))
    np.testing.assert_allclose(found[:, 0], booster.predict_proba(np.delete(NEW, 5, axis=1))[:, 1], rtol=1e-12)
    np.testing.assert_allclose(found[:, 1:], [[1.0, 0.0, 0.5]] * 400, atol=1e-11)


@pytest.mark.parametrize("known", [(0, 2, 3), (1, 4)])
def test_classes_have_the_probabilities_of_scikit_learn_and_those_of_no_training_row_none(known):
    targets = np.array(known, dtype=float)[np.minimum(CLASSES, len(known) - 1).astype(int)]
    found = softmax(scores("classes", targets[:, None], 5), axis=1)
    wanted = fitted(HistGradientBoostingClassifier, targets).predict_proba(np.delete(NEW, 5, axis=1))
    np.testing.assert_allclose(found[:, known], wanted, rtol=1e-9)
    assert np.delete(found, known, axis=1).max() < 1e-9
