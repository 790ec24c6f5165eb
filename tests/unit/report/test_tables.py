"""A table keeps its cells in every format, and no terminal breaks one of them."""

import csv
import io
import math
import re

import pytest
from rich.console import Console

from exlm_cli.format import NOT_DEFINED, decimals, format_count, format_percent, format_ratio
from exlm_cli.report.tables import SUFFIXES, Number, ReportTable, write_tables

NASTY = ("a_b & 50% {x}", "#1 $2 ~^\\", "1.0 ± 0.2", '"q", | <y> `z`')
SPREAD = Number(1.04, decimals(1), 0.21)
ROWS = (((*NASTY[:2], SPREAD, NASTY[3]),), (("second", "-", "2", "3"),))


def drawn(table, width):
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue().splitlines()


def test_markdown_has_as_many_cells_in_each_line_and_keeps_bars_and_broken_names_inside_them(tmp_path):
    """A folder of a run may have a line break in its name, or a byte that is no UTF-8, for Python a lone surrogate."""
    table = ReportTable("mine", "Scores:\n100%", ("model", "a|b", "c", "d\udcff"), ROWS, ("a note_1",))
    assert write_tables([table], tmp_path / "new" / "folder", list(SUFFIXES)) == [
        tmp_path / "new/folder/mine.md", tmp_path / "new/folder/mine.csv",
    ]  # fmt: skip
    text = (tmp_path / "new/folder/mine.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert [len(row) for row in cells] == [4] * 4
    back = [tuple(cell.strip().replace("\\|", "|").replace("\\\\", "\\") for cell in row) for row in cells]
    assert (back[0], *back[2:]) == (("model", "a|b", "c", r"d\udcff"), *table.rows)
    assert text.startswith("**Scores:\\n100%**\n")
    assert text.endswith("\n- a note_1\n")


WIDE = ReportTable(
    "wide",
    "Wide",
    ("source", "model", *(f"column {i}" for i in range(12)), "seeds"),
    (
        (("paper", "theirs", *(f"{i}0.0 ±1.2" for i in range(12)), "3"),),
        (("ours", "mine", *("-" if i % 2 else f"{i}1.0 ±1.2" for i in range(12)), "-"),),
    ),
    num_keys=2,
    num_details=1,
)


@pytest.mark.parametrize("width", [40, 200])
def test_a_wide_table_is_cut_between_columns_and_no_cell_is_broken(width):
    lines = drawn(WIDE, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in (*WIDE.columns[:-1], *(cell for row in WIDE.rows for cell in row[:-1])):
        assert cell in text
    headings = [line for line in lines if line.startswith("source")]
    assert all("model" in line for line in headings)
    assert (len(headings) == 1) == (width == 200)
    assert "paper theirs: seeds 3" in lines
    assert not any("ours mine: seeds" in line for line in lines)


def test_a_terminal_shows_every_row_a_line_between_groups_and_the_notes():
    """Names of rows are set flush left, numbers flush right."""
    groups = ((("x", "a", "1"), ("long", "b", "20")), (("y", "c", "3"),))
    lines = [line.rstrip() for line in drawn(ReportTable("t", "T", ("k", "name", "n"), groups, ("one",), 2), 80)]
    assert lines == [
        "T", "", "k     name   n", "─" * 14, "x     a      1", "long  b     20", "", "y     c      3", "", "note: one",
    ]  # fmt: skip


def test_a_sparse_table_shows_the_columns_that_its_last_group_has_values_in():
    sparse = ReportTable(WIDE.name, WIDE.title, WIDE.columns, WIDE.groups, (), 2, 1, is_sparse=True)
    (headings,) = [line for line in drawn(sparse, 200) if line.startswith("source")]
    assert headings.split() == ["source", "model", *(word for i in range(0, 12, 2) for word in ("column", str(i)))]
    partly = ReportTable("p", "P", ("a", "b", "c"), ((("x", "1", "2"), ("y", "3", "-")),), is_sparse=True)
    assert {"b", "c"} <= set(" ".join(drawn(partly, 80)).split())  # one value in a column is enough
    nothing = ReportTable("n", "N", ("a", "b"), ((("x", "-"),),), is_sparse=True)
    assert "b" in "\n".join(drawn(nothing, 80))


def test_csv_has_plain_numbers_texts_as_they_are_and_columns_for_deviations_ends_and_expectations(tmp_path):
    numbers = {
        Number(1280069, format_count): "1280069", Number(0.15, format_ratio): "0.15",
        Number(math.nan, format_count): "", Number(math.nan, format_count, missing=NOT_DEFINED): "", "-": "",
        "1,210/151/152": "1,210/151/152", "0.5 ± x": "0.5 ± x", "007": "007",
    }  # fmt: skip
    assert [str(cell) for cell in numbers][:5] == ["1,280,069", "15 %", "-", "not defined", "-"]
    spread, median = Number(0.81234, decimals(2), 0.0101), Number(0.5, decimals(1), low=-0.1, high=1.0)
    law = Number(0.023, format_percent, expected=0.0225)
    assert [str(cell) for cell in (spread, median, law)] == ["0.81 ± 0.01", "0.5 (-0.1 to 1.0)", "2.3 % (2.2 %)"]
    # what names a row is a text, also a label that looks like a number
    rows = ("1,000", *numbers, spread, "-"), ("-", *numbers, median, law)
    write_tables([ReportTable("t", "T", ("label", *"abcdefgh", "x", "y"), (rows,))], tmp_path, ["csv"])
    with (tmp_path / "t.csv").open() as file:
        assert [*csv.reader(file)] == [
            ["label", *"abcdefgh", "x", "x_std", "x_low", "x_high", "y", "y_expected"],
            ["1,000", *numbers.values(), "0.81234", "0.0101", "", "", "", ""],
            ["-", *numbers.values(), "0.5", "", "-0.1", "1", "0.023", "0.0225"],
        ]
