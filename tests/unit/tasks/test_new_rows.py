"""No row of a table is lost on its way into a model; which column is read follows from names."""

from pathlib import Path

import pytest

from exlm_cli.errors import DataError
from exlm_cli.progress import SilentProgress
from exlm_cli.tasks.new_rows import read_new_rows
from tests.unit.finetune.finetuned_runs import write_rows


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
    rows = read_new_rows(path, "smiles", SilentProgress(), column=given, usual_column=usual)
    assert rows.column == taken


def test_rows_that_cannot_be_read_stay_with_their_reason(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "a.csv", ["smiles", "n"], [["CCO", "1"], ["", "2"], ["((", "3"], ["C(C)(C)(C)(C)C", ""]]
    )
    rows = read_new_rows(path, "smiles", SilentProgress())
    assert rows.readable.tolist() == [0]
    assert rows.problems[0] == ""
    assert all(rows.problems[1:])
    text = read_new_rows(
        write_rows(tmp_path / "b.csv", ["text", "n"], [["a", ""], ["", "b"]]), "text", SilentProgress()
    )
    assert text.problems == ("", "is empty")


def test_two_spellings_of_a_molecule_are_one_to_a_model_of_canonical_smiles(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.csv", ["smiles"], [["C1=CC=CC=C1O"], ["Oc1ccccc1"], ["(("]])
    rows = read_new_rows(path, "smiles", SilentProgress(), canonical_smiles=True)
    assert rows.texts == ("Oc1ccccc1", "Oc1ccccc1", "((")
    assert rows.table.columns["smiles"] == ("C1=CC=CC=C1O", "Oc1ccccc1", "((")
    assert read_new_rows(path, "smiles", SilentProgress()).texts == rows.table.columns["smiles"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "{path}: the file is empty"),
        ("a.csv", "smiles\n", "{path}: there is a header and no row below it"),
        ("a.csv", "smiles,smiles\nC,C\n", "{path}: the header names column `smiles` twice"),
        ("a.csv", "a,b\nC,C\n",
         "{path}: which column holds the smiles? There are `a`, `b`; none of them is named like it"),
        ("a.smi", "\n", "{path}: the file is empty"),
        ("a.xlsx", "x", "{path}: not a table that can be read; accepted are .csv .tsv .txt .smi, also with .gz or .xz"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_new_rows(path, "smiles", SilentProgress())
    assert caught.value.message == message.format(path=path)


def test_a_missing_file_or_column_names_what_is_there(tmp_path: Path) -> None:
    for name in ("none.csv", "none.smi"):
        with pytest.raises(DataError, match=f"{name}: .*[Nn]o such file"):
            read_new_rows(tmp_path / name, "smiles", SilentProgress())
    path = write_rows(tmp_path / "a.csv", ["smiles"], [["C"]])
    with pytest.raises(DataError) as caught:
        read_new_rows(path, "smiles", SilentProgress(), column="smile")
    assert caught.value.message == f"{path}: no column `smile`; there are `smiles`"
    assert caught.value.hint == "did you mean `smiles`?"
