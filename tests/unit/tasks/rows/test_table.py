"""Every accepted format of table reads alike, with the lines of its rows; every fault is reported with its place."""

import re
from pathlib import Path

import pytest

from exlm_cli.errors import DataError
from exlm_cli.tasks.rows.table import Table, read_table

CSV = b'smiles,Class,note\nCCO, 1 ,"two\nlines, a comma"\n\nCCN,0,\n'


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_csv_gives_columns_and_the_lines_of_its_rows(tmp_path):
    table = read_table(written(tmp_path, "a.csv", CSV))
    assert table.columns == {"smiles": ("CCO", "CCN"), "Class": ("1", "0"), "note": ("two\nlines, a comma", "")}
    assert table.lines == (2, 5)  # the quoted line end makes the first row two lines long, line 4 is empty
    assert len(table) == 2
    assert table.where(1) == f"{tmp_path}/a.csv:5"


def test_columns_without_a_name_keep_their_cells(tmp_path):
    """The first has none; each further one has that of its place, also for a spreadsheet's empty columns at the end."""
    table = read_table(written(tmp_path, "a.csv", b",smiles, ,y,\n0,CCO,a,1,\n1,CCN,b,0,c\n"))
    assert table.columns == {
        "": ("0", "1"), "smiles": ("CCO", "CCN"), "column 3": ("a", "b"), "y": ("1", "0"), "column 5": ("", "c"),
    }  # fmt: skip


def test_tsv_is_quoted_as_csv_is(tmp_path):
    table = read_table(written(tmp_path, "a.tsv", b'text\ty\n"He said ""hi"" to me"\t1\n"a\ttab"\t0\n'))
    assert table.columns == {"text": ('He said "hi" to me', "a\ttab"), "y": ("1", "0")}


def test_lines_are_a_table_where_they_are_asked_for(tmp_path):
    path = written(tmp_path, "a.txt", b"CCO ethanol\n\nC\tNSC 1 \n\tNSC 2\n C\n")
    table = read_table(path, bare="text")
    assert table.columns == {"text": ("CCO ethanol", "C\tNSC 1", "\tNSC 2", " C")}
    assert table.lines == (1, 3, 4, 5)
    # an empty SMILES is no molecule, whatever follows the tab
    table = read_table(path, bare="smiles")
    assert table.columns == {"smiles": ("CCO", "C", "", "C"), "name": ("ethanol", "NSC 1", "NSC 2", "")}
    assert read_table(written(tmp_path, "b.smi", b"CCO\nC\n"), bare="smiles").columns == {"smiles": ("CCO", "C")}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x,y\n", ": there is a header and no row below it"),
        ("a.csv", b"x,y\nC,1\nCCO\n", ":3: the row has 1 cell, expected 2"),
        ("a.csv", b"x,y\nC,1\nCCO,1,2\n", ":3: the row has 3 cells, expected 2"),
        ("a.tsv", b"x\ty\nC\t1\nCCO\t1\t2\n", ":3: the row has 3 cells, expected 2"),
        ("a.txt", b"x\n", ": not a table that can be read; accepted are .csv .tsv, also with .gz"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, content, message):
    path = written(tmp_path, name, content)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}{message}')}$"):
        read_table(path)


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        (("Smiles", "y"), "a.csv: no column `smiles`; there are `Smiles`, `y`", "did you mean `Smiles`?"),
        (("mol", "y"), "a.csv: no column `smiles`; there are `mol`, `y`", "name one"),
        (("smiles;y",), "a.csv: no column `smiles`; the header seems to be separated by semicolons, not by commas",
         "write the file with commas as .csv, or with tabs as .tsv"),
        (tuple(f"t{i}" for i in range(14)),
         "a.csv: no column `smiles`; there are " + ", ".join(f"`t{i}`" for i in range(12)) + " and 2 more", "name one"),
    ],
)  # fmt: skip
def test_a_missing_column_is_told_with_the_nearest(names, message, hint):
    with pytest.raises(DataError, match=f"^{re.escape(message)}$") as caught:
        Table(Path("a.csv"), dict.fromkeys(names, ()), ()).column("smiles", "name one")
    assert caught.value.hint == hint


def test_joined_tables_know_which_file_a_row_is_from():
    first = Table(Path("x/a.csv"), {"y": ("1", "0"), "z": ("", "")}, (2, 4))
    second = Table(Path("x/b.csv"), {"z": ("q",), "y": ("2",)}, (3,))
    joined = first.joined_with(second).joined_with(second)
    assert joined.columns == {"y": ("1", "0", "2", "2"), "z": ("", "", "q", "q")}
    assert [joined.where(row) for row in range(4)] == ["x/a.csv:2", "x/a.csv:4", "x/b.csv:3", "x/b.csv:3"]
    assert [joined.short_place(row) for row in (1, 2)] == ["a.csv:4", "b.csv:3"]
    assert first.short_place(1) == "line 4"
    skipped = joined.skipped(2, "the text", "a reason")
    assert (str(skipped), skipped.cells) == ("x/b.csv:3: a reason", ("x/b.csv", "3", "a reason", "the text"))
