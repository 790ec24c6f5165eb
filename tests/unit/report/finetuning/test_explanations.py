"""Drawings of molecules are alike byte by byte and hold shapes alone; atoms have the colours of their changes."""

import csv
import io
import re
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path

import numpy as np

from exlm_cli.finetune.prediction.explain import AtomChanges
from exlm_cli.report.finetuning.explanations import LOWERS, RAISES, ExplainedRow, change_colours, explanation_files
from exlm_cli.report.style import MAX_DRAWN_ATOMS, draw_molecule

FOLDER = Path("out")


def explained(smiles, changes, truth, line=2):
    of_atoms = np.array(changes)
    return ExplainedRow(line, AtomChanges(smiles, of_atoms.sum(axis=0), of_atoms), np.array(truth))


def fills_of(svg):
    """Return the colour of the disc of each atom, by `atom-<place>`."""
    found = re.findall(r"<ellipse [^>]*class='(atom-\d+)'\s+style='fill:(#[0-9A-F]{6})", svg.decode())
    return dict(found)


def test_a_drawing_is_the_same_every_time_and_holds_no_text_of_others():
    panels = [("a<b>&\"'\x1b", {0: RAISES}), ("second", {})]
    drawn = draw_molecule("CC(=O)[O-].[Na+]", panels)
    assert drawn == draw_molecule("CC(=O)[O-].[Na+]", panels)
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(drawn).iter()}
    assert tags <= {"svg", "rect", "path", "ellipse"}
    assert fills_of(drawn) == {"atom-0": RAISES}


def test_what_is_too_large_or_no_molecule_is_not_drawn_and_a_metal_of_an_odd_valence_is():
    assert [draw_molecule(smiles) for smiles in ("C" * (MAX_DRAWN_ATOMS + 1), "C1CC", "")] == [None] * 3
    drawn = draw_molecule("C[Hg](C)(C)(C)C")
    assert b"bond-0" in drawn


def test_colours_grow_with_the_change_up_to_the_scale():
    assert change_colours([1.0, -2.0, 0.0, 0.5, float("nan")], 1.0) == {
        0: RAISES, 1: LOWERS, 2: "#FFFFFF", 3: change_colours([0.25], 0.5)[0],
    }  # fmt: skip
    assert change_colours([0.0], 0.0) == {0: "#FFFFFF"}


def test_values_are_drawn_and_listed_atom_by_atom():
    """A molecule that is too large is shown as its SMILES."""
    rows = [explained("CCO", [[0.5], [0.25], [-1.0]], [2.0]), explained("[H]Cl", [[0.0], [np.nan]], [np.nan], 7)]
    large = "C" * (MAX_DRAWN_ATOMS + 1)
    page_of = {"names": ("<b>logP",), "loss": "regression", "heading": "<b>new.csv", "num_rows": 30}
    page_of["predictor"] = "the <b>forest"
    found = explanation_files([explained(large, [[0.0]] * len(large), [np.nan])], FOLDER, **page_of)
    assert f"<p>{large}</p>" in found[FOLDER / "index.html"].decode()
    files = explanation_files(rows, FOLDER, **page_of)
    assert set(files) == {FOLDER / name for name in ("index.html", "atoms.csv", "line-2.svg", "line-7.svg")}
    fills = fills_of(files[FOLDER / "line-2.svg"])
    assert fills["atom-2"] == LOWERS
    assert fills["atom-0"] not in (RAISES, "#FFFFFF")
    table = list(csv.DictReader(io.StringIO(files[FOLDER / "atoms.csv"].decode())))
    assert [list(row.values()) for row in table] == [
        ["2", "CCO", "0", "C", "0.5"],
        ["2", "CCO", "1", "C", "0.25"],
        ["2", "CCO", "2", "O", "-1"],
        ["7", "[H]Cl", "0", "[H]", "0"],
        ["7", "[H]Cl", "1", "Cl", ""],
    ]
    page = files[FOLDER / "index.html"].decode()
    assert not re.search(r"<b>new|<b>logP|<b>forest|<script|https?://|<link", page)
    text = unescape(page)
    assert "The first 2 molecules of 30 that the model reads" in text
    assert "<b>logP: -0.2500, true 2" in text
    assert "Predictions are those of the <b>forest, as in the table." in text
    full = f"{np.quantile([0.0, 0.25, 0.5, 1.0], 0.95):.2g}"
    assert f"<b>logP: -{full}<" in text
    assert f"+{full}<" in text


def test_of_classes_the_predicted_one_is_drawn_and_of_many_labels_the_first_four():
    names = ("low", "middle", "high")
    row = explained("CO", [[0.5, -0.25, 0.125], [0.125, 0.375, 0.0]], [2.0])
    page_of = {"heading": "t", "num_rows": 1, "predictor": "the model"}
    files = explanation_files([row], FOLDER, names=names, loss="classes", **page_of)
    assert fills_of(files[FOLDER / "line-2.svg"])["atom-0"].startswith("#"), "`low` raises most"
    page = files[FOLDER / "index.html"].decode()
    assert "low: probability 0.625, true high" in page
    labels = tuple(f"label {number}" for number in range(6))
    row = explained("CO", [[0.0] * 6, [1.0] * 6], [1.0, 0.0, *[np.nan] * 4])
    files = explanation_files([row], FOLDER, names=labels, loss="binary", **page_of)
    page = files[FOLDER / "index.html"].decode()
    assert "label 3: probability 1.000<" in page
    assert "label 0: probability 1.000, true 1" in page
    assert "label 4: probability" not in page
    assert files[FOLDER / "atoms.csv"].decode().splitlines()[0].endswith("label 5_change")
