"""Decimal commas: read where the delimiter is another and the digits show what they are, left alone elsewhere."""

from pathlib import Path

import pytest

from exlm_cli.tasks.rows.numbers import with_points
from exlm_cli.tasks.rows.table import Table, read_table


@pytest.mark.parametrize(
    ("cells", "points"),
    [
        (("4,51", "4,4", "5"), ("4.51", "4.4", "5")),
        (("1,355", "2,5", "3"), ("1.355", "2.5", "3")),
        (("1,355", "2,118", "3"), None),  # may be thousands
        (("1,5", "2.5", "3"), None),
        (("1,5", "1.234,5", "3"), None),
        (("1,5", "red", "3"), None),
        (("1,5", "na", ""), ("1.5", "na", "")),
        (("-1,5e-3", "\N{MINUS SIGN}2,25", "3"), ("-1.5e-3", "\N{MINUS SIGN}2.25", "3")),
        (("1", "2", "3"), None),
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
