"""Report of a sweep, made of the accuracies that the paper prints: each table must come out as the paper's own."""

import json
import math
import statistics
from pathlib import Path

import pytest

from exlm_cli.report.experiments.seed_groups import SeedGroup, group_seeds
from exlm_cli.report.experiments.sweeps import (
    paper_tables_of,
    sweep_tables,
    write_figure_12,
    write_sweep_report,
)
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.report.results import (
    DIVERGED,
    ROWS,
    altered,
    scores,
    sweep_results,
    words_of,
)


def _cells(table, source):
    return {row[1]: row[2:7] for row in table.rows if row[0] == source}


def _row(table, name):
    row = next(row for row in table.rows if row[0] == name)
    return dict(zip(table.columns, row, strict=True))


def test_the_csv_has_one_row_a_variant_under_the_names_that_scripts_rely_on(tmp_path):
    results = sweep_results("figure-12", seeds=(1, 2, 5))
    write_sweep_report(results, tmp_path, name="mine", has_figures=False)
    rows = read_rows(tmp_path / "sweep.csv")
    assert [row["variant"] for row in rows] == ["mlm", "exlm-k2", "exlm", "exlm-k8"]
    added = [0, 0.01, 0.04]
    for row, k in zip(rows, (1, 2, 4, 8), strict=True):
        assert (int(row["num_states_per_mask"]), float(row["mask_ratio"])) == (k, 0.15)
        assert float(row["loss"]) == pytest.approx(2 + statistics.mean(added), rel=1e-5)
        assert float(row["loss_std"]) == pytest.approx(statistics.stdev(added), rel=1e-5)
        entropy = 10 * 0.387 / k + statistics.mean(added)
        assert float(row["entropy_bits_at_0.387"]) == pytest.approx(entropy, rel=1e-5)
        own = [r.value("glue/mnli accuracy") for r in results if r.plan.label == row["variant"]]
        assert float(row["glue_mnli_accuracy"]) == pytest.approx(statistics.mean(own))
        assert (row["steps"], row["parameters"], row["elapsed_s"], row["seeds"]) == ("600", "1400000", "61", "1 2 5")
    assert (rows[0]["effective_states"], rows[2]["effective_states"]) == ("", "1.5")
    assert rows[0]["entropy_posterior_bits_at_0.387"] == rows[0]["entropy_bits_at_0.387"]
    assert json.loads(rows[1]["changes"]) == {"masking.num_states_per_mask": 2}


def test_a_diverged_seed_is_left_out_of_means_and_named():
    results = [altered(r, steps=None) if r.plan.seed == 2 else r for r in sweep_results("table-13", seeds=(1, 2))]
    variant = group_seeds(results)[0]
    assert (variant.seeds, variant.diverged_seeds, variant.spread("loss").mean) == ((1,), (2,), 2.0)
    assert (variant.show("effective_states"), variant.steps) == ("-", 600)  # the other seed is there
    assert SeedGroup(variant.cells[::-1]).steps == 600


@pytest.mark.parametrize("name", ROWS)
def test_a_sweep_with_the_papers_accuracies_gives_the_papers_table(name):
    paper, labels = ROWS[name]
    table = {table.name: table for table in paper_tables_of(group_seeds(sweep_results(name)))}[name]
    assert table.columns[2:7] == ("MNLI", "QNLI", "QQP", "RTE", "Avg")
    theirs, ours = _cells(table, "paper"), _cells(table, "ours")
    assert list(ours) == list(theirs) == list(labels)
    for row, cells in ours.items():
        assert cells[:4] == theirs[row][:4]
        mean = math.fsum(paper.value(row, column) or 0 for column in paper.columns[:4]) / 4
        assert float(cells[4]) == pytest.approx(mean, abs=0.0501)


def test_without_mismatched_rows_the_tables_have_no_mnli():
    results = [altered(result, tasks={"glue/mnli": scores((0.9,))}) for result in sweep_results("table-2")]
    (table,) = paper_tables_of(group_seeds(results))
    assert _cells(table, "ours")["ExLM"] == ("-", "91.4", "91.3", "57.6", "-")


def test_entropies_over_p_are_tables_one_for_each_definition():
    tables = sweep_tables(group_seeds(sweep_results("figure-12", seeds=(1, 3))), name="figure-12")
    assert [table.name for table in tables[:3]] == ["variants", "figure-12-states", "figure-12-weighted"]
    assert tables[1].columns == ("variant", "15 %", "38.7 %", "62.2 %", "78.9 %")
    assert tuple(_row(tables[1], "exlm-k2").values())[1:] == tuple(
        f"{10 * p / 2 + 0.01:.2f} ± 0.01" for p in (0.15, 0.387, 0.622, 0.789)
    )
    # both definitions of an MLM are one
    weighted = _row(tables[2], "mlm")["15 %"], _row(tables[2], "exlm")["15 %"]
    assert weighted == ("1.51 ± 0.01", f"{5 * 0.15 / 4 + 0.01:.2f} ± 0.01")
    mlms = [cell for cell in sweep_results("figure-12", tasks=()) if cell.plan.label == "mlm"]
    assert [table.name for table in sweep_tables(group_seeds(mlms), name="x")] == ["variants", "figure-12-states"]


def test_every_variant_has_its_scores_its_budget_and_its_changes_or_says_why_there_is_none():
    (table,) = sweep_tables(group_seeds(sweep_results("table-2", seeds=(1, 3), tasks=())), name="mine")
    exlm, mlm = _row(table, "exlm"), _row(table, "mlm")
    assert (exlm["loss"], exlm["accuracy %"], exlm["states"]) == ("2.010 ± 0.014", "50.0 ± 0.0", "1.50 ± 0.00")
    assert (mlm["weighted bits"], mlm["k"], mlm["p"], mlm["time"]) == ("-", "1", "15 %", "0:01:01")
    assert (_row(table, "exlm-no-2d-rope")["changes"], exlm["changes"]) == ("model.rope=1d", "-")
    results = sweep_results("quickstart-ablations")
    tasks = {"glue/rte": scores((None, None)), "glue/qqp": DIVERGED}
    first = results[0] = altered(results[0], metrics={"entropy_bits": None}, tasks=tasks)
    tables = sweep_tables(group_seeds(results), name="mine")
    cells = _row(tables[0], first.plan.label)
    assert (cells["bits"], cells["glue/rte accuracy"], cells["glue/qqp accuracy"]) == (
        "not defined", "not defined", "diverged",
    )  # fmt: skip
    assert tables[0].notes[-1] == f"diverged: {first.plan.label} (fine-tuning on glue/qqp)"
    assert "not defined" in next(t for t in tables if t.name == "figure-12-states").rows[0]
    results = [altered(r, steps=None) if r.plan.label == "exlm" else r for r in sweep_results("table-2")]
    variants, table_2 = sweep_tables(group_seeds(results), name="mine")
    assert _row(variants, "exlm")["loss"] == "diverged"
    assert _cells(table_2, "ours")["ExLM"] == ("-",) * 5


def test_figure_12_has_a_line_for_each_variant(figures):
    assert write_figure_12(group_seeds(sweep_results("table-4")), Path()) == []
    assert not figures, "one ratio alone has no figure"
    variants = group_seeds(sweep_results("figure-12", seeds=(1, 2, 3)))
    write_figure_12(variants, Path())
    words = words_of(figures["figure-12"])
    names = {"mlm", "exlm-k2", "exlm", "exlm-k8", "78.9 %", "mean over states"}
    assert names | {"weighted by the posterior"} <= words
    assert any("standard deviation of 3 seeds" in text for text in words)
