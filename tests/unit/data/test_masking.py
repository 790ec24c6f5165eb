"""Masks: shares against their law (five standard errors), dependence on (seed, epoch, index) alone, what is spared.

The laws are App. C of the paper: a token with k copies is corrupted with probability p^k, variance p^k (1 - p^k) / N.
"""

import math

import numpy as np
import pytest

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data.masking import draw_mask, mask_sequence, sample_rng
from tests.tiny import SPECIAL

TOKENS = np.arange(5, 40)


def _mask(index: int = 0, tokens: np.ndarray = TOKENS, **masking: object):
    return mask_sequence(tokens, MaskingConfig.model_validate(masking), SPECIAL, sample_rng(7, 3, index))


def test_the_same_sample_is_masked_alike_in_any_order_and_company() -> None:
    alone = [_mask(index).masked_positions for index in range(20)]
    backwards = [_mask(index).masked_positions for index in reversed(range(20))]
    for first, second in zip(alone, reversed(backwards), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("change", [(8, 3, 0), (7, 4, 0), (7, 3, 1)])
def test_seed_epoch_and_index_each_give_another_stream(change: tuple[int, int, int]) -> None:
    assert not np.array_equal(sample_rng(7, 3, 0).random(8), sample_rng(*change).random(8))


def test_streams_of_neighbouring_samples_do_not_overlap() -> None:
    draws = [sample_rng(7, 3, index).random(1000) for index in range(3)]
    assert len(np.unique(np.concatenate(draws))) == 3000


def test_fixed_masks_number_the_floor_or_the_ceiling_and_average_p_times_n() -> None:
    counts = np.array([len(_mask(index, mask_ratio=0.15).masked_positions) for index in range(4000)])
    expected = 0.15 * len(TOKENS)
    assert set(counts) == {math.floor(expected), math.ceil(expected)}
    share_up = expected - math.floor(expected)
    assert abs(counts.mean() - expected) < 5 * math.sqrt(share_up * (1 - share_up) / len(counts))


@pytest.mark.parametrize(("num_repeats", "ratio"), [(1, 0.15), (2, 0.387), (4, 0.622), (8, 0.789)])
def test_corrupted_share_and_its_variance_follow_app_c(num_repeats: int, ratio: float) -> None:
    num_samples, num_tokens = 1500, len(TOKENS)
    shares = np.empty(num_samples)
    for index in range(num_samples):
        masked = _mask(index, mask_ratio=ratio, scheme="bernoulli", num_repeats=num_repeats)
        copies = np.bincount(masked.target_source, minlength=num_tokens + 1)
        shares[index] = np.mean(copies[1:] == num_repeats)
    law = ratio**num_repeats
    variance = law * (1 - law) / num_tokens
    assert abs(shares.mean() - law) < 5 * math.sqrt(variance / num_samples)
    # standard error of a sample variance, from the fourth central moment measured here
    fourth = np.mean((shares - shares.mean()) ** 4)
    assert abs(shares.var(ddof=1) - variance) < 5 * math.sqrt((fourth - variance**2) / num_samples)


@pytest.mark.parametrize("scheme", ["fixed", "bernoulli"])
def test_at_least_one_token_is_masked_however_small_the_ratio(scheme: str) -> None:
    assert all(len(_mask(i, TOKENS[:3], mask_ratio=1e-6, scheme=scheme).masked_positions) == 1 for i in range(50))


@pytest.mark.parametrize("scheme", ["fixed", "bernoulli"])
def test_special_tokens_are_never_masked(scheme: str) -> None:
    tokens = np.array([10, 2, 11, 4, 12, 0, 3])
    for index in range(100):
        masked = _mask(index, tokens, mask_ratio=0.9, scheme=scheme)
        assert set(masked.masked_positions) <= {1, 3, 5}
    assert len(draw_mask(np.zeros(4, dtype=bool), MaskingConfig(), sample_rng(0, 0, 0))) == 0


def test_masked_tokens_are_the_targets_and_the_rest_is_untouched() -> None:
    masked = _mask(mask_ratio=0.4)
    original = np.concatenate([[SPECIAL.cls], TOKENS, [SPECIAL.sep]])
    np.testing.assert_array_equal(masked.target_ids, original[masked.masked_positions])
    assert (masked.input_ids[masked.masked_positions] == SPECIAL.mask).all()
    restored = masked.input_ids.copy()
    restored[masked.masked_positions] = masked.target_ids
    np.testing.assert_array_equal(restored, original)


def test_repetition_repeats_in_place_and_remembers_the_source() -> None:
    masked = _mask(0, np.array([10, 11, 12]), mask_ratio=0.99, scheme="bernoulli", num_repeats=3)
    restored = masked.input_ids.copy()
    restored[masked.masked_positions] = masked.target_ids
    np.testing.assert_array_equal(restored, [1, 10, 10, 10, 11, 11, 11, 12, 12, 12, 2])
    np.testing.assert_array_equal(masked.target_source, (masked.masked_positions - 1) // 3 + 1)


def test_keep_and_random_replacement_have_their_shares() -> None:
    kept = randomised = total = 0
    for index in range(400):
        masked = _mask(index, mask_ratio=0.5, keep_ratio=0.1, random_ratio=0.2)
        shown = masked.input_ids[masked.masked_positions]
        kept += int((shown == masked.target_ids).sum())
        randomised += int(((shown != masked.target_ids) & (shown != SPECIAL.mask)).sum())
        total += len(shown)
        assert not np.isin(shown[shown != SPECIAL.mask], list(SPECIAL.never_masked)).any()
    # a random token is the original one time in the 35 ordinary ones
    for count, share in ((kept, 0.1 + 0.2 / 35), (randomised, 0.2 * 34 / 35)):
        assert abs(count / total - share) < 5 * math.sqrt(share * (1 - share) / total)
