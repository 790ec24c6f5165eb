"""Numbers of a run come back from its files bit by bit; files of other rows, outputs or content are refused."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.predictions import (
    PREDICTIONS_FILE,
    PartRows,
    read_logits,
    read_predictions,
    read_rows,
    write_logits,
    write_predictions,
    write_rows,
)

NAMES = ("a", 'odd "name", b', "row")
"""A label may be called like a column of the file."""
ROWS: Any = {"valid": np.array([4, 7]), "test": np.array([0, 1, 9])}


@pytest.fixture
def predicted(tmp_path: Path) -> dict[Any, Any]:
    rng = np.random.default_rng(0)
    values: Any = {part: rng.normal(size=(len(rows), 3)) for part, rows in ROWS.items()}
    values["test"][1, 1] = math.nan
    write_predictions(tmp_path, NAMES, values, ROWS)
    return values


def test_predictions_come_back_bit_by_bit_whichever_parts_are_read(tmp_path, predicted):
    for parts in (["valid", "test"], ["valid"], ["test"]):
        found = read_predictions(tmp_path, NAMES, {part: ROWS[part] for part in parts}, "hint")
        assert list(found) == parts
        for part in parts:
            np.testing.assert_array_equal(found[part], predicted[part])


@pytest.mark.usefixtures("predicted")
def test_predictions_of_other_rows_or_outputs_are_refused(tmp_path):
    def refused(names: Any, rows: Any, said: str) -> None:
        with pytest.raises(CheckpointError, match=said) as caught:
            read_predictions(tmp_path, names, rows, "hint")
        assert caught.value.hint == "hint"

    refused(NAMES, {"test": np.array([1, 0, 9])}, "its rows are not those of the split")
    refused(("a", "b", "row"), ROWS, "not readable as numbers of a run: its columns are not part, row, predicted:a")
    path = tmp_path / PREDICTIONS_FILE
    whole = path.read_bytes()
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table, path)  # with dictionaries, by which a small file can be large in memory
    refused(NAMES, ROWS, "not readable as numbers of a run: it would be far larger in memory")
    path.write_bytes(whole[:-9])
    refused(NAMES, ROWS, "not readable as numbers of a run")
    path.unlink()
    refused(NAMES, ROWS, PREDICTIONS_FILE)


@pytest.mark.parametrize(("loss", "width"), [("binary", 3), ("classes", 1)])
def test_rows_come_back_with_what_is_known_of_each_part(tmp_path, loss, width):
    """Training rows have no similarity; a lone surrogate of a text is escaped, which no file may hold."""
    targets = np.array([[0.0] * width, [math.nan] * width])
    train = PartRows(np.array([5, 6]), targets, ["C,C", "a\rb"], ["line 7", "line 8"])
    test = PartRows(np.array([8, 9]), targets, ["x" * 200_000, "\ud83d"], [], np.array([0.25, 1.0]))
    write_rows(tmp_path, loss, NAMES, {3: {"train": train, "test": test}})
    found = read_rows(tmp_path, loss, NAMES)[3]
    assert list(found) == ["train", "test"]
    assert (found["train"].inputs, found["train"].places) == (("C,C", "a\rb"), ("line 7", "line 8"))
    assert (found["test"].inputs, found["test"].places) == (("x" * 200_000, "\\ud83d"), ())
    assert found["train"].similarity is None
    np.testing.assert_array_equal(found["test"].similarity, [0.25, 1.0])
    for part, wanted in (("train", train), ("test", test)):
        np.testing.assert_array_equal(found[part].rows, wanted.rows)
        np.testing.assert_array_equal(found[part].targets, targets)


def test_logits_come_back_by_window_in_single_precision(tmp_path):
    windows = [np.arange(6.0).reshape(3, 2) / 3, np.full((1, 2), -7.0), np.ones((2, 2))]
    write_logits(tmp_path, windows)
    found = read_logits(tmp_path, [3, 1, 2])
    assert [window.dtype for window in found] == [np.float64] * 3
    for window, wanted in zip(found, windows, strict=True):
        np.testing.assert_array_equal(window, wanted.astype(np.float32))


def test_logits_of_other_windows_are_refused(tmp_path):
    cell = tmp_path / "cells" / "single" / "split-0" / "seed-1"
    cell.mkdir(parents=True)
    write_logits(cell, [np.ones((3, 2))])
    with pytest.raises(CheckpointError, match=r"logits-valid\.npz: not the logits of these 2 windows$") as caught:
        read_logits(cell, [3, 1])
    assert caught.value.hint.endswith(f"`exlm finetune --resume {tmp_path}`")
