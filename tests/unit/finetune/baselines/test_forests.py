"""Forests as arrays predict what scikit-learn's do, survive a file, and a hostile file is refused in one line."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.baselines.forests import Forests, plain_forests, read_forests, write_forests

RNG = np.random.default_rng(1)
ROWS = RNG.lognormal(sigma=2, size=(150, 7)).astype(np.float32)
ROWS[:, 3] = ROWS[:, 3] > 1  # a bit
NEW = RNG.lognormal(sigma=2, size=(9000, 7)).astype(np.float32)
FILL = np.median(ROWS, axis=0)
VALUE = np.log(ROWS[:, 0]) + ROWS[:, 3] + RNG.normal(size=150)


def grown(kind: Any, targets: Any, **options: Any) -> Any:
    forest = kind(n_estimators=40, random_state=3, n_jobs=1, **options)
    return forest.fit(ROWS, targets)


@pytest.fixture(scope="module")
def forests() -> Forests:
    labels = [grown(RandomForestClassifier, (cut < VALUE).astype(float)) for cut in (0, 1)]
    return plain_forests([labels[0], None, labels[1]], 2, FILL)


def test_values_are_those_of_scikit_learn():
    first, second = grown(RandomForestRegressor, VALUE), grown(RandomForestRegressor, -VALUE, max_features=1 / 3)
    found = plain_forests([first, second], None, FILL).predict(NEW)
    assert found[:, 0, 0].tolist() == first.predict(NEW).tolist()
    assert found[:, 1, 0].tolist() == second.predict(NEW).tolist()


def test_probabilities_are_those_of_scikit_learn_and_classes_that_it_does_not_know_have_none():
    target = np.where(VALUE < 0, 0.0, np.where(VALUE < 2, 2.0, 3.0))
    forest = grown(RandomForestClassifier, target)
    found = plain_forests([forest], 5, FILL).predict(NEW)[:, 0]
    assert found[:, [0, 2, 3]].tolist() == forest.predict_proba(NEW).tolist()
    assert not found[:, [1, 4]].any()


def test_labels_have_forests_of_their_own_or_none(forests):
    found = forests.predict(NEW[:50])
    for label, cut in ((0, 0), (2, 1)):
        expected = grown(RandomForestClassifier, (cut < VALUE).astype(float)).predict_proba(NEW[:50])
        assert found[:, label].tolist() == expected.tolist()
    assert not found[:, 1].any()
    assert plain_forests([None], 2, FILL).predict(NEW[:3]).tolist() == [[[0, 0]]] * 3


def test_a_row_at_the_threshold_goes_left_as_in_scikit_learn():
    """Thresholds are float64 midpoints of float32 features; the float32 below decides the same."""
    near = np.array([[np.float32(1000)], [np.nextafter(np.float32(1000), np.float32(2000))]])
    forest = RandomForestRegressor(n_estimators=1, bootstrap=False, n_jobs=1).fit(near, [0.0, 1.0])
    assert plain_forests([forest], None, near[0]).predict(near)[:, 0, 0].tolist() == [0, 1]


def test_a_missing_feature_is_the_median():
    forest = grown(RandomForestRegressor, VALUE)
    found = plain_forests([forest], None, FILL).predict(np.full((1, 7), np.nan))[0, 0, 0]
    assert found == forest.predict(FILL[None])[0]


def changed(forests: Forests, name: str, place: Any, value: Any) -> Forests:
    array = getattr(forests, name).copy()
    array[place] = value
    return replace(forests, **{name: array})


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda f: changed(f, "children", (0, 0), 0), "a child before its parent or in another tree"),
        (lambda f: changed(f, "children", (0, 1), f.tree_ends[0]), "a child before its parent or in another tree"),
        (lambda f: changed(f, "feature", 0, 7), "a feature that there is not"),
        (lambda f: changed(f, "feature", 0, -1), "a feature that there is not"),
        (lambda f: changed(f, "tree_ends", 0, 10**12), "trees that do not follow each other"),
        (lambda f: changed(f, "tree_ends", 0, -1), "trees that do not follow each other"),
        (lambda f: changed(f, "forest_ends", 2, 79), "trees that do not follow each other"),
        (lambda f: replace(f, feature=f.feature[1:]), "arrays of different lengths"),
        (lambda f: replace(f, children=f.children[:, :1]), "arrays of different lengths"),
        (lambda f: replace(f, fill=f.fill[1:]), "other labels or features"),
        (lambda f: replace(f, forest_ends=f.forest_ends[1:]), "other labels or features"),
    ],
)
def test_arrays_that_are_no_forests_are_refused(forests, tmp_path, change, finding):
    write_forests(tmp_path / "f.npz", change(forests))
    with pytest.raises(CheckpointError, match=re.escape(finding)):
        read_forests(tmp_path / "f.npz", "try again", num_labels=3, num_values=2, num_features=7)
