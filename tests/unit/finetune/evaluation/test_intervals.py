"""Student's interval against SciPy, resampled scores against scikit-learn on the same rows."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from exlm_cli.finetune.evaluation.intervals import (
    RESAMPLED_METRICS,
    gain_range,
    mean_interval,
    percentile_interval,
    resample_scores,
)
from exlm_cli.tasks.metrics import metric_range, score_rows

NO_BOUNDS = (-math.inf, math.inf)


def test_an_interval_is_that_of_students_t_and_of_nadeau_and_bengio():
    """Two values would have 12.7 standard errors to either side, and have no interval."""
    values = [0.1, 0.4, 0.35, 0.8]
    scale = stats.sem(values)
    assert mean_interval(values, NO_BOUNDS) == pytest.approx(stats.t.interval(0.95, 3, 0.4125, scale))
    wide = mean_interval(values, NO_BOUNDS, overlap=1 / 8)
    assert wide == pytest.approx(stats.t.interval(0.95, 3, 0.4125, scale * math.sqrt((1 / 4 + 1 / 8) / (1 / 4))))
    assert mean_interval([1.0, 1.1], NO_BOUNDS) is None


def test_an_interval_is_cut_to_what_its_metric_can_be():
    assert mean_interval([0.1, 0.5, 0.9], metric_range("average_precision")) == (0, 1)
    low, high = mean_interval([0.1, 0.5, 0.9], metric_range("r2")) or (math.nan, math.nan)
    assert low < 0
    assert high == 1
    assert gain_range("roc_auc") == (-1, 1)
    assert gain_range("rmse") == NO_BOUNDS
    assert metric_range("mismatched_matthews_corrcoef") == (-1, 1)
    assert metric_range("f1_threshold") == NO_BOUNDS


Case = tuple[Any, Any, Any, Any]
"""Loss, predictions of two models, targets, and the scale of columns of values."""


def cases() -> dict[str, tuple[Case, tuple[str, ...]]]:
    """Return rows of every kind, with missing targets and predictions that tie."""
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 8, (2, 60, 3)) / 8
    labels = np.where(rng.random((60, 3)) < 0.2, math.nan, (rng.random((60, 3)) < 0.4).astype(float))
    classes = rng.integers(0, 3, (60, 1)).astype(float)
    classes[::9] = math.nan
    two = rng.integers(0, 2, (60, 1)).astype(float)
    values = np.where(rng.random((60, 3)) < 0.2, math.nan, rng.normal(size=(60, 3)))
    of_two = np.stack([1 - coarse[..., 0], coarse[..., 0]], axis=-1)
    return {
        "labels": (("binary", coarse, labels, None), ("roc_auc", "accuracy")),
        "classes": (("classes", coarse + rng.random((2, 60, 3)) / 9, classes, None), ("accuracy", "matthews_corrcoef")),
        "two classes": (("classes", of_two, two, None), ("roc_auc", "accuracy", "matthews_corrcoef")),
        "value": (("regression", coarse[..., :1], values[:, :1], None), ("rmse", "spearmanr")),
        "values": (("regression", coarse, values, np.array([1.0, 2.0, 0.5])), ("standardised_rmse",)),
    }


@pytest.mark.parametrize("name", cases())
def test_a_resample_scores_what_its_rows_score(monkeypatch, name):
    """By way of scikit-learn; both models have the same rows."""
    (loss, predicted, targets, scale), names = cases()[name]
    drawn: list[Any] = []

    def draw(data: Any, statistic: Any, **_: Any) -> Any:
        (rows,) = data
        drawn.append(np.random.default_rng(0).choice(rows, (4, len(rows))))
        return SimpleNamespace(bootstrap_distribution=statistic(drawn[-1], axis=-1))

    monkeypatch.setattr(stats, "bootstrap", draw)
    for metric in names:
        values = resample_scores(metric, loss, predicted, targets, scale)
        assert values.shape == (2, 4)
        for index, chosen in enumerate(drawn[-1]):
            for model, of_model in enumerate(predicted):
                wanted = score_rows(loss, of_model[chosen], targets[chosen], scale)[metric]
                assert values[model, index] == pytest.approx(wanted, rel=1e-12)
    assert {metric for _, names in cases().values() for metric in names} == {*RESAMPLED_METRICS}


@pytest.mark.parametrize("num_rare", [1, 3])
def test_a_rare_class_keeps_its_rows_in_every_resample(num_rare):
    """So that every resample has an area; of a class with one row this row is in each of them."""
    targets = (np.arange(100) < num_rare).astype(float)[:, None]
    values = resample_scores("roc_auc", "binary", [np.linspace(0, 1, 100)[:, None]], targets)
    assert np.isfinite(values).all()
    assert values.max() < 0.1


def test_the_rows_of_two_splits_are_drawn_independently():
    """The mean of two accuracies of seven rows each, two of them right, is that of fourteen rows with four right."""
    case: Any = ("accuracy", "binary", [np.ones((7, 1))], (np.arange(7) < 2).astype(float)[:, None])
    found = percentile_interval(sum(resample_scores(*case, seed=split)[0] for split in (0, 1)) / 2)
    assert found == tuple(stats.binom.ppf([0.025, 0.975], 14, 2 / 7) / 14)


def test_scores_that_are_never_defined_have_no_interval():
    one_class = ("binary", [np.ones((20, 1))], np.ones((20, 1)))
    assert percentile_interval(resample_scores("roc_auc", *one_class)[0]) is None
    unknown = np.full((20, 1), math.nan)
    assert np.isnan(resample_scores("roc_auc", "binary", [np.ones((20, 1))], unknown)).all()
    one_row = np.concatenate([np.ones((1, 1)), unknown])
    assert np.isnan(resample_scores("accuracy", "binary", [np.ones((21, 1))], one_row)).all()


def test_correlations_of_a_model_that_says_the_same_of_every_row():
    """As scikit-learn and SciPy: Matthews' is 0, also where the class that it says is in no row; Spearman's is none."""
    said = np.zeros((30, 4))
    said[:, 3] = 1
    found = resample_scores("matthews_corrcoef", "classes", [said], np.arange(30)[:, None] % 3.0)
    assert set(found[0]) == {0}
    same = ("regression", [np.ones((30, 1))], np.arange(30.0)[:, None])
    assert np.isnan(resample_scores("spearmanr", *same)).all()
