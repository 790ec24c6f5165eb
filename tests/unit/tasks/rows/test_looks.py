"""A cell is a number where Python and a reader agree; what a spreadsheet or an assay adds to it has a name."""

import pytest

from exlm_cli.tasks.rows.labels import read_number
from exlm_cli.tasks.rows.looks import DECIMAL_COMMA, THOUSANDS, look_of, looks_of, with_decimal_point


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("-1.5", -1.5),
        ("\u22121.5", -1.5),
        ("2e-3", 0.002),
        ("2e\u22123", 0.002),
        ("1E+03", 1000.0),
        ("+3", 3.0),
        (".5", 0.5),
        ("5.", 5.0),
    ],
)
def test_a_number_is_read_also_with_a_typographic_minus(cell, value):
    assert read_number(cell) == value


@pytest.mark.parametrize("cell", ["1_000", "inf", "nan", "1e999", "", "\u22121\u2212", "--1", "1,5", "\u2013" + "1"])
def test_what_is_no_finite_number_is_not_read(cell):
    assert read_number(cell) is None


@pytest.mark.parametrize(
    "cell",
    ["low", "2C9", "3A4", "5-HT1A", "Phase 1", "3.11rc1", "1.1.1.1", "50-00-0", "n.d.", "-", "CCO", "inf", "a,b"],
)
def test_a_name_with_digits_does_not_look_like_a_number(cell):
    assert look_of(cell) is None


def test_a_comma_before_three_digits_is_a_decimal_comma_beside_one_that_is_nothing_else():
    assert looks_of(["1,355", "low", "1,355"]) == {"1,355": THOUSANDS}
    assert looks_of(["1,355", "0,5"]) == {"1,355": DECIMAL_COMMA, "0,5": DECIMAL_COMMA}
    assert looks_of(["0,355"]) == {"0,355": DECIMAL_COMMA}
    assert [with_decimal_point(cell) for cell in ("\u22121,5", "1,2,3", "a,b")] == ["\u22121.5", "1,2,3", "a,b"]
