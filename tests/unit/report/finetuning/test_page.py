"""The page of a run: its content, escaped and in one file, and which rows it shows."""

import re
import shlex
import shutil
from html import unescape

import numpy as np
import pytest

from exlm_cli.finetune.evaluation.calibration import Calibration, ConformalResiduals
from exlm_cli.finetune.results import FinetunedRun, read_results
from exlm_cli.report.finetuning.page import NUM_CARDS, ShownRows, write_page
from tests.unit.report.results import predicted_rows, svg_texts


@pytest.fixture(scope="module")
def page(molecules, tmp_path_factory):
    """Write the page of a run of two seeds and two labels, whose table, folder, label, note and verdict have tags."""
    run = shutil.copytree(molecules, tmp_path_factory.mktemp("page") / "<my run>")
    recipe = (run / "recipe.yaml").read_text(encoding="utf-8")
    (run / "recipe.yaml").write_text(recipe.replace("assay.csv", "<x>.csv").replace("toxic", "<x>toxic"))
    said = {"notes": ("cut `a<b` of the rows",), "verdict": ("The model is <better>.",)}
    return write_page(FinetunedRun("run", run, read_results(run).model_copy(update=said)))


def test_a_page_holds_everything_and_names_no_other_file(page):
    text = page.read_text(encoding="utf-8")
    assert all(said in text for said in ("The model is &lt;better&gt;.", "roc_auc", "<code>a&lt;b</code>"))
    assert f"exlm predict {shlex.quote(str(page.parent))} FILE --explain\n" in unescape(text)
    assert not re.search(r"<x>|<script|https?://|<link", text)
    assert "<title>&lt;x&gt;.csv: active, &lt;x&gt;toxic: &lt;my run&gt;</title>" in text
    assert "<h1>&lt;x&gt;.csv: active, &lt;x&gt;toxic</h1>" in text
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    headings = {"Scores", "Scores of each label", "Worst predicted molecules", "Notes"}
    assert headings <= {heading.removesuffix(", test") for heading in re.findall("<h2>(.*?)</h2>", text)}
    assert re.search('<tr><td>toxic</td><td class="number">', text)


def test_page_and_pictures_say_which_split_they_are_of(page):
    assert "57/7/8 rows in train, valid, test (random split 0)" in page.read_text(encoding="utf-8")
    drawn = {path.stem: " ".join(svg_texts(path)) for path in (page.parent / "report").glob("*.svg")}
    assert {"labels", "error-by-distance", "test-curves", "test-calibration"} <= drawn.keys()
    assert all("random split" in texts for texts in drawn.values())


UNCALIBRATED = Calibration(outputs=(None,))
WITHIN_HALF = Calibration(outputs=(ConformalResiduals(residuals=((0.5,) * 20,)),))


def test_the_largest_errors_are_shown_and_apart_from_them_those_near_the_training_molecules():
    """Every second row is a training molecule; of its errors, two are in the largest quarter of all."""
    row_N = np.arange(40)
    errors = np.select([row_N % 10 == 0, row_N % 2 == 0, row_N < 16], [1.0, 0.1, 2.0], 0.5) + row_N / 1000
    known = {
        "similarity": np.where(row_N % 2, 0.2, 1.0),
        "inputs": ["CCO"] * 40,
        "places": [f"line {n}" for n in row_N],
    }
    rows = predicted_rows("regression", ("logS",), np.zeros((1, 40, 1)), errors[:, None], WITHIN_HALF, **known)
    shown = ShownRows(rows, is_molecule=True)
    by_error = sorted(range(40), key=lambda row: -errors[row])
    assert shown.worst() == [(row, 0) for row in by_error[:NUM_CARDS]]
    assert shown.surprising() == (1.0, [(30, 0), (20, 0)])
    (card,) = shown.cards([(30, 0)])
    assert card.lines == [
        "true 1.0300, predicted 0.0000, 90 % interval -0.5000 to 0.5000", "nearest training molecule: 1.00",
        "line 30 of the file", "CCO",
    ]  # fmt: skip
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
