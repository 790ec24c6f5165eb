"""Every accepted format of table reads alike, with the lines of its rows; every fault is reported with its place."""

import re
from pathlib import Path

import pandas as pd
import pytest

from exlm_cli.errors import DataError
from exlm_cli.tasks.rows.table import Table, describe_other_molecules, read_table, with_points


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_lines_are_a_table_where_they_are_asked_for(tmp_path):
    path = written(tmp_path, "a.txt", b"CCO ethanol\n\nC\tNSC 1 \n\tNSC 2\n C\n")
    table = read_table(path, bare="text")
    assert table.columns == {"text": ("CCO ethanol", "C\tNSC 1", "\tNSC 2", " C")}
    assert table.lines == (1, 3, 4, 5)
    # an empty SMILES is no molecule, whatever follows the tab
    table = read_table(path, bare="smiles")
    assert table.columns == {"smiles": ("CCO", "C", "", "C"), "name": ("ethanol", "NSC 1", "NSC 2", "")}
    assert read_table(written(tmp_path, "b.smi", b"CCO\nC\n"), bare="smiles").columns == {"smiles": ("CCO", "C")}


def test_a_file_that_is_no_table_is_refused(tmp_path):
    """Where a row has a cell more than the header, the hint names how R writes the names of rows."""
    for name, content, message, hint in (
        ("a.csv", b"x,y\n", ": there is a header and no row below it", "give a file that has rows"),
        ("a.csv", b"x,y\nC,1\nCCO\n", ":3: the row has 1 cell", "must be quoted"),
        ("a.csv", b'"x","y"\n"m1","C",1\n', ":2: the row has 3 cells", "`row.names=FALSE`"),
        ("a.txt", b"x\n", ": not a table", "convert"),
    ):
        path = written(tmp_path, name, content)
        with pytest.raises(DataError, match=f"^{re.escape(f'{path}{message}')}") as caught:
            read_table(path)
        assert hint in caught.value.hint


def test_a_missing_column_is_told_with_the_nearest():
    for names, told, hint in (
        (("Smiles", "y"), "`Smiles`, `y`", "did you mean `Smiles`?"),
        (tuple(f"t{i}" for i in range(14)), "`t11` and 2 more", "name one"),
    ):
        with pytest.raises(DataError, match=f"^a.csv: no column `smiles`; .*{told}") as caught:
            Table(Path("a.csv"), dict.fromkeys(names, ()), ()).column("smiles", "name one")
        assert hint in caught.value.hint


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


def test_a_table_of_parquet_is_its_csv(tmp_path):
    """Numbers, dates, missing values and truth values become the text that pandas writes; places are records."""
    frame = pd.DataFrame(
        {
            "smiles": ["C", "CC", None],
            "y": [0.1, float("nan"), 1e-7],
            "n": pd.array([1, None, 3], dtype="Int64"),
            "is_hit": [True, False, True],
            "when": pd.to_datetime(["2024-01-02", None, "2023-01-01"]),
        }
    )
    path = tmp_path / "a.parquet"
    frame.to_parquet(path)
    table = read_table(path)
    (tmp_path / "a.csv").write_text(frame.to_csv(index=False, date_format="%Y-%m-%dT%H:%M:%S"))
    theirs = read_table(tmp_path / "a.csv").columns
    assert table.columns == {**theirs, "is_hit": tuple(cell.lower() for cell in theirs["is_hit"])}
    assert (table.where(1), table.short_place(1)) == (f"{path}, record 2", "record 2")
    assert table.short_places([0, 2]) == "records 1, 3"


MOLECULES = ("CC#N", "CS(C)=O", "CC#N", "CCO", "O")


@pytest.mark.parametrize(
    ("cells", "is_noted"),
    [
        (MOLECULES, True),
        (("CCO.Cl", "CCN.Br", "", "CCC.I", "CCCC"), True),
        (("C", "N", "O", "C", "N"), False),
        (("CCO", "CCN", "M1", "CCC", "CCCC"), False),
        (("", "", "", "", ""), False),
    ],
)
def test_a_second_column_of_molecules_is_noted(cells, is_noted):
    table = Table(Path("a.csv"), {"smiles": MOLECULES, "other": cells}, (2, 3, 4, 5, 6))
    assert len(describe_other_molecules(table, "smiles")) == is_noted


@pytest.mark.parametrize(
    ("cells", "points"),
    [
        (("4,51", "4,4", "5"), ("4.51", "4.4", "5")),
        (("1,355", "2,5", "3"), ("1.355", "2.5", "3")),
        (("1,355", "2,118", "3"), None),  # may be thousands
        (("1,5", "2.5", "3"), None),
        (("1,5", "red", "3"), None),
        (("1,5", "na", ""), ("1.5", "na", "")),
        (("-1,5e-3", "\N{MINUS SIGN}2,25", "3"), ("-1.5e-3", "\N{MINUS SIGN}2.25", "3")),
    ],
)
def test_commas_are_decimal_unless_three_digits_follow_each(cells, points):
    table = Table(Path("a.csv"), {"y": cells, "z": ("a,b", "1,5", "")}, (2, 3, 4), delimiter=";")
    changed, notes = with_points(table, ["y", "z", "missing"], ["NA"])
    assert changed.columns == {**table.columns, "y": points or cells}
    assert len(notes) == (points is not None)


def test_a_comma_in_a_file_with_commas_is_left_alone(tmp_path):
    for name, content, is_read in (("a.csv", 'y,z\n"4,51",b\n', False), ("a.tsv", "y\tz\n4,51\tb\n", True)):
        (tmp_path / name).write_text(content)
        table, _ = with_points(read_table(tmp_path / name), ["y"], [])
        assert table.columns["y"] == (("4.51",) if is_read else ("4,51",))
