"""Rank agreement with p^k: closed forms, and the paper's own Figures 3 and 5, for which its claims hold."""

import math
import statistics

import pytest

from exlm_cli.report.seed_groups import (
    pooled_deviation,
    rank_agreement,
    share_groups,
    spearman_correlation,
)
from tests.unit.report.results import FIGURE_3, FIGURE_5, PAIRS, RATIOS


def test_cells_of_equal_p_to_the_k_are_the_diagonals_of_figure_4():
    groups = dict(zip(PAIRS, share_groups([p**k for k, p in PAIRS]), strict=True))
    for (k, p), group in groups.items():
        # doubling k while going one mask ratio up stays on the diagonal
        assert group == RATIOS.index(p) - int(math.log2(k))


def test_the_papers_entropies_follow_p_to_the_k_and_not_p():
    agreement = rank_agreement(PAIRS, FIGURE_5)
    assert agreement.spearman >= 0.95
    # groups of 4, 4, 3, 2 and 1 in perfect order: 1 less what their ties take
    assert agreement.spearman_of_groups == pytest.approx(math.sqrt(1 - (60 + 60 + 24 + 6) / (14**3 - 14)))
    assert agreement.follows == "p^k"
    # by hand: deviations from the means of the diagonals, 14 cells less 5 means
    groups = share_groups([p**k for k, p in PAIRS])
    members = [[v for v, own in zip(FIGURE_5, groups, strict=True) if own == g] for g in range(5)]
    squares = sum(statistics.pvariance(m) * len(m) for m in members)
    assert agreement.spread_equal_share == pytest.approx(math.sqrt(squares / 9), rel=1e-12)


def test_the_papers_accuracies_lie_closer_for_equal_p_to_the_k():
    assert rank_agreement(PAIRS, FIGURE_3).follows == "p^k"


def test_a_figure_that_depends_on_p_alone_does_not_follow_p_to_the_k():
    agreement = rank_agreement(PAIRS, [p for _, p in PAIRS])
    assert agreement.spread_equal_ratio == 0.0
    assert agreement.follows == "p"


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [5, 5, 5])])
def test_ranks_that_are_not_there_agree_with_nothing(x, y):
    assert math.isnan(spearman_correlation(x, y))


def test_spreads_without_two_equal_cells_are_not_defined():
    assert math.isnan(pooled_deviation([1.0, 2.0], ["a", "b"]))
    assert pooled_deviation([1.0, 3.0, 9.0], ["a", "a", "b"]) == pytest.approx(math.sqrt(2.0))
