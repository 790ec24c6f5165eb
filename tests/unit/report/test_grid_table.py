"""The grid as rows, CSV and Markdown; the values are the paper's own, whose claims are known."""

import csv
import io
import math
import statistics

import pytest
from scipy.stats import spearmanr

from exlm_cli.report.grid_table import agreements, csv_text, grid_rows, markdown_text
from tests.unit.report.grids import CELLS, FIGURE_3, FIGURE_5, diverged, paper_results


def _csv(results: list) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(grid_rows(results)))))


def test_the_csv_has_one_row_a_cell_under_the_names_that_scripts_rely_on() -> None:
    rows = _csv(paper_results())
    assert [(int(row["num_repeats"]), float(row["mask_ratio"])) for row in rows] == sorted(CELLS)
    by_cell = dict(zip(CELLS, zip(FIGURE_5, FIGURE_3, strict=True), strict=True))
    for row in rows:
        k, p = int(row["num_repeats"]), float(row["mask_ratio"])
        entropy, accuracy = by_cell[k, p]
        assert float(row["corrupted_expected"]) == pytest.approx(p**k, rel=1e-5)
        assert float(row["corrupted_measured"]) == pytest.approx(p**k, rel=1e-5)
        assert float(row["corrupted_standard_error"]) == pytest.approx(math.sqrt(p**k * (1 - p**k) / 1e4), rel=1e-5)
        assert float(row["entropy_bits"]) == entropy
        assert float(row["glue_mnli_accuracy"]) == pytest.approx(accuracy / 100)
        assert float(row["mask_accuracy"]) == 0.5
        assert (row["entropy_bits_std"], row["seeds"], row["diverged_seeds"]) == ("", "1", "")
        assert row["steps"] == "50000"


def test_seeds_are_averaged_and_their_counts_pooled() -> None:
    rows = _csv(paper_results(seeds=(1, 2, 5)))
    assert len(rows) == 14
    first = rows[0]
    assert float(first["entropy_bits"]) == pytest.approx(1.62 + statistics.mean([0, 0.01, 0.04]), rel=1e-5)
    assert float(first["entropy_bits_std"]) == pytest.approx(statistics.stdev([0, 0.01, 0.04]), rel=1e-5)
    assert float(first["corrupted_standard_error"]) == pytest.approx(math.sqrt(0.0225 * 0.9775 / 3e4), rel=1e-5)
    assert first["seeds"] == "1 2 5"


def test_pooled_shares_weigh_tokens() -> None:
    one, other = paper_results(seeds=(1, 2))[:2]
    one["corruption"] = one["corruption"] | {"num_tokens": 100, "measured": 0.1}
    other["corruption"] = other["corruption"] | {"num_tokens": 300, "measured": 0.5}
    (row,) = grid_rows([one, other])
    assert row.corrupted["measured"] == pytest.approx(0.4)


def test_markdown_has_the_papers_table_with_its_empty_corner() -> None:
    text = markdown_text(grid_rows(paper_results()), title="Repeated MLM")
    assert text.startswith("# Repeated MLM\n")
    assert "| k \\ p | 2.25% | 15% | 38.7% | 62.2% | 78.9% |" in text
    assert "| 4 |  |  | 1.23 | 1.77 | 3.35 |" in text
    assert "| 8 |  |  |  | 79.2 | 82.8 |" in text
    assert "| 2 |  | 2.25% (2.25%) |" in text
    spearman = spearmanr([p**k for k, p in CELLS], FIGURE_5).statistic
    assert f"| Entropy, bits | {spearman:.3g} |" in text
    assert "| Perplexity | – | – | 0 | 0 | – |" in text
    assert "standard deviation" not in text


def test_cells_of_other_lengths_than_the_rest_are_told() -> None:
    results = paper_results()
    assert "Steps" not in markdown_text(grid_rows(results), title="Grid")
    results[0]["steps"] = 160_000
    text = markdown_text(grid_rows(results), title="Grid")
    assert "Steps, more where few tokens are masked in all copies:" in text
    assert "| 1 | 160000 | 50000 | 50000 | 50000 | 50000 |" in text
    _, same = text.split("Does it follow p^k or p, of the 13 cells of 50,000 steps?")
    spearman = spearmanr([p**k for k, p in CELLS[1:]], FIGURE_5[1:]).statistic
    assert f"| Entropy, bits | {spearman:.3g} |" in same


def test_the_papers_figures_follow_p_to_the_k() -> None:
    found = agreements(grid_rows(paper_results(seeds=(1, 2))))
    assert found["entropy_bits"].follows_share
    assert found["glue/mnli accuracy"].follows_share
    assert math.isnan(found["perplexity"].spearman)


def test_a_diverged_cell_is_told_and_left_out_of_every_claim() -> None:
    results = [r for r in paper_results() if (r["num_repeats"], r["mask_ratio"]) != (8, 0.622)] + [
        diverged(8, 0.622, seed=1)
    ]
    rows = grid_rows(results)
    row = next(row for row in rows if row.cell == (8, 0.622))
    assert (row.seeds, row.diverged_seeds) == ((), (1,))
    text = markdown_text(rows, title="Grid")
    assert "| 8 |  |  |  | diverged | 1.76 |" in text
    assert text.endswith("Diverged: k = 8, p = 0.622.\n")
    assert not math.isnan(agreements(rows)["entropy_bits"].spearman)


def test_one_cell_alone_supports_no_claim() -> None:
    text = markdown_text(grid_rows(paper_results()[:1]), title="Grid")
    assert "| Entropy, bits | – | – | – | – |" in text


def test_figures_that_are_not_defined_are_left_out_of_every_claim_and_told() -> None:
    results = paper_results(seeds=(1, 2))
    whole = agreements(grid_rows([r for r in results if (r["num_repeats"], r["mask_ratio"]) != (8, 0.789)]))
    for result in results[-2:]:
        result["metrics"]["entropy_bits"] = None
        result["finetune"]["glue/mnli"]["values"] = [None, None]
    # one seed of fine-tuning, and all of one seed of pre-training
    results[0]["finetune"]["glue/mnli"]["values"] = [None, 0.5]
    results[2]["finetune"]["glue/mnli"]["values"] = [None]
    rows = grid_rows(results)
    assert rows[-1].show("entropy_bits") == rows[-1].show("glue/mnli accuracy") == "not defined"
    assert rows[0].figures["glue/mnli accuracy"][0] == 0.5
    assert rows[1].seeds == (1, 2)
    assert len(rows[1].figures["glue/mnli accuracy"]) == 1
    assert agreements(rows)["entropy_bits"] == whole["entropy_bits"]
    assert " ± 0.01 | not defined |" in markdown_text(rows, title="Grid")
    assert csv_text(rows).splitlines()[-1].split(",")[6:8] == ["", ""]


def test_a_figure_that_no_cell_has_is_told_too() -> None:
    results = paper_results()
    for result in results:
        result["metrics"]["entropy_bits"] = None
    text = markdown_text(grid_rows(results), title="Grid")
    assert "| 8 |  |  |  | not defined | not defined |" in text
    assert "| Entropy, bits | – | – | – | – |" in text


def test_a_task_on_which_fine_tuning_diverged_is_told() -> None:
    results = paper_results()
    results[-1]["finetune"]["glue/mnli"] = {"diverged": "the loss of step 1 is nan"}
    rows = grid_rows(results)
    assert rows[-1].show("glue/mnli accuracy") == "diverged"
    assert rows[-1].show("entropy_bits") == "1.76"
    assert markdown_text(rows, title="Grid").endswith("Diverged: k = 8, p = 0.789 (fine-tuning on glue/mnli).\n")
