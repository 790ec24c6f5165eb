"""Corrupted semantics under the real masking code, against the law of App. C.

A token is corrupted with probability p^k, and the share over N tokens has the variance p^k (1 - p^k) / N, which
`tests/unit/data/test_masking.py` finds in the masks themselves.
"""

import math

import numpy as np
import pytest

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.experiments.cell import count_corrupted
from tests.tiny import SPECIAL
from tests.unit.report.results import PAIRS


def _count(lengths, num_repeats, ratio, seed=1):
    rng = np.random.default_rng(0)
    sequences = [(index, rng.integers(5, 40, size=length)) for index, length in enumerate(lengths)]
    masking = MaskingConfig(mask_ratio=ratio, num_repeats=num_repeats, scheme="bernoulli")
    return count_corrupted(sequences, masking, SPECIAL, seed=seed)


@pytest.mark.parametrize(("num_repeats", "ratio"), PAIRS)
def test_the_share_is_p_to_the_k(num_repeats, ratio):
    counted = _count([510] * 60, num_repeats, ratio)
    assert counted["num_tokens"] == 60 * 510
    assert counted["expected"] == ratio**num_repeats
    variance = counted["expected"] * (1 - counted["expected"]) / counted["num_tokens"]
    assert counted["standard_error"] == pytest.approx(math.sqrt(variance), rel=1e-12)
    assert abs(counted["measured"] - counted["expected"]) < 5 * counted["standard_error"]


def test_short_sequences_have_the_share_that_one_forced_mask_makes():
    counted = _count([10] * 3000, 1, 0.0225)
    assert counted["expected_with_floor"] == pytest.approx(0.0225 + 0.9775**10 / 10, rel=1e-12)
    # a sequence has one mask with probability 0.8 whatever was drawn: less spread than independent tokens have
    assert abs(counted["measured"] - counted["expected_with_floor"]) < 5 * counted["standard_error"]
    assert counted["measured"] - counted["expected"] > 50 * counted["standard_error"]


def test_a_forced_mask_corrupts_no_repeated_token():
    counted = _count([10] * 3000, 2, 0.15)
    assert counted["expected_with_floor"] == counted["expected"] == 0.15**2
    assert abs(counted["measured"] - counted["expected"]) < 5 * counted["standard_error"]


def test_special_tokens_inside_a_sequence_do_not_count():
    tokens = np.array([7, SPECIAL.sep_id, 8, 9])
    masking = MaskingConfig(mask_ratio=0.99, scheme="bernoulli")
    counted = count_corrupted([(0, tokens)], masking, SPECIAL, seed=0)
    assert counted["num_tokens"] == 3
