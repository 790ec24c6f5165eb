"""The paper's printed means against the numbers they are means of (arXiv 2501.13397v5)."""

import math

import pytest

from exlm_cli.report.paper_numbers import TABLE_2, TABLE_4, TABLE_13, PaperTable

AVERAGED = [(table, row) for table in (TABLE_2, TABLE_4, TABLE_13) for row in table.rows]


def _mean(table: PaperTable, row: str) -> float:
    numbers = [number for number in table.rows[row][:-1] if number is not None]
    assert len(numbers) == 4
    return math.fsum(numbers) / 4


@pytest.mark.parametrize(("table", "row"), AVERAGED, ids=[f"{table.number}-{row}" for table, row in AVERAGED])
def test_a_printed_average_of_an_ablation_is_the_mean_of_its_row(table: PaperTable, row: str) -> None:
    # both the four numbers and their mean are rounded to 0.1, so the two may differ by 0.05 each
    average = table.value(row, "Avg")
    assert average is not None
    assert average == pytest.approx(_mean(table, row), abs=0.1)


def test_one_average_alone_needs_its_numbers_to_be_rounded() -> None:
    far = {row for table, row in AVERAGED if abs(_mean(table, row) - (table.value(row, "Avg") or 0)) > 0.0501}
    assert far == {"Vanilla MLM++"}


def test_models_that_stand_in_several_tables_have_the_same_numbers() -> None:
    assert TABLE_2.rows["Vanilla MLM"] == TABLE_13.rows["Vanilla MLM"] == TABLE_4.rows["15% Vanilla MLM"]
    assert TABLE_2.rows["ExLM"] == TABLE_13.rows["ExLM"] == TABLE_4.rows["15% ExLM-k=4"]
    assert TABLE_2.rows["ExLM w/o Transitions"] == TABLE_13.rows["ExLM w/o Transitions"]


@pytest.mark.parametrize("table", [TABLE_2, TABLE_4, TABLE_13], ids=lambda table: str(table.number))
def test_every_row_of_an_ablation_has_a_budget(table: PaperTable) -> None:
    assert table.budgets.keys() == table.rows.keys()
