"""The forest learns what fingerprints show, is repeatable, and does not stumble over missing or single classes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdkit import Chem
from rdkit.Chem import rdFingerprintGenerator

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.molecules import NUM_BITS, fingerprints
from exlm_cli.finetune.baselines.baseline import (
    FORESTS,
    TFIDF,
    ForestBaseline,
    baselines_of,
    grow_forests,
    is_affordable,
)
from exlm_cli.finetune.features import FeatureSet, FeatureStore
from exlm_cli.finetune.prediction.training_rows import read_training_rows, write_training_rows
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import Loss
from exlm_cli.tasks.metrics import score_rows
from exlm_cli.tasks.rows.labels import Labels
from exlm_cli.tasks.rows.splits import RowSplit
from exlm_cli.tasks.rows.table import InputRows, Table
from exlm_cli.tasks.rows.task import LabelledRows, RowTask
from exlm_cli.tasks.user_table import load_user_table, table_task
from tests.recorder import Recorder
from tests.unit.finetune.finetuned_runs import write_rows
from tests.unit.finetune.synthetic import WordTask

NAN = math.nan
ECFP4 = FORESTS[0]
AMINES = [f"{'C' * n}N" for n in range(1, 13)]
ALCOHOLS = [f"{'C' * n}O" for n in range(1, 13)]
TEXTS = [text for pair in zip(AMINES, ALCOHOLS, strict=True) for text in pair]
INDICES: Any = {"train": np.arange(16), "valid": np.arange(16, 20), "test": np.arange(20, 24)}


def make(loss: Loss, targets: Any, names: tuple[str, ...] = ("y",)) -> RowTask:
    labels = Labels(loss, names, np.array(targets, dtype=float), ())
    config = CsvTaskConfig(name="csv", smiles_column="x")
    usable = InputRows(Table(Path("a.csv"), {}, tuple(range(24))), tuple(TEXTS), ("",) * 24)
    return table_task(config, usable, labels, RowSplit("column", INDICES))


def predict(task: RowTask, seed: int = 1, baseline: ForestBaseline = ECFP4, num_trees: int = 30) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(grow_forests.__kwdefaults__, "num_trees", num_trees)
        fitted = baseline.fit(task, seed, FeatureStore(), SilentProgress(), num_threads=1)
    return {split: fitted.predict(task.examples[split].texts, SilentProgress()) for split in task.splits[1:]}


def run(task: RowTask, baseline: ForestBaseline = ECFP4) -> dict[Any, dict[str, float]]:
    """Return the metrics of the predictions, by split."""
    return {
        split: score_rows(task.loss, predicted, task.examples[split].targets)
        for split, predicted in predict(task, baseline=baseline).items()
    }


def test_fingerprints_are_ecfp4():
    bits = fingerprints(["CCO", "CC(=O)O[AlH3](O)O"])
    assert bits.shape == (2, NUM_BITS)
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    assert set(np.flatnonzero(bits[0])) == set(generator.GetFingerprint(Chem.MolFromSmiles("CCO")).GetOnBits())
    assert bits[1].any()


METALS = ("Ni", "Zn", "Ir", "Co", "Ru", "Cr", "Mn", "Rh", "Pd", "Cu", "Pt", "Fe")
DATIVE = [(f"c1ccc2ccccc2n1->[{metal}](Cl)Cl", 2 + 0.01 * i) for i, metal in enumerate(METALS)]
DATIVE += [(f"c1ccccn1->[{metal}](Cl)Cl", 0.01 * i) for i, metal in enumerate(METALS)]


def test_the_forest_reads_complexes_with_dative_bonds_however_they_are_written(tmp_path):
    """RDKit writes `[Cl][Ni]([Cl])<-[n]1...`; without bits the forest would miss by the spread of the values, 1."""
    scores, nearest = [], []
    for number, write in enumerate([str, Chem.CanonSmiles]):
        table = write_rows(tmp_path / f"{number}.csv", ["smiles", "y"], [[write(s), str(y)] for s, y in DATIVE])
        task = load_user_table(
            CsvTaskConfig(name="csv", files={"train": str(table)}, label_columns=("y",), split="random"),
            SilentProgress(),
        )
        assert task.examples["train"].texts[0] == (Chem.CanonSmiles(DATIVE[task.split_indices["train"][0]][0]),)
        scores.append(run(task, ECFP4)["test"]["rmse"])
        write_training_rows(tmp_path, [task])
        known = read_training_rows(tmp_path)
        assert set(known.splits_of(task.training_keys)) == {"train"}
        nearest += known.nearest_tanimoto(task.training_keys, SilentProgress())[0].tolist()
    assert scores[0] == scores[1] < 0.3
    assert nearest == [1] * len(nearest)


@pytest.mark.parametrize("baseline", FORESTS, ids=lambda baseline: baseline.model)
def test_it_learns_a_functional_group_as_label_class_and_value(baseline):
    scores = run(make("binary", [[i % 2] for i in range(24)]), baseline)
    assert set(scores) == {"valid", "test"}
    assert scores["test"]["roc_auc"] == scores["test"]["accuracy"] == 1
    assert run(make("classes", [[i % 2] for i in range(24)], ("amine", "alcohol")), baseline)["test"]["accuracy"] == 1
    assert run(make("regression", [[5.0 * (i % 2)] for i in range(24)]), baseline)["test"]["rmse"] < 0.5


def test_features_are_worked_out_once_for_all_splits_and_seeds():
    store, asked = FeatureStore(), []
    counting = FeatureSet("bits", lambda smiles, progress: asked.append(list(smiles)) or fingerprints(smiles))
    first = store.features(counting, ["CCO", "CCN", "CCO"], SilentProgress())
    again = store.features(counting, ["CCN", "CCC"], SilentProgress())
    assert asked == [["CCO", "CCN"], ["CCC"]]
    np.testing.assert_array_equal(first, fingerprints(["CCO", "CCN", "CCO"]))
    np.testing.assert_array_equal(again, fingerprints(["CCN", "CCC"]))


def test_what_a_descriptor_lacks_is_the_median_of_the_training_rows():
    """The median of 0, 1, 2 and 10 is 1.5; a feature that no training row has is 0."""
    train = np.array([[0.0, math.nan], [1, math.nan], [2, math.nan], [10, math.nan], [math.nan, math.nan]])
    examples = {"train": LabelledRows([("C",)] * 5, np.arange(5.0)[:, None], np.arange(5))}
    task = make("regression", [[float(i)] for i in range(24)])
    task.examples, task.splits = examples, ("train",)
    forests = grow_forests(FORESTS[1], task, train, 1, SilentProgress(), num_trees=9)
    assert forests.fill.tolist() == [1.5, 0]
    new = np.array([[math.nan, 7], [math.nan, math.nan], [4, math.nan]])
    filled = np.array([[1.5, 7], [1.5, 0], [4, 0]])
    assert forests.predict(new).tolist() == forests.predict(filled).tolist()


def test_many_classes_of_few_rows_are_no_warning():
    names = tuple(f"{i}" for i in range(24))
    task = make("classes", [[i] for i in range(24)], names)
    task.examples["train"] = LabelledRows([(t,) for t in TEXTS], np.arange(24.0)[:, None], np.arange(24))
    assert predict(task)["test"].shape == (4, 24)


def test_a_table_with_too_many_labels_has_no_baseline_by_itself(monkeypatch):
    task = make("binary", [[i % 2] for i in range(24)])
    assert is_affordable(task)
    monkeypatch.setattr("exlm_cli.finetune.baselines.baseline.MAX_LABELLED_ROWS", {"smiles": 15, "text": 16})
    assert not is_affordable(task)
    assert baselines_of(task) == FORESTS
    task.input_kind = "text"
    assert is_affordable(task)
    assert baselines_of(task) == (TFIDF,)


def test_a_table_with_many_values_has_no_forests_by_itself(monkeypatch):
    """Their trees end in single rows, so that memory grows with the rows."""
    values = make("regression", [[float(i)] for i in range(24)])
    monkeypatch.setattr("exlm_cli.finetune.baselines.baseline.MAX_FOREST_VALUES", 15)
    assert not is_affordable(values)
    assert is_affordable(make("binary", [[i % 2] for i in range(24)]))


def test_a_task_whose_rows_are_no_texts_has_no_baseline():
    assert not baselines_of(WordTask("span"))
    assert not is_affordable(WordTask("span"))


@pytest.mark.parametrize(("seed", "other"), [(1, 2), (2**32 - 1, 0), (2**32, 0), (2**63 - 1, 2**32 - 1)])
def test_the_seed_alone_decides_and_is_taken_whole(seed, other):
    task = make("regression", [[float(i)] for i in range(24)])
    predicted = [predict(task, one)["test"].tolist() for one in (seed, seed, other)]
    assert predicted[0] == predicted[1] != predicted[2]


def test_missing_labels_and_single_classes_are_no_trouble():
    targets = [[i % 2, NAN if i < 16 else i % 2, 1 if i < 16 else i % 2, NAN if i % 3 else i % 2] for i in range(24)]
    scores = run(make("binary", targets, ("a", "never", "always", "some")))
    # `never` and `always` say the same of every row: an area of one half each, whatever the others reach
    assert scores["test"]["roc_auc"] <= 3 / 4
    single = run(make("classes", [[0 if i < 16 else i % 2] for i in range(24)], ("a", "b")))
    assert single["test"]["accuracy"] == 1 / 2
    empty = run(make("regression", [[NAN if i < 16 else float(i)] for i in range(24)]))
    assert empty["test"]["mae"] == np.mean([20, 21, 22, 23])


def test_it_shows_how_far_it_is():
    progress = Recorder()
    task = make("binary", [[i % 2, i % 2] for i in range(24)], ("a", "b"))
    grow_forests(ECFP4, task, fingerprints(TEXTS[:16]), 1, progress, num_trees=2)
    (bar,) = progress.bars
    assert (bar.label, bar.total, bar.done) == ("ECFP4 + random forest", 2, [1, 2])


@pytest.mark.parametrize("loss", ["binary", "classes"])
def test_balanced_weights_hold_for_the_baseline_too(loss):
    """Of rows that look the same, one in four is positive; with the weights of the loss, it is one in two.

    Within five standard errors of what the bootstrap draws: a share p of 64 rows, the mean of 400 trees.
    """
    task = make(loss, [[float(i % 4 == 0)] for i in range(24)], ("a", "b") if loss == "classes" else ("y",))
    targets = (np.arange(64.0) % 4 == 0)[:, None].astype(float)
    same = {"train": LabelledRows([("CCO",)] * 64, targets, np.arange(64))}
    task.examples, task.splits = same | {"valid": same["train"]}, ("train", "valid")
    for weights, share in ((None, 0.25), ([2 / 3, 2.0] if loss == "classes" else [3.0], 0.5)):
        task.class_weights = None if weights is None else np.array(weights)
        found = predict(task, num_trees=400)["valid"][0, -1]
        assert found == pytest.approx(share, abs=5 * 0.5 / math.sqrt(64 * 400) + 0.005)
