"""Replicates, weights, bounds and logarithms of a table: means by hand, and each molecule on one side."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.base import TrainedTask
from exlm_cli.tasks.rows.task import RowTask, truth_columns
from exlm_cli.tasks.user_table import load_user_table, read_new_table
from tests.tiny import word_level

OTHERS = [f"{'C' * n}O" for n in range(3, 23)]


def load(folder: Path, header: str, rows: list[str], **options: Any) -> RowTask:
    (folder / "a.csv").write_text("\n".join([header, *rows]) + "\n")
    given = {"name": "csv", "label_columns": ["y"], "files": {"train": str(folder / "a.csv")}, "split": "random"}
    return load_user_table(CsvTaskConfig.model_validate({**given, **options}), SilentProgress())


def values_of(task: RowTask, smiles: str) -> list[float]:
    """Return the values of a molecule in all splits."""
    found = (zip(rows.texts, rows.targets[:, 0], strict=True) for rows in task.examples.values())
    return [float(value) for rows in found for (text,), value in rows if text == smiles]


def with_others(*rows: str, more: str = "") -> list[str]:
    return [*rows, *(f"{smiles},{number}{more}" for number, smiles in enumerate(OTHERS))]


def test_replicates_are_averaged_and_their_spread_is_told(tmp_path):
    """`OCC` is `CCO`; the pooled variance is ((0.5 + 0.5) + 2) / (1 + 1)."""
    rows = with_others("CCO,1", "OCC,2", "CN,4", "CN,6", "CN,")
    task = load(tmp_path, "smiles,y", rows, replicates="mean")
    assert values_of(task, "CCO") == [1.5]
    assert values_of(task, "CN") == [5.0]
    assert sum(task.split_sizes.values()) == 22
    spread = math.sqrt((0.5 + 2.0) / 2)
    said = f"averaged 4 rows of 2 molecules; the standard deviation within one is {spread:.3g} of `y`"
    assert said in task.notes
    assert not any("different labels" in note for note in task.notes)


def test_means_of_replicates_can_be_split_anew(tmp_path):
    rows = [f"{smiles},{i + 0.1 * copy}" for copy in range(3) for i, smiles in enumerate(OTHERS)]
    task = load(tmp_path, "smiles,y", rows, replicates="mean")
    assert task.resplit is not None
    for one in (task, task.resplit(5)):
        keys = {*one.training_keys, *one.validation_keys, *one.test_keys}
        assert len(keys) == sum(one.split_sizes.values()) == len(OTHERS)


def test_replicates_with_logarithms_have_the_geometric_mean(tmp_path):
    rows = [f"{smiles},{number + 1}" for number, smiles in enumerate(OTHERS)]
    task = load(tmp_path, "smiles,y", ["CCO,10", "CCO,1000", *rows], replicates="mean", log10=True)
    assert values_of(task, "CCO") == [pytest.approx(2.0)]


def test_a_mean_is_weighted_and_bounds_count_where_nothing_is_known(tmp_path):
    rows = with_others("CCO,1,1", "CCO,4,3", "CN,>5,1", "CN,>7,1", "CN,<9,1", "CS,>5,1", "CS,6,1", more=",2")
    task = load(tmp_path, "smiles,y,w", rows, replicates="mean", weight_column="w")
    assert values_of(task, "CCO") == [13 / 4]
    assert values_of(task, "CS") == [6.0]
    (nan,) = values_of(task, "CN")
    assert math.isnan(nan)
    found = {
        text: (bounds.tolist(), weight)
        for part in task.examples.values()
        for (text,), bounds, weight in zip(part.texts, part.bounds[:, 0], part.weights, strict=True)  # type: ignore[index,arg-type]
    }
    assert found["CN"][0] == [7.0, 9.0]
    assert found["CS"][0] == [6.0, 6.0]
    assert found["CCO"][1] / found["CCCO"][1] == pytest.approx(4 / 2)
    weights = task.examples["train"].weights
    assert weights is not None
    assert weights.mean() == pytest.approx(1.0)


def test_rows_of_another_dose_are_no_replicates(tmp_path):
    rows = with_others("CCO,1,10", "CCO,2,20", "CCO,4,20", more=",1")
    task = load(tmp_path, "smiles,y,dose", rows, replicates="mean", descriptor_columns=["dose"])
    assert sorted(values_of(task, "CCO")) == [1.0, 3.0]


def test_a_weight_that_is_none_is_named(tmp_path):
    for weight in ("", "-1", "heavy"):
        rows = with_others("CCO,1," + weight, "not a molecule,1,", more=",1")
        with pytest.raises(DataError, match=rf"a\.csv:2: `w` is `{weight}`; accepted: a number of 0 or more"):
            load(tmp_path, "smiles,y,w", rows, weight_column="w")


def test_scored_rows_with_bounds_are_counted_and_scored_on_their_wrong_side(tmp_path):
    """Errors of several columns are averaged in units of the deviations of the training rows' values."""
    parts = ["train"] * 12 + ["valid"] * 4 + ["test"] * 4
    rows = [f"{smiles},{'>' * (i % 4 == 0)}{i + 0.5},{i % 3},{parts[i]}" for i, smiles in enumerate(OTHERS)]
    task = load(tmp_path, "smiles,y,z,part", rows, split_column="part", split="scaffold")
    assert any(note.startswith("test: 1 of 4 rows have bounds") for note in task.notes)
    encoded = task.encode("test", word_level(["C", "O"]), 64)
    assert encoded.bounds is not None
    exact, low = ~np.isnan(encoded.targets[:, 0]), encoded.bounds[:, 0, 0]
    for predicted, errors in ((-1.0, low + 1), (100.0, np.where(exact, 100 - low, 0))):
        rmse = np.sqrt(np.mean(errors**2))
        assert encoded.score(np.full((1, 4, 1), predicted))["rmse"] == pytest.approx(rmse)
    truth = truth_columns("regression", ("y",), encoded.targets, encoded.bounds)["y_true"]
    assert [cell.startswith(">") for cell in truth] == (~exact).tolist()
    both = load(tmp_path, "smiles,y,z,part", rows, split_column="part", split="scaffold", label_columns=["y", "z"])
    scale = [np.std([i + 0.5 for i in range(12) if i % 4]), np.std([i % 3 for i in range(12)])]
    score = both.encode("test", word_level(["C", "O"]), 64).score(np.full((1, 4, 2), 100.0))
    of_z = np.sqrt(np.mean([(100 - i % 3) ** 2 for i in range(16, 20)]))
    assert score["standardised_rmse"] == pytest.approx((rmse / scale[0] + of_z / scale[1]) / 2)
    assert "rmse" not in score


def test_new_rows_have_logarithms_and_values_side_by_side(tmp_path):
    task = load(tmp_path, "smiles,y", [f"{smiles},{10.0 ** (i % 4)}" for i, smiles in enumerate(OTHERS)], log10=True)
    config = CsvTaskConfig(name="csv", label_columns=("y",), log10=True)
    (tmp_path / "new.csv").write_text("smiles,y\nCCO,>100\nCCN,10\nCCC,0\n")
    trained = TrainedTask(config, "smiles", "regression", task.output_names)
    rows = read_new_table(trained, tmp_path / "new.csv", None, SilentProgress())
    encoded = rows.encode(word_level(["C", "O", "N"]), 64)
    assert encoded.targets[1, 0] == pytest.approx(1.0)
    assert encoded.bounds is not None
    assert encoded.bounds[0, 0].tolist() == [2.0, math.inf]
    assert any("`y` is `0`" in note for note in rows.notes)
    assert any(note.startswith("1 of 3 rows have bounds") for note in rows.notes)
    columns = encoded.prediction_columns(np.array([[[1.0], [2.0], [-1.0]]]))
    assert columns == {"log10 y_predicted": ["1", "2", "-1"], "y_predicted": ["10", "100", "0.1"]}
