"""Rank agreement with p^k: closed forms, and the paper's own Figures 3 and 5, for which its claims hold."""

import math
import statistics

import pytest

from exlm_cli.experiments.results import CellRuns
from exlm_cli.report.experiments.seed_groups import (
    fewer_seeds_note,
    group_seeds,
    pooled_deviation,
    rank_agreement,
    read_curves,
    seed_note,
    share_groups,
    spearman_correlation,
)
from tests.unit.report.results import (
    DIVERGED,
    FIGURE_3,
    FIGURE_5,
    PAIRS,
    RATIOS,
    altered,
    scores,
    sweep_results,
)


def _agreement(*values_by_seed):
    return rank_agreement(PAIRS, [*zip(*values_by_seed, strict=True)])


def test_cells_of_equal_p_to_the_k_are_the_diagonals_of_figure_4():
    groups = dict(zip(PAIRS, share_groups([p**k for k, p in PAIRS]), strict=True))
    for (k, p), group in groups.items():
        # doubling k while going one mask ratio up stays on the diagonal
        assert group == RATIOS.index(p) - int(math.log2(k))


def test_the_papers_entropies_follow_p_to_the_k_and_not_p():
    agreement = _agreement(FIGURE_5)
    assert agreement.spearman >= 0.95
    # groups of 4, 4, 3, 2 and 1 in perfect order: 1 less what their ties take
    assert agreement.spearman_of_groups == pytest.approx(math.sqrt(1 - (60 + 60 + 24 + 6) / (14**3 - 14)))
    assert agreement.follows == "p^k"
    # by hand: deviations from the means of the diagonals, 14 cells less 5 means
    groups = share_groups([p**k for k, p in PAIRS])
    members = [[v for v, own in zip(FIGURE_5, groups, strict=True) if own == g] for g in range(5)]
    squares = sum(statistics.pvariance(m) * len(m) for m in members)
    assert agreement.spread_equal_share == pytest.approx(math.sqrt(squares / 9), rel=1e-12)


def test_the_papers_accuracies_follow_p_to_the_k_and_a_figure_that_depends_on_p_alone_does_not():
    assert _agreement(FIGURE_3).follows == "p^k"
    agreement = _agreement([p for _, p in PAIRS])
    assert agreement.spread_equal_ratio == 0.0
    assert agreement.follows == "p"


def test_a_difference_of_spreads_within_two_standard_errors_is_not_decided():
    """Seeds at the same distance d on either side of each mean: their deviation is sqrt(2) d, the standard error d."""
    spreads = _agreement(FIGURE_5)
    difference = spreads.spread_equal_ratio - spreads.spread_equal_share
    for distance, follows in ((0.49 * difference, "p^k"), (0.51 * difference, "not decided")):
        both = _agreement(*([bits + sign * distance for bits in FIGURE_5] for sign in (-1, 1)))
        assert both.standard_error == pytest.approx(distance)
        assert both.follows == follows
    assert math.isnan(spreads.standard_error)
    assert _agreement([2.0] * len(PAIRS)).follows == "not decided"
    assert rank_agreement(PAIRS[:1], [[1.0, 2.0]]).follows == ""


def test_the_standard_error_is_that_of_cells_with_different_numbers_of_seeds():
    """Deviation 1 of the first two cells, and 1, 1/2 and 1 as one over the number of seeds."""
    agreement = rank_agreement(PAIRS[:3], [[3.0], [0.0, math.sqrt(2.0)], [5.0]])
    assert agreement.standard_error == pytest.approx(math.sqrt((1 + 1 / 2 + 1) / 3))


def test_curves_are_those_of_the_first_seed_that_has_them(tmp_path):
    cells = [cell for cell in sweep_results("table-13", seeds=(1, 2, 3)) if cell.plan.label == "mlm"]
    cells = [CellRuns(cell.plan, tmp_path / f"cells/mlm/seed-{cell.plan.seed}") for cell in cells]
    for seed in (2, 3):
        run = tmp_path / f"cells/mlm/seed-{seed}/pretrain"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text(f'{{"step": {seed}}}\n')
    assert read_curves(cells) == {"mlm": [{"step": 2}]}


def test_a_heading_claims_no_more_seeds_than_each_variant_has():
    """Of three seeds, one diverged on RTE, one has no score on QQP, and one lacks QNLI, which was added later."""
    results = [r for r in sweep_results("table-2", seeds=(1, 2, 3)) if r.plan.label == "exlm"]
    results[0] = altered(results[0], tasks={"glue/rte": DIVERGED})
    results[1] = altered(results[1], tasks={"glue/qqp": scores((None, None))})
    (late,) = group_seeds([altered(results[2], tasks=dict.fromkeys(results[2].tuned))])
    results[2] = altered(results[2], tasks={"glue/qnli": None})
    (group,) = group_seeds(results)
    headings = {f"glue/{task} accuracy": task.upper() for task in ("rte", "qqp", "qnli", "mnli")}
    note = "exlm: RTE over 2 of 3 seeds, QQP over 2 of 3 seeds, QNLI over 2 of 3 seeds"
    assert fewer_seeds_note({"exlm": group, "late": late}, headings | {"loss": "loss"}) == [note]
    # the variant without the task has no mean of it, and one that diverged has none at all
    assert seed_note([group, late], "glue/rte accuracy") == " (mean ± standard deviation of 2 seeds)"
    assert seed_note([group, late]) == " (mean ± standard deviation of 1 to 3 seeds)"
    (diverged,) = group_seeds([altered(result, steps=None) for result in results])
    assert seed_note([group, diverged]) == " (mean ± standard deviation of 3 seeds)"
    assert seed_note([late]) == ""


def test_ranks_and_spreads_that_are_not_there_are_not_defined():
    for x, y in (([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [5, 5, 5])):
        assert math.isnan(spearman_correlation(x, y))
    assert math.isnan(pooled_deviation([1.0, 2.0], ["a", "b"]))
    assert pooled_deviation([1.0, 3.0, 9.0], ["a", "a", "b"]) == pytest.approx(math.sqrt(2.0))
