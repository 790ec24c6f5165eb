"""Baselines learn what features and words show, are repeatable, and use rows of which only a bound is known.

Trees do not stumble over missing or single classes.
"""

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.data.molecules import NUM_BITS
from exlm_cli.finetune.baselines.baseline import (
    MAX_FOREST_VALUES,
    NUM_TREES,
    TFIDF,
    TREES,
    TreeBaseline,
    baselines_of,
    fit_baseline,
    is_affordable,
    medians,
)
from exlm_cli.finetune.baselines.forests import TrainingRows
from exlm_cli.finetune.features import FeatureStore
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import FloatArray, Loss
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.tasks.rows.task import LabelledRows, RowTask
from tests.unit.finetune.synthetic import WordTask, grow_little

NAN, INF = math.nan, math.inf
ECFP4, _, BOOSTING = TREES
TEXTS = [f"{'C' * n}{end}" for n in range(1, 13) for end in "NO"]


def make(loss: Loss, targets: Any, names: tuple[str, ...] = ("y",)) -> RowTask:
    """Return a task of amines and alcohols in turn, 16 of them to train on."""
    values = np.array(targets, dtype=float)
    examples: Any = {
        part: LabelledRows([(text,) for text in TEXTS[rows]], values[rows], np.arange(24)[rows])
        for part, rows in (("train", slice(16)), ("test", slice(16, None)))
    }
    task = RowTask("csv", loss, names, examples)
    task.input_kind = "smiles"
    return task


def task_of(kind: Any, texts: list[str], targets: FloatArray, **more: Any) -> RowTask:
    rows = LabelledRows([(text,) for text in texts], targets[:, None], np.arange(len(texts)), **more)
    task = RowTask("csv", "regression", ("y",), {"train": rows})
    task.input_kind = kind
    return task


def fit(task: RowTask, seed: int, baseline: TreeBaseline, store: FeatureStore, num_trees: int = 30) -> TreeBaseline:
    with pytest.MonkeyPatch.context() as patch:
        grow_little(patch, num_trees, 4 * num_trees)
        return baseline.fit(task, seed, store, SilentProgress(), num_threads=1)


def predict(task: RowTask, seed: int = 1, num_trees: int = 30) -> Any:
    fitted = fit(task, seed, ECFP4, FeatureStore(), num_trees)
    return fitted.predict(task.examples["test"].texts, SilentProgress())


@pytest.mark.parametrize(
    ("loss", "names", "scores"),
    [
        ("binary", ("y",), {"roc_auc": 1, "accuracy": 1}),
        ("classes", ("amine", "alcohol", "neither"), {"accuracy": 1}),
        ("regression", ("y",), {"rmse": 0}),
    ],
)
@pytest.mark.parametrize("baseline", TREES, ids=lambda baseline: baseline.model)
def test_a_functional_group_is_learned_and_predicted_by_the_file(baseline, loss, names, scores, tmp_path):
    task, store = make(loss, [[i % 2] for i in range(24)], names), FeatureStore()
    fitted = fit(task, 1, baseline, store)
    fitted.write(tmp_path / baseline.file)
    again = baseline.read(tmp_path / baseline.file, "", loss=loss, num_outputs=len(names), num_texts=1, store=store)
    rows = task.examples["test"]
    found = fitted.predict(rows.texts, SilentProgress())
    assert found.shape == (8, len(names))
    assert again.predict(rows.texts, SilentProgress()).tolist() == found.tolist()
    learned = score_rows(loss, found, rows.targets)
    assert {name: learned[name] for name in scores} == pytest.approx(scores, abs=0.1)


def test_what_a_descriptor_lacks_is_the_median_of_the_training_rows():
    """The median of 0, 1, 2 and 10 is 1.5; a feature that no training row has is 0."""
    train = [[0.0, NAN], [1, NAN], [2, NAN], [10, NAN], [NAN, NAN]]
    assert medians(np.array(train)).tolist() == [1.5, 0]


def peak_bytes() -> int:
    """Return the most memory that this process has had. `getrusage` would count what its parent had, too."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def bytes_of_a_tree(num_rows: int, few: int, many: int) -> float:
    """Return what a tree of values needs for a training row, while it is grown and copied."""
    rng, peaks = np.random.default_rng(0), []
    bits = rng.integers(2, size=(num_rows, NUM_BITS), dtype=np.uint8)
    task = task_of("smiles", ["C"] * num_rows, rng.normal(size=num_rows))
    rows = TrainingRows(task, bits, np.zeros(NUM_BITS, dtype=np.float32), 1, SilentProgress(), 1)
    for num_trees in (few, many):
        with pytest.MonkeyPatch.context() as patch:
            grow_little(patch, num_trees)
            ECFP4.grow(rows)
        peaks.append(peak_bytes())
    return (peaks[1] - peaks[0]) / ((many - few) * num_rows)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux, which tells the peak of a process")
def test_forests_of_values_that_are_grown_unasked_take_under_two_gigabytes():
    """Their nodes grow with rows and trees. 100,000 rows would take four times as much and have none unasked."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        needed = alone.submit(bytes_of_a_tree, 1000, 10, 110).result()
    assert 24 < needed < 2e9 / (NUM_TREES * MAX_FOREST_VALUES), "24 bytes a node stay in the run"
    assert not is_affordable(task_of("smiles", ["C"] * 100_000, np.zeros(100_000)))


def test_a_table_with_too_many_labels_or_values_has_no_baseline_by_itself(monkeypatch):
    """Trees of values end in single rows, so that memory grows with the rows."""
    task, values = make("binary", [[i % 2] for i in range(24)]), task_of("smiles", TEXTS[:16], np.arange(16.0))
    assert not baselines_of(WordTask())
    monkeypatch.setattr("exlm_cli.finetune.baselines.baseline.MAX_FOREST_VALUES", 15)
    assert not is_affordable(values)
    assert is_affordable(task)
    monkeypatch.setattr("exlm_cli.finetune.baselines.baseline.MAX_LABELLED_ROWS", {"smiles": 15, "text": 16})
    assert not is_affordable(task)
    assert baselines_of(task) == TREES
    task.input_kind = "text"
    assert is_affordable(task)
    assert baselines_of(task) == (TFIDF,)


@pytest.mark.parametrize(("seed", "other"), [(1, 2), (2**32, 0)])
def test_the_seed_alone_decides_and_is_taken_whole(seed, other):
    task = make("regression", [[float(i)] for i in range(24)])
    predicted = [predict(task, one, num_trees=4).tolist() for one in (seed, seed, other)]
    assert predicted[0] == predicted[1] != predicted[2]


def test_missing_labels_and_single_classes_are_no_trouble():
    targets = [[i % 2, NAN if i < 16 else i % 2, 1 if i < 16 else i % 2, NAN if i % 3 else i % 2] for i in range(24)]
    task = make("binary", targets, ("a", "never", "always", "some"))
    # `never` and `always` say the same of every row: an area of one half each, whatever the others reach
    assert score_rows("binary", predict(task), task.examples["test"].targets)["roc_auc"] <= 3 / 4
    empty = make("regression", [[NAN if i < 16 else float(i), i] for i in range(24)], ("never", "always"))
    assert np.isclose(predict(empty)[..., 0], 0).all()


def trained_on(baseline: Any, task: RowTask) -> FloatArray:
    """Return (N,) predictions for the training rows."""
    with pytest.MonkeyPatch.context() as patch:
        grow_little(patch, 60, 60)
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
    left_out, bounded = (
        float(np.abs(trained_on(baseline, task_of(kind, texts, known, **more)) - truth)[is_censored].mean())
        for more in ({}, {"bounds": bounds})
    )
    assert bounded < left_out


def test_what_is_trained_on_is_the_first_prediction_or_the_bound():
    """One word tells all: three texts of `a` predict their mean; `>9` is beyond it, `>1` is not."""
    texts, values = ["a"] * 5, np.array([2.0, 4.0, 6.0, np.nan, np.nan])
    bounds = np.array([[2, 2], [4, 4], [6, 6], [9, INF], [1, INF]], dtype=float)[:, None]
    first = trained_on(TFIDF, task_of("text", texts, values))[0]
    assert first == pytest.approx(4.0)
    filled = np.array([2.0, 4.0, 6.0, 9.0, first])
    assert trained_on(TFIDF, task_of("text", texts, values, bounds=bounds)) == pytest.approx(
        trained_on(TFIDF, task_of("text", texts, filled))
    )


@pytest.mark.parametrize(("baseline", "kind"), [(TREES[0], "smiles"), (BOOSTING, "smiles"), (TFIDF, "text")])
def test_a_row_of_weight_zero_is_as_if_it_were_not_there(baseline, kind):
    """Of forests this holds for what is fitted to all rows: no molecule has the features of another."""
    texts = ["CCO", "CCO", "CCO", "CCN"] if kind == "smiles" else ["a b", "a b", "a b", "c d"]
    values = np.array([1.0, 3.0, 50.0, 2.0])
    weighted = trained_on(baseline, task_of(kind, texts, values, weights=np.array([1.0, 1.0, 0.0, 2.0])))
    if kind == "text":
        repeated = task_of(kind, ["a b", "a b", "c d", "c d"], np.array([1.0, 3.0, 2.0, 2.0]))
        assert weighted[0] == pytest.approx(trained_on(baseline, repeated)[0], rel=1e-3)
    assert weighted.max() < 4.0
