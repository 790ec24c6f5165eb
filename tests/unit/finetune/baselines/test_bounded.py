"""Baselines on censored rows: where the truth is known, they come nearer to it than without these rows or at bounds."""

from typing import Any

import numpy as np
import pytest

from exlm_cli.finetune.baselines.baseline import TFIDF, TREES, grow_forests
from exlm_cli.finetune.baselines.bounded import fit_baseline
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import FloatArray
from exlm_cli.tasks.rows.task import LabelledRows, RowTask

INF = np.inf
BOOSTING = TREES[2]


def task_of(kind: Any, texts: list[str], targets: FloatArray, **more: Any) -> RowTask:
    rows = LabelledRows([(text,) for text in texts], targets[:, None], np.arange(len(texts)), **more)
    task = RowTask("csv", "regression", ("y",), {"train": rows})
    task.input_kind = kind
    return task


def fit(baseline: Any, task: RowTask) -> FloatArray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(grow_forests.__kwdefaults__, "num_trees", 60)
        fitted = fit_baseline(baseline, task, 1, FeatureStore(), SilentProgress(), num_threads=1)
    found: FloatArray = fitted.predict(task.examples["train"].texts, SilentProgress())[:, 0]
    return found


@pytest.mark.parametrize("baseline", [TREES[1], BOOSTING, TFIDF])
def test_censored_rows_bring_predictions_nearer_to_the_truth(baseline):
    """Long chains, or texts of `high`, lie above the limit of 10, at 14 or so; 30 rows of 60 are censored."""
    is_high = np.arange(60) % 2 == 1
    truth = np.where(is_high, 14.0, 4.0) + np.random.default_rng(0).normal(size=60)
    truth[1::10] = 9.5  # some of them were measured below it
    is_censored = is_high & (truth > 10)
    texts = [f"{'high' if high else 'low'} word{i}" for i, high in enumerate(is_high)]
    kind = "text"
    if baseline is not TFIDF:
        texts, kind = [f"{'C' * (i % 30 + 1)}{'N' if high else 'O'}" for i, high in enumerate(is_high)], "smiles"
    known = np.where(is_censored, np.nan, truth)
    bounds = np.stack([np.where(is_censored, 10.0, truth), np.where(is_censored, INF, truth)], axis=1)[:, None]
    errors = {
        name: float(np.abs(fit(baseline, task_of(kind, texts, targets, **more)) - truth)[is_censored].mean())
        for name, (targets, more) in {
            "left out": (known, {}),
            "bounded": (known, {"bounds": bounds}),
        }.items()
    }
    assert errors["bounded"] < errors["left out"]


def test_what_is_trained_on_is_the_first_prediction_or_the_bound():
    """One word tells all: three texts of `a` predict their mean; `>9` is beyond it, `>1` is not."""
    texts, values = ["a"] * 5, np.array([2.0, 4.0, 6.0, np.nan, np.nan])
    bounds = np.array([[2, 2], [4, 4], [6, 6], [9, INF], [1, INF]], dtype=float)[:, None]
    first = fit(TFIDF, task_of("text", texts, values))[0]
    assert first == pytest.approx(4.0)
    filled = np.array([2.0, 4.0, 6.0, 9.0, first])
    assert fit(TFIDF, task_of("text", texts, values, bounds=bounds)) == pytest.approx(
        fit(TFIDF, task_of("text", texts, filled))
    )


@pytest.mark.parametrize(("baseline", "kind"), [(TREES[0], "smiles"), (BOOSTING, "smiles"), (TFIDF, "text")])
def test_a_row_of_weight_zero_is_as_if_it_were_not_there(baseline, kind):
    """Of forests this holds for what is fitted to all rows: no molecule has the features of another."""
    texts = ["CCO", "CCO", "CCO", "CCN"] if kind == "smiles" else ["a b", "a b", "a b", "c d"]
    values = np.array([1.0, 3.0, 50.0, 2.0])
    weighted = fit(baseline, task_of(kind, texts, values, weights=np.array([1.0, 1.0, 0.0, 2.0])))
    if kind == "text":
        repeated = task_of(kind, ["a b", "a b", "c d", "c d"], np.array([1.0, 3.0, 2.0, 2.0]))
        assert weighted[0] == pytest.approx(fit(baseline, repeated)[0], rel=1e-3)
    assert weighted.max() < 4.0
