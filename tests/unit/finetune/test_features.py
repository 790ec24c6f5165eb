"""Descriptors beside the model: ranks among the training rows, joined to the encoder's state, in training and after."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.preprocessing import QuantileTransformer

from exlm_cli.api.run import load
from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.molecules import NUM_BITS, descriptors, fingerprints
from exlm_cli.errors import CheckpointError, DataError, ExlmError
from exlm_cli.export.source import finetuned_source
from exlm_cli.finetune.cells.model import load_finetuned
from exlm_cli.finetune.features import (
    FeatureStore,
    descriptor_names,
    fit_quantiles,
    with_descriptors,
)
from exlm_cli.finetune.prediction.predict import predict
from exlm_cli.model.heads import NUM_QUANTILES, DescriptorHead, DescriptorRanks
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.user_table import load_user_table
from tests.unit.finetune.finetuned_runs import SMILES, finetune, read_rows, write_rows
from tests.unit.finetune.synthetic import finetune_recipe

ROWS = [[smiles, f"{5 + i % 6}", f"{0.1 * (i % 7)}"] for i, smiles in enumerate(SMILES * 5)]


def ranks_of(training: Any, values: Any) -> Any:
    ranks = DescriptorRanks(np.shape(training)[1])
    ranks.quantiles.copy_(torch.from_numpy(fit_quantiles(np.array(training, dtype=float))))
    return ranks(torch.tensor(values, dtype=torch.float64)).numpy()


def test_equal_numbers_have_their_mean_rank_and_a_constant_is_nothing():
    training = [[0.0, 3, math.nan]] * 75 + [[1.0, 3, math.nan]] * 26
    found = ranks_of(training, [[0, 3, 3], [1, 4, 5], [math.nan, math.nan, math.nan]])
    np.testing.assert_allclose(
        found[:, 0], math.sqrt(3) * np.array([2 * 37 / 100 - 1, 2 * 87.5 / 100 - 1, 0]), atol=1e-6
    )
    assert (found[:, 1:] == 0).all()


def test_ranks_are_those_of_scikit_learn():
    """But at the lowest and the highest training value, which it puts at 0 and 1 also where many rows share them."""
    rng = np.random.default_rng(1)
    training = np.stack([rng.lognormal(sigma=3, size=300), rng.poisson(4, 300), rng.normal(size=300)], axis=1)
    training[::7, 2] = math.nan
    theirs = QuantileTransformer(n_quantiles=NUM_QUANTILES, subsample=None).fit(training)
    new = np.stack([rng.lognormal(sigma=4, size=500), rng.poisson(5, 500), rng.normal(size=500)], axis=1)
    low, high = np.nanmin(training, axis=0), np.nanmax(training, axis=0)
    mine = (ranks_of(training, new) / math.sqrt(3) + 1) / 2
    is_inside = (new > low) & (new < high)
    assert is_inside.mean() > 0.9
    np.testing.assert_allclose(mine[is_inside], theirs.transform(new)[is_inside], atol=2e-7)
    assert (mine[new > high] == 1).all()
    assert (mine[new < low] == 0).all()


def test_the_head_reads_state_and_ranks_through_one_hidden_layer():
    torch.manual_seed(1)
    head = DescriptorHead(8, 8, 2, 3, 0.5).eval()
    head.ranks.quantiles.copy_(torch.from_numpy(fit_quantiles(np.arange(40.0).reshape(20, 2))))
    states, numbers = torch.randn(5, 4, 8), torch.rand(5, 2) * 40
    joined = torch.cat([torch.tanh(head.dense(states[:, 0])), head.ranks(numbers)], dim=1)
    expected = head.out(torch.nn.functional.gelu(head.hidden(joined)))
    torch.testing.assert_close(head(states, numbers), expected)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("table") / "assay.csv", ["smiles", "ph", "y"], ROWS)


def task_of(table: Path, **more: Any) -> dict[str, Any]:
    task = {"name": "csv", "files": {"train": str(table)}, "label_columns": ["y"], "split": "random"}
    return task | {"descriptors": ["rdkit2d", "ecfp4"], "descriptor_columns": ["ph"]} | more


@pytest.fixture(scope="module")
def run(table: Path, smiles_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetune(tmp_path_factory.mktemp("described"), smiles_model, **task_of(table))


def predicted(run: Path, path: Path, tmp_path: Path) -> np.ndarray:
    out = tmp_path / f"{path.stem}-predicted.csv"
    predict(load_finetuned(run, device="cpu"), path, out, folder=tmp_path, progress=SilentProgress())
    return np.array([float(row["y_predicted"]) for row in read_rows(out)])


def test_descriptors_are_rdkit_s_then_bits_then_own_columns(table, run):
    config = CsvTaskConfig.model_validate(task_of(table))
    names, finetuned = descriptor_names(config), load_finetuned(run, device="cpu")
    assert len(names) == len(finetuned.runners[1].model.head.ranks.quantiles) == 217 + NUM_BITS + 1
    assert [names[index] for index in (0, 217, -1)] == ["MaxAbsEStateIndex", "ecfp4 bit 0", "column ph"]
    encoded = load_user_table(config, SilentProgress()).encode("valid", finetuned.tokenizer, 24)
    found = with_descriptors(encoded, config, FeatureStore(), SilentProgress()).descriptors
    texts = [text for (text,) in encoded.texts]
    np.testing.assert_array_equal(found[:, :217], descriptors(texts, SilentProgress()))
    np.testing.assert_array_equal(found[:, 217:-1], fingerprints(texts))


def test_a_column_reaches_the_prediction(table, run, tmp_path):
    before = predicted(run, table, tmp_path)
    turned = [[smiles, ROWS[(i + 1) % len(ROWS)][1], y] for i, (smiles, _, y) in enumerate(ROWS)]
    after = predicted(run, write_rows(tmp_path / "turned.csv", ["smiles", "ph", "y"], turned), tmp_path)
    assert (before != after).all()
    blank = [[smiles, "", ""] for smiles, *_ in ROWS]
    missing = predicted(run, write_rows(tmp_path / "blank.csv", ["smiles", "ph", "y"], blank), tmp_path)
    assert len(set(missing.tolist())) == len(SMILES)


def test_a_run_in_memory_predicts_the_same(table, run, tmp_path):
    loaded, smiles = load(run, device="cpu"), [row[0] for row in ROWS]
    mine = loaded.predict(smiles, columns={"ph": [float(row[1]) for row in ROWS]})
    np.testing.assert_allclose(mine.y_predicted, predicted(run, table, tmp_path), atol=1e-9)
    for columns, key in (
        ({}, "ph"),
        ({"ph": [7.0], "dose": [1.0]}, "dose"),
        ({"ph": [7.0, 7.0]}, "ph"),
        ({"ph": [math.inf]}, "ph"),
        ({"ph": ["acid"]}, "ph"),
    ):
        with pytest.raises(DataError, match=f"`columns`.*`{key}`"):
            loaded.predict(["CCO"], columns=columns)


def test_a_table_without_the_column_or_with_words_in_it_is_refused(run, tmp_path):
    for name, columns, rows, finding in (
        ("bare", ["smiles"], [["CCO"]], "bare.csv: no column `ph`"),
        ("odd", ["smiles", "ph"], [["CCO", "7"], ["CCN", "acid"]], "odd.csv:3: `ph` is `acid`; accepted: a number"),
    ):
        with pytest.raises(DataError, match=re.escape(finding)):
            predicted(run, write_rows(tmp_path / f"{name}.csv", columns, rows), tmp_path)


def test_a_descriptor_that_is_a_label_or_of_a_text_is_refused(table):
    for task, finding in (
        ({"descriptor_columns": ["y"]}, "`y` cannot be descriptor and label at once"),
        ({"text_column": "t"}, "is for molecules; the task has text"),
    ):
        with pytest.raises(ValidationError, match=finding):
            finetune_recipe(task=task_of(table, **task))


def test_other_descriptors_are_refused(run, monkeypatch):
    monkeypatch.setattr("rdkit.Chem.Descriptors.descList", [("Odd", len)] * 217)
    with pytest.raises(CheckpointError, match="this version of RDKit has other descriptors"):
        load_finetuned(run, device="cpu")


def test_a_run_with_descriptors_is_not_exported(run):
    with pytest.raises(ExlmError, match="its head reads descriptors"):
        finetuned_source(load_finetuned(run, device="cpu"))
