"""The paper's numbers agree with each other: a mean it prints is that of the numbers it prints, within rounding."""

import math

import pytest

from exlm_cli.report.paper import SHAPES, TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_13

THE_PAPERS_OWN_SLIPS = {(3, "ExLM large")}
"""It prints 86.9 for a mean of 86.79."""


@pytest.mark.parametrize("table", [TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_13], ids=str)
def test_every_row_has_a_number_or_a_dash_for_each_column(table):
    assert all(len(numbers) == len(table.columns) for numbers in table.rows.values())
    assert set(table.budgets) <= set(table.rows)
    assert all(0 < number < 100 for numbers in table.rows.values() for number in numbers if number is not None)
    # each is printed with one digit
    assert all(n == round(n, 1) for numbers in table.rows.values() for n in numbers if n is not None)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"table-{shape.paper.number}")
def test_printed_means_are_those_of_the_printed_numbers(shape):
    """A number printed with one digit is at most 0.05 off, so is a mean of such, and the printed mean once more."""
    column, members = shape.mean
    num_checked = 0
    for row in shape.paper.rows:
        printed = shape.paper.value(row, column)
        values = [shape.paper.value(row, member) for member in members]
        if printed is None:
            assert None in values, row
            continue
        known = [value for value in values if value is not None]
        assert len(known) == len(values), row
        is_off = abs(printed - math.fsum(known) / len(known)) > 0.1 + 1e-9
        assert is_off == ((shape.paper.number, row) in THE_PAPERS_OWN_SLIPS), row
        num_checked += 1
    assert num_checked >= 4


def test_what_the_paper_says_of_its_tables_in_words_holds():
    """§5.1: ExLM is best on 5 of 7 tasks and on average, and beats SMILES-BERT on all. §5.2: ExLM beats RoBERTa on
    everything and is best of the base models on 7 of 8 GLUE tasks (TUPE on MRPC) and on SQuAD.
    """
    tasks = TABLE_1.columns[:-1]
    best = [max((TABLE_1.value(row, task) or 0, row) for row in TABLE_1.rows)[1] for task in tasks]
    assert best.count("ExLM") == 5
    assert max((TABLE_1.value(row, "Mean") or 0, row) for row in TABLE_1.rows)[1] == "ExLM"
    for table, baseline in ((TABLE_1, "SMILES-BERT (MLM)"), (TABLE_3, "RoBERTa (MLM)")):
        for column in table.columns:
            mine, theirs = table.value("ExLM", column), table.value(baseline, column)
            assert mine is not None
            assert theirs is not None
            assert mine > theirs, column
    base = [row for row in TABLE_3.rows if row != "ExLM large"]
    others = {column: max((TABLE_3.value(row, column) or 0, row) for row in base)[1] for column in TABLE_3.columns}
    assert {column for column, row in others.items() if row != "ExLM"} == {"MRPC"}
    assert others["MRPC"] == "TUPE"
