"""Usable rows of a table, and all rows of a file to predict: none is lost, and each that is not used has a reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.rows.splits import describe_repeats
from exlm_cli.tasks.rows.table import (
    InputRows,
    Table,
    read_input_rows,
    rows_of_list,
    usable_rows,
)
from tests.unit.finetune.finetuned_runs import write_rows

ALUMINIUM = "CC(=O)O[AlH3](O)O"


def usable(*texts: str, **config: Any) -> InputRows:
    table = Table(Path("a.csv"), {"x": texts}, tuple(range(2, 2 + len(texts))))
    return usable_rows(table, texts, CsvTaskConfig(name="csv", **config), SilentProgress())


def test_rows_that_cannot_be_used_are_skipped_with_their_reason_and_odd_metals_are_kept():
    rows = usable("CCO", "C1CC", ALUMINIUM, "")
    assert rows.rows.tolist() == [0, 2]
    assert [(row.row, row.text) for row in rows.skipped] == [("3", "C1CC"), ("5", "")]
    assert "line 3" in rows.notes[0]
    assert "line 4" in rows.notes[1]
    again = rows.without({0: "reason", 1: "another"}, "for a reason")
    assert (again.rows.tolist(), again.skipped[0].reason) == ([2], "reason")
    assert again.skipped[1:] == rows.skipped
    texts = usable("a", "", "b", text_column="x")
    assert (texts.rows.tolist(), texts.skipped[0].row) == ([0, 2], "3")


def test_the_split_decides_which_scaffolds_are_worked_out():
    isomers = ("C1C[C@H]2CCCC[C@@H]2C1", "C1C[C@H]2CCCC[C@H]2C1")
    for options, num_scaffolds in (
        ({"split": "scaffold"}, 2),
        ({"split": "scaffold-deepchem"}, 1),
        ({"split": "random"}, 0),
        ({"split_column": "part"}, 0),
    ):
        molecules = usable(*isomers, **options).molecules or ()
        assert len({molecule.scaffold for molecule in molecules} - {None}) == num_scaffolds


def test_a_bad_row_stops_where_the_recipe_says_so_and_bad_rows_alone_always():
    for texts, options, place, hint in (
        (("CC", "C1CC"), {"on_invalid": "error"}, "a.csv:3: not a molecule: ", "`--set task.on_invalid=skip`"),
        (("", ""), {"text_column": "x"}, "a.csv:2: ", "none of the 2 rows"),
    ):
        with pytest.raises(DataError, match=f"^{place}") as caught:
            usable(*texts, **options)
        assert hint in caught.value.hint


def test_map_numbers_make_no_other_molecule():
    """Not in keys, scaffolds, notes or the model's input."""
    one, other = "[CH3:1][c:2]1[cH:3][cH:4][cH:5][cH:6][n:7]1", "[CH3:7][c:6]1[cH:5][cH:4][cH:3][cH:2][n:1]1"
    rows = usable(one, "CCO", other, "CCC")
    indices: Any = {"train": np.array([0, 1]), "valid": np.array([2, 3])}
    assert describe_repeats(rows, indices, np.array([[1.0], [0.0], [0.0], [1.0]])) == [
        "1 molecule in more than one split: line 2 (train) = line 4 (valid)",
        "1 molecule with different labels in different rows: line 2 and line 4",
    ]
    assert rows.keys == ("Cc1ccccn1", "CCO", "Cc1ccccn1", "CCC")
    assert [molecule.scaffold for molecule in rows.molecules or ()] == ["c1ccncc1", "", "c1ccncc1", ""]


def test_salts_are_noted_and_so_are_forms_of_one_molecule_in_different_splits():
    texts = ("CCN", "CCO", "C[CH2:1][NH3+].[Cl-]", "CCN.Cl", "OC(=O)C.O", "CC(=O)[O-].[Na+]", "CCN")
    rows = usable(*texts)
    assert "lines 4, 5, 6, 7" in rows.notes[0]
    targets = np.zeros((7, 1))
    indices: Any = {"train": np.array([0, 1, 4, 5]), "valid": np.array([2]), "test": np.array([3])}
    (note,) = describe_repeats(rows, indices, targets)
    assert note.startswith("1 molecule in different forms")
    assert "line 2 (train) and line 4 (valid) and line 5 (test)" in note
    # the same form in two splits is one molecule in two splits, and two forms in one split are no leak
    same: Any = {"train": np.array([0, 2, 3]), "valid": np.array([6])}
    assert len(describe_repeats(rows, same, targets)) == 2
    alone: Any = {"train": np.array([0, 2, 3]), "valid": np.array([1])}
    assert describe_repeats(rows, alone, targets) == []

    parents = usable(*texts, standardise="parent")
    assert parents.keys == ("CCN", "CCO", "CCN", "CCN", *["CC(=O)O"] * 2, "CCN")
    assert describe_repeats(parents, indices, targets) == [
        "1 molecule in more than one split: line 2 (train) = line 4 (valid) = line 5 (test)"
    ]
    listed = rows_of_list([(text,) for text in texts], "smiles", SilentProgress(), reads_parents=True)
    assert (listed.keys, len(listed.notes)) == (parents.keys, 1)


def test_the_column_is_the_one_named_else_the_usual_one_else_the_plausible_one(tmp_path):
    path = write_rows(tmp_path / "a.csv", ["mine", "SMILES"], [["C", "CC"]])
    note = "read the column `SMILES`: a.csv has no `other`, which the run was trained on"
    for given, usual, taken, notes in (
        (("SMILES",), "mine", "CC", ()), ((), "mine", "C", ()), ((), "other", "CC", (note,)),
    ):  # fmt: skip
        rows = read_input_rows(path, "smiles", SilentProgress(), columns=given, usual_columns=(usual,))
        assert (rows.inputs, rows.notes) == ((taken,), notes)


def test_rows_that_cannot_be_read_stay_with_their_reason(tmp_path):
    path = write_rows(tmp_path / "a.csv", ["smiles", "n"], [["C1=CC=CC=C1O", "1"], ["", "2"], ["((", "3"]])
    rows = read_input_rows(path, "smiles", SilentProgress())
    assert [bool(problem) for problem in rows.problems] == [False, True, True]
    assert rows.texts(canonical=True) == [("Oc1ccccc1",), ("",), ("((",)]
    assert rows.texts(canonical=False) == [("C1=CC=CC=C1O",), ("",), ("((",)]
    text = write_rows(tmp_path / "b.csv", ["text", "n"], [["a", ""], ["", "b"]])
    assert read_input_rows(text, "text", SilentProgress()).problems == ("", "the text is empty")
    (tmp_path / "c.txt").write_text("  a \nb\n")
    assert read_input_rows(tmp_path / "c.txt", "text", SilentProgress()).inputs == ("a", "b")  # as from a CSV or a list


def test_smarts_and_selfies_that_read_as_molecules_have_a_warning():
    rows = usable("[#6]-[#6]", "[C][C][O]", "CCO", "[#6]-[#8]")
    assert "warning: 3 of 4 molecules have radicals, and no hydrogen on any carbon: lines 2, 3, 5" in rows.notes[0]


def test_a_racemate_of_a_smi_file_is_not_read_as_one_enantiomer(tmp_path):
    """Other names and extensions leave the SMILES what it is."""
    lines = ["C[C@H](N)O |&1:1|", "C[C@H](N)O |a:1| m1", "C[C@H](N)F |o1:1,r| m2", "CCO |(1,2,;3,4,)|", "CCN |x"]
    path = tmp_path / "a.smi"
    path.write_text("\n".join(lines))
    rows = read_input_rows(path, "smiles", SilentProgress())
    assert [problem[:8] for problem in rows.problems] == ["CXSMILES", "", "CXSMILES", "", ""]
    assert rows.inputs[1] == "C[C@H](N)O"
    assert rows.table.columns["name"][2] == "m2"
