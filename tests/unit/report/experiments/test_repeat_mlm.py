"""Report of the Repeated-MLM grid; the values are the paper's own, whose claims are known."""

import itertools
import math
import statistics
from collections import Counter
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from scipy.stats import spearmanr

from exlm_cli.report.experiments.repeat_mlm import (
    agreements,
    grid_of,
    grid_tables,
    pooled_corruption,
    write_grid_figures,
    write_grid_report,
)
from exlm_cli.report.style import corruption_colour
from tests.unit.finetune.finetuned_runs import read_rows
from tests.unit.report.results import (
    DIVERGED,
    FIGURE_3,
    FIGURE_5,
    PAIRS,
    altered,
    corruption,
    grid_results,
    pair_of,
    scores,
    words_of,
)
from tests.unit.report.test_learned import run_with


def _tables(results):
    """Return the cells of each table by its name and the name of the row."""
    return {t.name: {row[0]: row[1:] for row in t.rows} for t in grid_tables(grid_of(results))}


def test_the_csv_has_one_row_a_cell_under_the_names_that_scripts_rely_on(tmp_path):
    """Seeds are averaged, and their counts pooled."""
    write_grid_report(grid_results(seeds=(1, 2, 5)), tmp_path, name="mine", has_figures=False)
    rows, added = read_rows(tmp_path / "grid.csv"), [0, 0.01, 0.04]
    assert [(int(row["num_repeats"]), float(row["mask_ratio"])) for row in rows] == sorted(PAIRS)
    for row, (k, p), entropy, accuracy in zip(rows, PAIRS, FIGURE_5, FIGURE_3, strict=True):
        assert float(row["corrupted_expected"]) == pytest.approx(p**k, rel=1e-5)
        assert float(row["corrupted_measured"]) == pytest.approx(p**k, rel=1e-5)
        assert float(row["corrupted_standard_error"]) == pytest.approx(math.sqrt(p**k * (1 - p**k) / 3e4), rel=1e-5)
        assert float(row["entropy_bits"]) == pytest.approx(entropy + statistics.mean(added), rel=1e-5)
        assert float(row["entropy_bits_std"]) == pytest.approx(statistics.stdev(added), rel=1e-4)
        assert float(row["glue_mnli_accuracy"]) == pytest.approx(accuracy / 100)
        assert float(row["mask_accuracy"]) == 0.5
        assert (row["seeds"], row["diverged_seeds"], row["steps"]) == ("1 2 5", "", "50000")
    one, other = grid_results(seeds=(1, 2))[:2]
    counts = corruption(0.3, num_tokens=100, measured=0.1), corruption(0.3, num_tokens=300, measured=0.5)
    (cell,) = grid_of([altered(r, counts=count) for r, count in zip((one, other), counts, strict=True)]).values()
    assert pooled_corruption(cell)["measured"] == pytest.approx(0.4)


def test_the_tables_are_those_of_the_paper_with_their_empty_corner():
    tables = {table.name: table for table in grid_tables(grid_of(grid_results()))}
    assert tables["entropy"].columns == ("k \\ p", "2.25 %", "15 %", "38.7 %", "62.2 %", "78.9 %")
    assert tables["entropy"].title == "Entropy, bits"
    assert tables["entropy"].rows[2] == ("4", "", "", "1.23", "1.77", "3.35")
    assert tables["glue-mnli-accuracy"].rows[3] == ("8", "", "", "", "79.2", "82.8")
    assert tables["corruption"].rows[1][:3] == ("2", "", "2.25 % (2.25 %)")
    spearman = spearmanr([p**k for k, p in PAIRS], FIGURE_5).statistic
    agreement = {row[0]: row[1:] for row in tables["agreement"].rows}
    assert agreement["Entropy, bits"][0] == f"{spearman:.3g}"
    assert agreement["Perplexity"] == ("-", "-", "-", "0", "0", "not decided")
    assert tables["mask_accuracy"].title == "Mask accuracy, %"
    # the spreads of accuracies are in the same unit as the accuracies
    spread = agreements(grid_of(grid_results()))["glue/mnli accuracy"].spread_equal_ratio
    assert agreement["glue/mnli accuracy, %"][4:] == (f"{100 * spread:.3g}", "p^k")


def test_cells_of_other_lengths_than_the_rest_have_their_steps_and_claims_without_them():
    results = grid_results()
    assert "steps" not in _tables(results)
    results[0] = altered(results[0], steps=160_000)
    tables = _tables(results)
    assert tables["steps"]["1"] == ("160,000", *["50,000"] * 4)
    spearman = spearmanr([p**k for k, p in PAIRS[1:]], FIGURE_5[1:]).statistic
    assert tables["agreement-same-steps"]["Entropy, bits"][0] == f"{spearman:.3g}"


def test_what_diverged_or_is_not_defined_says_so_and_is_left_out_of_every_claim():
    """A score that one of two seeds has is counted without the other."""
    results = grid_results(seeds=(1, 2))
    results = [altered(r, steps=None) if pair_of(r.plan) == (8, 0.622) else r for r in results]
    unknown = {"metrics": {"entropy_bits": None}, "tasks": {"glue/mnli": scores((None, None))}}
    results[-2:] = [altered(result, **unknown) for result in results[-2:]]
    results[0] = altered(results[0], tasks={"glue/mnli": DIVERGED})
    cells = grid_of(results)
    assert (cells[8, 0.622].seeds, cells[8, 0.622].diverged_seeds) == ((), (1, 2))
    tables = {table.name: table for table in grid_tables(cells)}
    accuracy, entropy = tables["glue-mnli-accuracy"], tables["entropy"]
    for table in (accuracy, entropy):
        assert table.rows[3] == ("8", "", "", "", "diverged", "not defined")
    assert ("1 to 2 seeds" in accuracy.title, "of 2 seeds" in entropy.title) == (True, True)
    k, p = PAIRS[0]
    note = f"k = {k}, p = {p:g}: glue/mnli accuracy over 1 of 2 seeds"
    assert (accuracy.notes, entropy.notes, note in tables["agreement"].notes) == ((note,), (), True)
    (diverged,) = tables["corruption"].notes
    assert ("k = 8, p = 0.622" in diverged, "k = 1, p = 0.0225" in diverged, "0.789" in diverged) == (True, True, False)
    without = [r for r in grid_results(seeds=(1, 2))[:-2] if pair_of(r.plan) != (8, 0.622)]
    assert agreements(cells)["entropy_bits"] == agreements(grid_of(without))["entropy_bits"]
    without = [altered(result, metrics={"entropy_bits": None}) for result in results]
    assert _tables(without)["agreement"]["Entropy, bits"] == ("-",) * 6


def test_cells_at_the_level_of_token_frequencies_are_named(tmp_path, monkeypatch):
    """One seed that has learned something is enough to leave a cell out, and so is a run without a reference."""
    monkeypatch.chdir(tmp_path)
    cells = grid_results(seeds=(1, 2))
    for cell, loss in zip(cells[:6], (6.99, 7.2, 6.99, 3.0, 5.0, 5.0), strict=True):
        (cell.folder / "pretrain").mkdir(parents=True)
        run_with(cell.folder / "pretrain", loss, 7.0)
    tables = {table.name: table for table in grid_tables(grid_of(cells))}
    assert [note for note in tables["agreement"].notes if "chance" in note and note.endswith(": k = 1, p = 0.0225")]


def _words_by_place(axes):
    """Return the text of each cell of a drawn table by the names of its row and column."""
    columns, rows = (
        dict(zip(axis.get_ticklocs(), (label.get_text() for label in axis.get_ticklabels()), strict=True))
        for axis in (axes.xaxis, axes.yaxis)
    )
    places = [(text.get_position(), text.get_text()) for text in axes.texts]
    return {(rows[y], columns[x]): text for (x, y), text in places}


def test_figures_have_every_cell_in_its_place_at_its_share_and_a_colour_for_equal_p_to_the_k(figures):
    """Points have the dodge of their k in addition to p^k, under a hundredth for each step from the middle."""
    results = grid_results(seeds=(1, 2))
    # of k = 1, p = 2.25 %: two points above seed 1
    results[1] = altered(results[1], tasks={"glue/mnli": scores((0.833,))})
    cells = grid_of(results)
    curve = [{"kind": "train", "step": i, "loss": 3 / i} for i in range(1, 9)]
    write_grid_figures(cells, {cell.first.label: curve for cell in cells.values()}, Path())
    assert set(figures) == {"corruption", "entropy", "glue-mnli-accuracy", "curves"}
    assert {"k = 8, p = 62.2 %", "training curves, first seed of each cell"} <= words_of(figures["curves"])
    table, plot = figures["glue-mnli-accuracy"].axes
    found = {place: text.split("\n")[0] for place, text in _words_by_place(table).items() if text}
    shown = {(str(k), f"{100 * p:g} %"): f"{value:.1f}" for (k, p), value in zip(PAIRS, FIGURE_3, strict=True)}
    assert found == shown | {("1", "2.25 %"): "82.3"}
    assert (table.get_xlabel(), table.get_ylabel(), table.yaxis_inverted()) == ("mask ratio p", "repeats k", True)
    painted = Counter(to_hex(patch.get_facecolor()) for patch in table.patches)
    of_groups = {corruption_colour(group, 5).lower(): num for group, num in enumerate([4, 4, 3, 2, 1])}
    assert {colour: num for colour, num in painted.items() if colour in of_groups} == of_groups
    legend = plot.get_legend()
    names = [text.get_text() for text in legend.get_texts()]
    marks = {line.get_marker(): name for line, name in zip(legend.get_lines(), names, strict=True)}
    for container, (k, p), value in zip(plot.containers, PAIRS, [82.3, *FIGURE_3[1:]], strict=True):
        (x,), (y,) = container.lines[0].get_data()
        assert (x, y) == (pytest.approx(p**k, abs=0.02), pytest.approx(value))
        assert marks[container.lines[0].get_marker()] == f"k = {k}"
    assert all(after - before > 0.05 for before, after in itertools.pairwise(plot.get_xticks())), "names would overlap"
    ((_, low), (_, high)) = plot.containers[0].lines[2][0].get_segments()[0]
    assert high - low == pytest.approx(2 * statistics.stdev([81.3, 83.3]))
