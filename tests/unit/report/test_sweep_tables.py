"""Tables of a sweep, made of the accuracies that the paper prints: each must come out as the paper's own table."""

import math

import pytest

from exlm_cli.report.sweep_rows import sweep_rows
from exlm_cli.report.sweep_tables import paper_sweep_tables, sweep_tables
from exlm_cli.report.tables import ReportTable
from tests.unit.report.sweeps import ROWS, diverge, sweep_results


def _cells(table: ReportTable, source: str) -> dict[str, tuple[str, ...]]:
    return {row[1]: row[2:7] for row in table.rows if row[0] == source}


@pytest.mark.parametrize("name", ROWS)
def test_a_sweep_with_the_papers_accuracies_gives_the_papers_table(name: str) -> None:
    paper, labels = ROWS[name]
    tables = {table.name: table for table in paper_sweep_tables(sweep_rows(sweep_results(name)))}
    table = tables[name]
    assert table.columns[2:7] == ("MNLI", "QNLI", "QQP", "RTE", "Avg")
    theirs, ours = _cells(table, "paper"), _cells(table, "ours")
    assert list(ours) == list(theirs) == list(labels)
    for row, cells in ours.items():
        assert cells[:4] == theirs[row][:4]
        mean = math.fsum(paper.value(row, column) or 0 for column in paper.columns[:4]) / 4
        assert float(cells[4]) == pytest.approx(mean, abs=0.0501)


def test_a_sweep_of_everything_gives_every_table_of_the_paper() -> None:
    tables = sweep_tables(sweep_rows(sweep_results("ablations")), name="ablations")
    assert [table.name for table in tables] == ["variants", "table-2", "table-4", "table-13"]


def test_the_budget_of_each_row_stands_beside_it() -> None:
    (table,) = paper_sweep_tables(sweep_rows(sweep_results("table-2", seeds=(1, 2))))
    budgets = {(row[0], row[1]): row[7:] for row in table.rows}
    assert budgets["paper", "Vanilla MLM++"] == ("3", "128 M", "100,000 steps of 4,096 sequences")
    assert budgets["ours", "ExLM"] == ("2 x 3", "1.4 M", "600 steps of 4,096 sequences")
    assert "`ours`: this sweep, with the budget that stands beside it" in table.notes[0]


def test_fine_tuning_on_a_part_of_the_rows_is_told_under_the_papers_table() -> None:
    results = sweep_results("table-2")
    results[0]["finetune"]["glue/mnli"]["max_rows"] = 1000
    table = next(t for t in paper_sweep_tables(sweep_rows(results)) if t.name == "table-2")
    assert table.notes[-1] == "fine-tuned on some of the task's rows (`task.max_rows`): glue/mnli (1,000 rows)"


def test_some_variants_and_tasks_fill_a_part_of_the_table_that_fits_best() -> None:
    results = [r for r in sweep_results("table-2", tasks=("RTE",)) if r["label"] in ("mlm", "mlm-plus-plus")]
    (table,) = paper_sweep_tables(sweep_rows(results))
    assert table.name == "table-2"
    assert _cells(table, "ours") == {
        "Vanilla MLM": ("-", "-", "-", "54.7", "-"), "Vanilla MLM++": ("-", "-", "-", "56.3", "-"),
    }  # fmt: skip


def test_without_a_task_of_the_paper_there_is_no_table_of_it() -> None:
    assert paper_sweep_tables(sweep_rows(sweep_results("table-2", tasks=()))) == []


def test_a_variant_with_another_change_is_not_taken_for_the_papers() -> None:
    results = sweep_results("table-2")
    for result in results:
        if result["label"] == "exlm":
            result["changes"] = {"model.transition.lane_bias": 4.0}
        if result["label"] == "mlm":
            result["changes"] = result["changes"] | {"model.clone_embedding": "none"}
    table = next(t for t in paper_sweep_tables(sweep_rows(results)) if t.name == "table-2")
    assert set(_cells(table, "ours")) == set(ROWS["table-2"][1]) - {"ExLM"}


def test_no_variant_of_the_paper_gives_no_table() -> None:
    results = [result | {"rope": "none"} for result in sweep_results("table-2") if result["label"] == "exlm"]
    assert paper_sweep_tables(sweep_rows(results)) == []


def test_every_variant_is_told_with_its_budget_and_its_changes() -> None:
    (table,) = sweep_tables(sweep_rows(sweep_results("table-2", seeds=(1, 3), tasks=())), name="mine")
    assert table.title == "Variants of mine (mean ± standard deviation of 2 seeds)"
    by_label = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    exlm, mlm = by_label["exlm"], by_label["mlm"]
    assert (exlm["loss"], exlm["accuracy %"], exlm["states"]) == ("2.010 ± 0.014", "50.0 ± 0.0", "1.50 ± 0.00")
    assert (mlm["weighted bits"], mlm["k"], mlm["p"], mlm["time"]) == ("–", "1", "15 %", "0:01:01")
    assert by_label["exlm-no-2d-rope"]["changes"] == "model.rope=1d"
    assert exlm["changes"] == "-"


def test_a_task_that_is_not_the_papers_has_its_column() -> None:
    results = sweep_results("table-13", tasks=())
    for result in results:
        sizes = {"train": 300, "valid": 20}
        scored = {"metric": "roc_auc", "values": [0.7, 0.8], "split_sizes": sizes, "max_rows": 300}
        result["finetune"] = {"moleculenet/bace": scored}
    (table,) = sweep_tables(sweep_rows(results), name="mine")
    index = table.columns.index("moleculenet/bace roc_auc")
    assert {row[index] for row in table.rows} == {"0.750"}
    assert table.rows[0][table.columns.index("seeds")] == "1 x 2"
    assert table.notes[-1] == "fine-tuned on some of the task's rows (`task.max_rows`): moleculenet/bace (300 rows)"


def test_a_diverged_variant_is_told_and_has_no_figure() -> None:
    results = [diverge(r) if r["label"] == "exlm" else r for r in sweep_results("table-2")]
    tables = sweep_tables(sweep_rows(results), name="mine")
    row = next(row for row in tables[0].rows if row[0] == "exlm")
    assert row[1] == "diverged"
    assert tables[0].notes[-1] == "some seeds diverged: exlm"
    assert _cells(tables[1], "ours")["ExLM"] == ("-",) * 5


def test_entropy_over_p_stands_once_for_each_definition() -> None:
    tables = sweep_tables(sweep_rows(sweep_results("figure-12", seeds=(1, 3))), name="figure-12")
    assert [table.name for table in tables[:3]] == ["variants", "figure-12-states", "figure-12-weighted"]
    assert tables[1].columns == ("variant", "15 %", "38.7 %", "62.2 %", "78.9 %")
    assert {row[0]: row[1:] for row in tables[1].rows}["exlm-k2"] == tuple(
        f"{10 * p / 2 + 0.01:.2f} ± 0.01" for p in (0.15, 0.387, 0.622, 0.789)
    )
    weighted = {row[0]: row[1] for row in tables[2].rows}
    # of an MLM both definitions are one
    assert (weighted["mlm"], weighted["exlm"]) == ("1.51 ± 0.01", f"{5 * 0.15 / 4 + 0.01:.2f} ± 0.01")


def test_mlms_alone_have_one_definition() -> None:
    results = [result for result in sweep_results("figure-12") if result["label"] == "mlm"]
    assert [table.name for table in sweep_tables(sweep_rows(results), name="x")][1:] == ["figure-12-states"] + [
        table.name for table in paper_sweep_tables(sweep_rows(results))
    ]


def test_scores_and_entropies_that_are_not_defined_are_told() -> None:
    results = sweep_results("quickstart-ablations")
    first = results[0]
    first["finetune"]["glue/rte"]["values"] = [None, None]
    first["metrics"]["entropy_bits"] = first["entropy"][0]["entropy_bits"] = None
    first["finetune"]["glue/qqp"] = {"diverged": "the loss of step 1 is nan"}
    tables = sweep_tables(sweep_rows(results), name="quickstart-ablations")
    cells = dict(zip(tables[0].columns, tables[0].rows[0], strict=True))
    assert (cells["bits"], cells["glue/rte accuracy"], cells["glue/qqp accuracy"]) == ("not defined",) * 2 + (
        "diverged",
    )
    assert tables[0].notes[-1] == f"some seeds diverged: {first['label']} (fine-tuning on glue/qqp)"
    assert "not defined" in next(t for t in tables if t.name == "figure-12-states").rows[0]
