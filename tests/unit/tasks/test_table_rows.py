"""Usable rows of a table, and all rows of a file to predict: none is lost, and each that is not used has a reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.tasks import CsvTaskConfig
from exlm_cli.data.rows.table import Table
from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.table_rows import describe_repeats, read_input_rows, usable_molecules, usable_texts
from tests.unit.finetune.finetuned_runs import write_rows

ALUMINIUM = "CC(=O)O[AlH3](O)O"


def table_of(*texts: str) -> Table:
    return Table(Path("a.csv"), {"x": texts}, tuple(range(2, 2 + len(texts))))


def molecules(*smiles: str, **config: Any) -> Any:
    table = table_of(*smiles)
    return usable_molecules(table, table.columns["x"], CsvTaskConfig(name="csv", **config), SilentProgress())


def test_rows_that_are_not_molecules_are_skipped_with_their_reason_and_odd_metals_are_kept() -> None:
    usable = molecules("CCO", "C1CC", ALUMINIUM, "")
    assert usable.rows.tolist() == [0, 2]
    assert [(row.row, row.text) for row in usable.skipped] == [("3", "C1CC"), ("5", "")]
    assert "left out 2 of 4 rows" in usable.notes[0]
    assert "line 3" in usable.notes[0]
    assert "lines 4" in usable.notes[1]
    again = usable.without([0, 1], lambda row: f"reason {row}")
    assert (again.rows.tolist(), again.skipped[2:], again.notes) == (
        [2], (usable.table.skipped(0, "CCO", "reason 0"),), usable.notes
    )  # fmt: skip


def test_the_split_decides_which_scaffolds_are_worked_out() -> None:
    isomers = ("C1C[C@H]2CCCC[C@@H]2C1", "C1C[C@H]2CCCC[C@H]2C1")
    for split, num_scaffolds in (("scaffold", 2), ("scaffold-deepchem", 1), ("scaffold-balanced", 1), ("random", 1)):
        usable = molecules(*isomers, split=split)
        assert len({molecule.scaffold for molecule in usable.molecules}) == num_scaffolds
        assert (usable.molecules[0].scaffold is None) == (split == "random")


def test_empty_texts_are_skipped() -> None:
    usable = usable_texts(table_of("a", "", "b"), ("a", "", "b"), CsvTaskConfig(name="csv"))
    assert (usable.rows.tolist(), usable.skipped[0].row) == ([0, 2], "3")
    assert usable.notes == ("left out 1 rows with an empty text: lines 3",)


@pytest.mark.parametrize("on_invalid", ["error", "skip"])
def test_a_bad_row_stops_where_the_recipe_says_so_and_bad_rows_alone_always(on_invalid: Any) -> None:
    rows = ("C1CC", "C1CC") if on_invalid == "skip" else ("CC", "C1CC")
    with pytest.raises(DataError, match=rf"^a\.csv:{2 if on_invalid == 'skip' else 3}: ") as caught:
        molecules(*rows, on_invalid=on_invalid)
    assert "`task.on_invalid=skip`" in caught.value.hint
    texts = ("", "") if on_invalid == "skip" else ("a", "")
    with pytest.raises(DataError, match=r"^a\.csv:[23]: the text is empty"):
        usable_texts(table_of(*texts), texts, CsvTaskConfig(name="csv", on_invalid=on_invalid))


def test_the_model_reads_canonical_smiles_where_asked_to() -> None:
    usable = molecules("C1=CC=CC=C1O", "((")
    assert usable.model_inputs(canonical=True) == ("Oc1ccccc1", "((")
    assert usable.model_inputs(canonical=False) == ("C1=CC=CC=C1O", "((")


def test_molecules_in_two_splits_and_with_different_labels_are_noted() -> None:
    usable = molecules("CCO", "OCC", "CCN", "NCC", "C")
    indices: Any = {"train": np.array([0, 2]), "valid": np.array([1, 3]), "test": np.array([4])}
    targets = np.array([[1.0, np.nan], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    assert describe_repeats(usable, indices, targets) == [
        "2 molecules are in more than one split: line 2 (train) = line 3 (valid), line 4 (train) = line 5 (valid)",
        "1 molecules occur more than once with different labels: lines 4 and 5",
    ]


@pytest.mark.parametrize(
    ("columns", "given", "usual", "taken"),
    [
        (["id", "smiles"], None, None, "smiles"),
        (["mine", "smiles"], None, "mine", "mine"),
        (["mine", "smiles"], "smiles", "mine", "smiles"),
        (["id", "SMILES"], None, "mine", "SMILES"),
    ],
)
def test_the_column_is_the_one_named_else_the_usual_one_else_the_plausible_one(
    tmp_path: Path, columns: list[str], given: str | None, usual: str | None, taken: str
) -> None:
    path = write_rows(tmp_path / "a.csv", columns, [["C", "CC"]])
    rows = read_input_rows(path, "smiles", SilentProgress(), column=given, usual_column=usual)
    assert rows.column == taken


def test_rows_that_cannot_be_read_stay_with_their_reason(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", ["smiles", "n"], [["C1=CC=CC=C1O", "1"], ["", "2"], ["((", "3"]])
    rows = read_input_rows(path, "smiles", SilentProgress(), canonical_smiles=True)
    assert rows.readable.tolist() == [0]
    assert [bool(problem) for problem in rows.problems] == [False, True, True]
    assert rows.inputs == ("Oc1ccccc1", "", "((")
    assert read_input_rows(path, "smiles", SilentProgress()).inputs == rows.table.columns["smiles"]
    text = write_rows(tmp_path / "b.csv", ["text", "n"], [["a", ""], ["", "b"]])
    assert read_input_rows(text, "text", SilentProgress()).problems == ("", "is empty")


@pytest.mark.parametrize(("column", "given"), [(None, "which column holds the smiles"), ("smile", "no column `smile`")])
def test_a_missing_column_is_named(tmp_path: Path, column: str | None, given: str) -> None:
    path = write_rows(tmp_path / "a.csv", ["smiles" if column else "x"], [["C"]])
    with pytest.raises(DataError, match=given):
        read_input_rows(path, "smiles", SilentProgress(), column=column)
