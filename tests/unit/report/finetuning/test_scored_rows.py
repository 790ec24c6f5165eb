"""Which rows a page shows: the largest errors of all, and those near the training molecules; how each is described."""

from pathlib import Path

import numpy as np
import pytest

from exlm_cli.finetune.evaluation.calibration import Calibration
from exlm_cli.report.finetuning.figures import draw_errors
from exlm_cli.report.finetuning.page import NUM_CARDS, ShownRows
from tests.unit.report.results import predicted_rows

UNCALIBRATED = Calibration(outputs=(None,))


def values(errors, **known):
    rows = predicted_rows(
        "regression", ("logS",), np.zeros((1, len(errors), 1)), errors[:, None], UNCALIBRATED, **known
    )
    return ShownRows(rows, is_molecule=True)


def test_the_largest_errors_are_shown_and_apart_from_them_those_near_the_training_molecules():
    """Every second row is a training molecule; of its errors, two are in the largest quarter of all."""
    row_N = np.arange(40)
    errors = np.select([row_N % 10 == 0, row_N % 2 == 0, row_N < 16], [1.0, 0.1, 2.0], 0.5) + row_N / 1000
    shown = values(
        errors, similarity=np.where(row_N % 2, 0.2, 1.0), inputs=["CCO"] * 40, places=[f"line {n}" for n in row_N]
    )
    by_error = sorted(range(40), key=lambda row: -errors[row])
    assert shown.worst() == [(row, 0) for row in by_error[:NUM_CARDS]]
    assert shown.surprising() == (1.0, [(30, 0), (20, 0)])
    (card,) = shown.cards([(30, 0)])
    assert card.lines == [
        "true 1.0300, predicted 0.0000",
        "nearest training molecule: 1.00",
        "line 30 of the file",
        "CCO",
    ]
    assert card.drawing is not None
    assert b"class='bond-0" in card.drawing


def test_rows_that_are_predicted_right_are_not_among_the_worst():
    """Of classes each row once; of labels those whose probability is on the wrong side."""
    mean = np.tile([0.5, 0.25, 0.25], (6, 1))
    mean[2], mean[4], truth = [0.375, 0.5, 0.125], [0.125, 0.125, 0.75], np.zeros((6, 1))
    truth[5] = np.nan
    names = ("red", "green", "blue")
    rows = ShownRows(
        predicted_rows("classes", names, mean[None], truth, UNCALIBRATED, inputs=["a text"] * 6), is_molecule=False
    )
    assert rows.worst() == [(4, 0), (2, 0)]
    (card,) = rows.cards([(4, 0)])
    assert (card.drawing, card.text, card.lines) == (None, "a text", ["true red (0.125), predicted blue (0.750)"])
    labels = predicted_rows("binary", names, mean[None], np.array([[0.0, 1.0, np.nan]] * 6), UNCALIBRATED)
    assert ShownRows(labels, is_molecule=False).worst()[:2] == [(4, 1), (0, 1)]


@pytest.mark.parametrize(("num_rows", "num_lines"), [(9, 1), (10, 2)])
def test_the_mean_of_fewer_than_ten_errors_has_no_interval(figures, num_rows, num_lines):
    """A line for the mean of the only bin, and one for its interval."""
    draw_errors(values(np.ones(num_rows), similarity=np.ones(num_rows)), Path(), "error", "test")
    (axes,) = figures["error-by-distance"].axes
    assert len(axes.lines) == num_lines
