"""Means over seeds, and whether a figure follows p^k or the mask ratio p (section 3.2). No torch."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_SAME_SHARE = 1.1
"""Shares p^k within this factor are one group: 0.15, 0.387^2 and 0.789^8 are meant to be equal and are so to 0.3 %."""


@dataclass(frozen=True)
class RankAgreement:
    """How a figure of the Repeated-MLM grid depends on p^k.

    Attributes:
        spearman: Rank correlation of the figure with p^k; NaN for fewer than three cells or a constant figure.
        spearman_of_groups: The same with shares that are meant to be equal as ties: their order is that of rounding.
        spread_equal_share: Pooled standard deviation of the figure among cells of equal p^k.
        spread_equal_ratio: The same among cells of equal p. NaN where no two cells are equal.
    """

    spearman: float
    spearman_of_groups: float
    spread_equal_share: float
    spread_equal_ratio: float

    @property
    def follows(self) -> str:
        """Whether cells of equal `p^k` or of equal `p` lie closer together; empty where neither do."""
        if self.spread_equal_share < self.spread_equal_ratio:
            return "p^k"
        return "p" if self.spread_equal_share > self.spread_equal_ratio else ""


def rank_agreement(cells: Sequence[tuple[int, float]], values: Sequence[float]) -> RankAgreement:
    """Compare a figure over pairs (num_repeats, mask_ratio) with p^k and with p."""
    shares = [p**k for k, p in cells]
    groups = share_groups(shares)
    return RankAgreement(
        spearman_correlation(shares, values),
        spearman_correlation(groups, values),
        pooled_deviation(values, groups),
        pooled_deviation(values, [p for _, p in cells]),
    )


def share_groups(shares: Sequence[float]) -> list[int]:
    """Number the groups of equal p^k, from the smallest on; one number for each share given."""
    groups: dict[float, int] = {}
    group, before = -1, 0.0
    for share in sorted(set(shares)):
        group += share > _SAME_SHARE * before
        groups[share] = group
        before = share
    return [groups[share] for share in shares]


def spearman_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation, ties shared; NaN where it is not defined."""
    from scipy.stats import spearmanr

    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return math.nan
    return float(spearmanr(x, y).statistic)


def pooled_deviation(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Standard deviation around the means of groups, pooled over those with two members or more; NaN without any."""
    squares, freedom = 0.0, 0
    for group in set(groups):
        members = [value for value, own in zip(values, groups, strict=True) if own == group]
        mean = math.fsum(members) / len(members)
        squares += math.fsum((value - mean) ** 2 for value in members)
        freedom += len(members) - 1
    return math.sqrt(squares / freedom) if freedom else math.nan


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the deviation of one value is NaN, and so is the mean of none."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
