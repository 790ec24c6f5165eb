"""Variants as rows and as CSV: seeds together, and what scripts read."""

import csv
import io
import json
import statistics

import pytest

from exlm_cli.report.sweep_rows import csv_text, sweep_rows
from tests.unit.report.sweeps import diverge, sweep_results


def test_the_csv_has_one_row_a_variant_under_the_names_that_scripts_rely_on() -> None:
    results = sweep_results("figure-12", seeds=(1, 2, 5))
    rows = list(csv.DictReader(io.StringIO(csv_text(sweep_rows(results)))))
    assert [row["variant"] for row in rows] == ["mlm", "exlm-k2", "exlm", "exlm-k8"]
    added = [0, 0.01, 0.04]
    for row, k in zip(rows, (1, 2, 4, 8), strict=True):
        assert (int(row["num_states_per_mask"]), float(row["mask_ratio"])) == (k, 0.15)
        assert float(row["loss"]) == pytest.approx(2 + statistics.mean(added), rel=1e-5)
        assert float(row["loss_std"]) == pytest.approx(statistics.stdev(added), rel=1e-5)
        entropy = 10 * 0.387 / k + statistics.mean(added)
        assert float(row["entropy_bits_at_0.387"]) == pytest.approx(entropy, rel=1e-5)
        assert float(row["glue_mnli_accuracy"]) == pytest.approx(
            statistics.mean(r["finetune"]["glue/mnli"]["values"][1] for r in results if r["label"] == row["variant"])
        )
        assert (row["steps"], row["parameters"], row["elapsed_s"], row["seeds"]) == ("600", "1400000", "61.0", "1 2 5")
    assert (rows[0]["effective_states"], rows[2]["effective_states"]) == ("", "1.5")
    assert rows[0]["entropy_posterior_bits_at_0.387"] == rows[0]["entropy_bits_at_0.387"]
    assert json.loads(rows[1]["changes"]) == {"masking.num_states_per_mask": 2}


def test_a_diverged_seed_is_left_out_of_means_and_named() -> None:
    results = [diverge(r) if r["seed"] == 2 else r for r in sweep_results("table-13", seeds=(1, 2))]
    row = sweep_rows(results)[0]
    assert (row.seeds, row.diverged_seeds, row.mean("loss")) == ((1,), (2,), 2.0)


def test_a_variant_without_any_seed_that_ended_has_empty_cells() -> None:
    results = [diverge(result) for result in sweep_results("table-13")[:1]]
    (row,) = csv.DictReader(io.StringIO(csv_text(sweep_rows(results))))
    assert (row["variant"], row["loss"], row["steps"], row["elapsed_s"], row["seeds"]) == (
        "exlm-no-transitions", "", "", "", "",
    )  # fmt: skip
    assert row["diverged_seeds"] == "1"
