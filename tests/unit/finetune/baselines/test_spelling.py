"""The spelling check finds labels that the file's way of writing molecules gives away, and canonical SMILES hide."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdkit import Chem

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.bundled.molecules import generate_molecules
from exlm_cli.finetune.baselines.spelling import character_counts, describe_spelling
from exlm_cli.finetune.results import read_results
from exlm_cli.finetune.scores import read_scores
from exlm_cli.format import format_number
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import Loss
from exlm_cli.tasks.rows.labels import Labels
from exlm_cli.tasks.rows.splits import RowSplit
from exlm_cli.tasks.rows.table import Table, usable_rows
from exlm_cli.tasks.rows.task import RowTask
from exlm_cli.tasks.user_table import table_task
from tests.unit.finetune.finetuned_runs import SMILES, finetune, smiles_pretrained, write_rows

INDICES: Any = {"train": np.arange(80), "valid": np.arange(80, 100), "test": np.arange(100, 140)}


def make(loss: Loss, *, is_canonical: bool) -> RowTask:
    """Return molecules without pattern, of which those with label 1 or value 1 are written in Kekulé's form."""
    texts = []
    for row, smiles in enumerate(generate_molecules(140, seed=3)):
        molecule = Chem.MolFromSmiles(f"{smiles}.c1ccccc1")
        Chem.Kekulize(molecule)
        texts.append(Chem.MolToSmiles(molecule, kekuleSmiles=True) if row % 2 else Chem.MolToSmiles(molecule))
    config = CsvTaskConfig(name="csv", smiles_column="x", canonical_smiles=is_canonical, split="random")
    table = Table(Path("a.csv"), {"x": tuple(texts)}, tuple(range(140)))
    labels = Labels(loss, ("y",), np.array([[float(i % 2)] for i in range(140)]), ())
    rows = usable_rows(table, tuple(texts), config, SilentProgress())
    return table_task(config, rows, labels, RowSplit("column", INDICES))


def test_the_counts_are_length_brackets_chirality_double_bonds_digits_aromatic_letters_dots_and_charges():
    counts = character_counts(["CCO", "[O-]C(=O)[C@@H](C)c1ccncc1.[Na+]", "Cl\\C=C/Br"])
    assert counts.tolist() == [
        [3, 0, 0, 0, 0, 0, 0, 0],
        [32, 3, 2, 1, 2, 6, 1, 2],
        [9, 0, 0, 1, 0, 0, 0, 0],
    ]
    assert character_counts([]).shape == (0, 8)


@pytest.mark.parametrize(("loss", "metric", "score"), [("binary", "roc_auc", "1.0000"), ("regression", "rmse", "0")])
def test_labels_that_the_spelling_gives_away_are_found_as_written_and_not_in_canonical_smiles(loss, metric, score):
    """A model with the score of the forest, or a little better, may have read the spelling alone."""
    task = make(loss, is_canonical=False)
    assert task.selection_metric == metric
    close = describe_spelling(task, "test", 0.99 if loss == "binary" else 0.4, 1, SilentProgress(), num_threads=1)
    assert f"has test {metric} {score}" in close
    assert "its score may come from how the file writes molecules; leave out `task.canonical_smiles=false`" in close
    canonical = describe_spelling(
        make(loss, is_canonical=True), "test", 1.0 if loss == "binary" else 0.0, 1, SilentProgress()
    )
    assert "may come from" not in canonical
    undefined = f"spelling check: {metric} is not defined on these valid rows"
    assert describe_spelling(task, "valid", None, 1, SilentProgress()) == undefined


def test_a_run_on_smiles_as_written_reports_the_check_and_one_on_canonical_smiles_does_not(tmp_path):
    table = write_rows(tmp_path / "a.csv", ["smiles", "active"], [[s, str(i % 2)] for i, s in enumerate(SMILES * 4)])
    checkpoint = smiles_pretrained(tmp_path)
    task: Any = {"name": "csv", "files": {"train": str(table)}, "label_columns": ["active"], "split": "random"}
    for is_canonical in (True, False):
        folder = tmp_path / str(is_canonical)
        folder.mkdir()
        run = finetune(folder, checkpoint, (1, 2), canonical_smiles=is_canonical, **task)
        found = [note for note in read_results(run).notes if note.startswith("spelling check: ")]
        assert len(found) == (not is_canonical)
    average = read_scores(run).average("test", "roc_auc").mean
    assert f", the model {format_number(average)}" in found[0], "the score of the seeds' mean prediction"
