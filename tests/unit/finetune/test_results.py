"""Predictions and logits of a run are read back as they were written, and known rows are counted by hand."""

import csv
import math

import numpy as np
import pytest

from exlm_cli.errors import CheckpointError
from exlm_cli.finetune.results import count_known_rows, read_logits, read_predictions, write_logits
from exlm_cli.tasks.base import write_outputs


def test_rows_are_counted_by_their_known_targets():
    """Counted by hand: targets that are NaN are not known, and a class may have no row."""
    nan = math.nan
    labels = np.array([[0, 1, nan], [0, nan, nan], [1, 1, nan]])
    assert count_known_rows("binary", labels, 3) == ((2, 1), (0, 2), (0, 0))
    assert count_known_rows("classes", np.array([[2.0], [0.0], [nan], [2.0]]), 4) == ((1, 0, 2, 0),)
    assert count_known_rows("regression", labels, 3) == ((3,), (2,), (0,))
    assert count_known_rows("span", np.zeros((4, 2)), 2) == ()


def test_predictions_are_a_csv_that_gives_the_numbers_back(tmp_path):
    path = tmp_path / "predictions-test.csv"
    write_outputs(path, [4, 7], ["a", 'odd "name", b'], [np.array([0.1, 1 / 3]), np.array([1.0, math.nan])])
    assert path.read_text() == f'row,a,"odd ""name"", b"\n4,0.1,{1 / 3!r}\n7,1.0,nan\n'
    rows, values = read_predictions(path, "hint")
    assert rows == [4, 7]
    np.testing.assert_array_equal(values, [[0.1, 1 / 3], [1.0, math.nan]])
    write_outputs(path, [4], ["a"], [np.array([0.5])], {"a_true": [""], "input": ["C,C"]})
    assert path.read_text() == 'row,a,a_true,input\n4,0.5,,"C,C"\n'
    assert read_predictions(path, "hint", num_columns=1) == ([4], np.array([[0.5]]))
    write_outputs(path, [], ["a", "b"], [])
    assert read_predictions(path, "hint")[1].shape == (0, 2)


def test_predictions_of_long_texts_and_of_texts_with_line_ends_are_read_back(tmp_path):
    """A process that has read no table of the user's has Python's limit of 131,072 characters a field."""
    before = csv.field_size_limit(131_072)
    try:
        texts = ["x" * 200_000, "a\rb"]
        write_outputs(tmp_path / "p.csv", [4, 7], ["a"], [np.array([0.5])] * 2, {"input": texts})
        assert read_predictions(tmp_path / "p.csv", "hint", num_columns=1)[0] == [4, 7]
    finally:
        csv.field_size_limit(before)


@pytest.mark.parametrize(
    "content", [None, "", "row,a\n1,x\n", "row,a\nx,1.0\n", "row,a,b\n1,1.0\n", "row,a,b\n1,1.0\n2,1.0,1.0\n"]
)
def test_altered_predictions_are_refused(tmp_path, content):
    path = tmp_path / "predictions-test.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=f"^{path}: not readable as predictions: ") as caught:
        read_predictions(path, "hint")
    assert caught.value.hint == "hint"


def test_logits_come_back_by_window_in_single_precision(tmp_path):
    windows = [np.arange(6.0).reshape(3, 2) / 3, np.full((1, 2), -7.0), np.ones((2, 2))]
    write_logits(tmp_path, windows)
    found = read_logits(tmp_path, [3, 1, 2])
    assert [window.dtype for window in found] == [np.float64] * 3
    for window, wanted in zip(found, windows, strict=True):
        np.testing.assert_array_equal(window, wanted.astype(np.float32))


def test_logits_that_are_altered_missing_or_of_other_windows_are_refused(tmp_path):
    cell = tmp_path / "cells" / "single" / "split-0" / "seed-1"
    cell.mkdir(parents=True)
    path, windows = cell / "logits-valid.npy", [np.ones((3, 2))]

    def refused(lengths: list[int], said: str) -> None:
        with pytest.raises(CheckpointError, match=rf"^{path}: {said}") as caught:
            read_logits(cell, lengths)
        assert caught.value.hint.endswith(f"`exlm finetune --resume {tmp_path}`")

    refused([3], "")
    write_logits(cell, windows)
    refused([3, 1], "not the logits of these 2 windows$")
    np.save(path, windows[0])  # float64
    refused([3], "not the logits of these 1 windows$")
    path.write_bytes(path.read_bytes()[:-1])
    refused([3], "not readable as logits: ")
