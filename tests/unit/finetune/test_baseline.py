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
from exlm_cli.data.rows.table import Table
from exlm_cli.finetune.baseline import score_baseline
from exlm_cli.finetune.training_rows import read_training_rows, write_training_rows
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import Loss
from exlm_cli.tasks.csv import load_csv
from exlm_cli.tasks.rows.inputs import TableRows
from exlm_cli.tasks.rows.labels import Labels
from exlm_cli.tasks.rows.splits import RowSplit
from exlm_cli.tasks.rows.task import TableTask
from tests.recorder import Recorder
from tests.unit.finetune.finetuned_runs import write_rows

NAN = math.nan
AMINES = [f"{'C' * n}N" for n in range(1, 13)]
ALCOHOLS = [f"{'C' * n}O" for n in range(1, 13)]
TEXTS = [text for pair in zip(AMINES, ALCOHOLS, strict=True) for text in pair]
INDICES: Any = {"train": np.arange(16), "valid": np.arange(16, 20), "test": np.arange(20, 24)}


def make(loss: Loss, targets: Any, names: tuple[str, ...] = ("y",)) -> TableTask:
    labels = Labels(loss, names, np.array(targets, dtype=float), ())
    config = CsvTaskConfig(name="csv", smiles_column="x")
    usable = TableRows(Table(Path("a.csv"), {}, tuple(range(24))), tuple(TEXTS), ("",) * 24)
    return TableTask(config, usable, labels, RowSplit("column", INDICES))


def run(task: TableTask, seed: int = 1) -> dict[str, dict[str, Any]]:
    return score_baseline(task, seed, SilentProgress(), num_trees=30, num_threads=1)[0]


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
        task = load_csv(
            CsvTaskConfig(name="csv", files={"train": str(table)}, label_columns=("y",), split="random"),
            SilentProgress(),
        )
        assert task.examples["train"].texts[0] == (Chem.CanonSmiles(DATIVE[task.split_indices["train"][0]][0]),)
        scores.append(run(task)["test"]["rmse"])
        write_training_rows(tmp_path, task)
        known = read_training_rows([tmp_path])
        assert set(known.splits_of(task.training_keys)) == {"train"}
        nearest += known.nearest_tanimoto(task.training_keys, SilentProgress()).tolist()
    assert scores[0] == scores[1] < 0.3
    assert nearest == [1] * len(nearest)


def test_it_learns_a_functional_group_as_label_class_and_value():
    scores = run(make("binary", [[i % 2] for i in range(24)]))
    assert set(scores) == {"valid", "test"}
    assert scores["test"]["roc_auc"] == scores["test"]["accuracy"] == 1
    assert run(make("classes", [[i % 2] for i in range(24)], ("amine", "alcohol")))["test"]["accuracy"] == 1
    assert run(make("regression", [[5.0 * (i % 2)] for i in range(24)]))["test"]["rmse"] < 0.5


@pytest.mark.parametrize(("seed", "other"), [(1, 2), (2**32 - 1, 0), (2**32, 0), (2**63 - 1, 2**32 - 1)])
def test_the_seed_alone_decides_and_is_taken_whole(seed, other):
    task = make("regression", [[float(i)] for i in range(24)])
    assert run(task, seed) == run(task, seed) != run(task, other)


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
    score_baseline(make("binary", [[i % 2, i % 2] for i in range(24)], ("a", "b")), 1, progress, num_trees=2)
    (bar,) = progress.bars
    assert (bar.label, bar.total, bar.done) == ("random forests", 2, [1, 2])
