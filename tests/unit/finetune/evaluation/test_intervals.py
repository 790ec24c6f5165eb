"""Student's interval against SciPy, resampled scores against scikit-learn on the very rows that were drawn."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from exlm_cli.finetune.evaluation import intervals
from exlm_cli.finetune.evaluation.intervals import (
    RESAMPLED_METRICS,
    ScoredRows,
    gain_range,
    mean_interval,
    percentile_interval,
    resample_scores,
)
from exlm_cli.tasks.metrics import metric_range, score_rows

NO_BOUNDS = (-math.inf, math.inf)


def test_an_interval_is_that_of_students_t_and_of_nadeau_and_bengio():
    """Two values have one degree of freedom, whose 0.975 quantile is tan(0.475 pi); scipy has the same interval."""
    low, high = mean_interval([[1.0], [3.0]], NO_BOUNDS) or (math.nan, math.nan)
    assert (high - low) / 2 == pytest.approx(math.tan(0.475 * math.pi) * math.sqrt(2) * math.sqrt(1 / 2))
    values = [0.1, 0.4, 0.35, 0.8]
    scale = stats.sem(values)
    assert mean_interval([[v] for v in values], NO_BOUNDS) == pytest.approx(stats.t.interval(0.95, 3, 0.4125, scale))
    wide = mean_interval([[v, v] for v in values], NO_BOUNDS, overlap=1 / 8)
    assert wide == pytest.approx(stats.t.interval(0.95, 3, 0.4125, scale * math.sqrt((1 / 4 + 1 / 8) / (1 / 4))))
    assert mean_interval([[1.0, 2.0]], NO_BOUNDS) is None


def test_an_interval_is_cut_to_what_its_metric_can_be():
    assert mean_interval([[0.1], [0.9]], metric_range("average_precision")) == (0, 1)
    low, high = mean_interval([[0.1], [0.9]], metric_range("r2")) or (math.nan, math.nan)
    assert low < 0
    assert high == 1
    assert gain_range("roc_auc") == (-1, 1)
    assert gain_range("rmse") == NO_BOUNDS
    assert metric_range("mismatched_matthews_corrcoef") == (-1, 1)
    assert metric_range("f1_threshold") == NO_BOUNDS


def cases() -> dict[str, tuple[ScoredRows, tuple[str, ...]]]:
    """Return rows of every kind, with missing targets and predictions that tie."""
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 8, (2, 60, 3)) / 8
    labels = np.where(rng.random((60, 3)) < 0.2, math.nan, (rng.random((60, 3)) < 0.4).astype(float))
    classes = rng.integers(0, 3, (60, 1)).astype(float)
    two = rng.integers(0, 2, (60, 1)).astype(float)
    values = np.where(rng.random((60, 3)) < 0.2, math.nan, rng.normal(size=(60, 3)))
    of_two = np.stack([1 - coarse[..., 0], coarse[..., 0]], axis=-1)
    return {
        "labels": (ScoredRows("binary", list(coarse), labels), ("roc_auc", "accuracy")),
        "classes": (ScoredRows("classes", list(coarse + rng.random((2, 60, 3)) / 9), classes),
                    ("accuracy", "matthews_corrcoef")),
        "two classes": (ScoredRows("classes", list(of_two), two), ("roc_auc", "accuracy", "matthews_corrcoef")),
        "value": (ScoredRows("regression", list(coarse[..., :1]), values[:, :1]), ("rmse", "spearmanr")),
        "values": (
            ScoredRows("regression", list(coarse), values, np.array([1.0, 2.0, 0.5])), ("standardised_rmse",),
        ),
    }  # fmt: skip


def drawn_rows(monkeypatch: pytest.MonkeyPatch, rows: ScoredRows, metric: str, num: int) -> tuple[Any, Any]:
    """Return the scores, and how often each resample has each row."""
    drawn: list[Any] = []
    statistic = intervals._statistic

    def spy(*given: Any) -> Any:
        score = statistic(*given)
        return lambda counts: drawn.append(counts.astype(int)) or score(counts)

    with monkeypatch.context() as patch:
        patch.setattr(intervals, "_statistic", spy)
        patch.setattr(intervals, "_CELLS", 7 * len(rows.targets))
        values = resample_scores(metric, rows, num_resamples=num)
    return values, np.concatenate(drawn[:: len(rows.predictions)])


@pytest.mark.parametrize("name", cases())
def test_a_resample_scores_what_its_rows_score(monkeypatch, name):
    """The same rows, repeated as often as they were drawn, by way of scikit-learn."""
    rows, names = cases()[name]
    for metric in names:
        values, counts = drawn_rows(monkeypatch, rows, metric, 20)
        assert values.shape == (2, 20)
        assert (counts.sum(axis=1) == 60).all()
        for index, of_resample in enumerate(counts):
            chosen = np.repeat(np.arange(60), of_resample)
            for model, predicted in enumerate(rows.predictions):
                wanted = score_rows(rows.loss, predicted[chosen], rows.targets[chosen], rows.scale)[metric]
                assert values[model, index] == pytest.approx(wanted, rel=1e-12)
    assert {metric for _, names in cases().values() for metric in names} == {*RESAMPLED_METRICS}


@pytest.mark.parametrize(("num_rare", "is_kept"), [(3, True), (30, False)])
def test_a_rare_class_keeps_its_rows_in_every_resample(monkeypatch, num_rare, is_kept):
    targets = (np.arange(100) < num_rare).astype(float)[:, None]
    rows = ScoredRows("binary", [np.linspace(0, 1, 100)[:, None]], targets)
    _, counts = drawn_rows(monkeypatch, rows, "roc_auc", 50)
    assert ((counts[:, :num_rare].sum(axis=1) == num_rare).all()) == is_kept


def test_the_accuracy_of_a_model_that_always_says_one_class_varies_as_a_binomial():
    """Two of seven rows are right, so a resample has a binomial number of right ones."""
    rows = ScoredRows("binary", [np.ones((7, 1))], (np.arange(7) < 2).astype(float)[:, None])
    found = percentile_interval(resample_scores("accuracy", rows)[0])
    assert found == tuple(stats.binom.ppf([0.025, 0.975], 7, 2 / 7) / 7)


def test_the_interval_of_a_mean_square_is_that_of_theory():
    """The mean of 400 squared normal errors has a deviation of sqrt(2/400); the root's is half of that."""
    errors = np.random.default_rng(0).normal(size=(400, 1))
    rows = ScoredRows("regression", [errors], np.zeros((400, 1)))
    low, high = percentile_interval(resample_scores("rmse", rows)[0]) or (math.nan, math.nan)
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(2 / 400) / 2, rel=0.15)
    again = percentile_interval(resample_scores("rmse", rows)[0])
    assert again == (low, high)
    assert percentile_interval(resample_scores("rmse", rows, seed=1)[0]) != again


def test_scores_that_are_never_defined_have_no_interval():
    rows = ScoredRows("binary", [np.ones((20, 1))], np.ones((20, 1)))
    assert percentile_interval(resample_scores("roc_auc", rows, num_resamples=5)[0]) is None
    nothing = ScoredRows("binary", [np.ones((20, 1))], np.full((20, 1), math.nan))
    assert np.isnan(resample_scores("roc_auc", nothing, num_resamples=5)).all()


def test_correlations_of_a_model_that_says_the_same_of_every_row():
    """As scikit-learn and SciPy: Matthews' is 0, also where the class that it says is in no row; Spearman's is none."""
    said = np.zeros((30, 4))
    said[:, 3] = 1
    rows = ScoredRows("classes", [said], np.arange(30)[:, None] % 3.0)
    assert set(resample_scores("matthews_corrcoef", rows, num_resamples=5)[0]) == {0}
    rows = ScoredRows("regression", [np.ones((30, 1))], np.arange(30.0)[:, None])
    assert np.isnan(resample_scores("spearmanr", rows, num_resamples=5)).all()
