"""Masks: the rule for one sequence at a time in plain Python, their laws, what is spared; the hashes of chance.

The laws are App. C of the paper: a token with k copies is corrupted with probability p^k, variance p^k (1 - p^k) / N.
The first outputs of SplitMix64 for the seed 1234567 are those that the reference implementation prints (Vigna,
splitmix64.c; listed at rosettacode.org, "Pseudo-random numbers/Splitmix64"). Chance is tested with fixed seeds and a
bound of five standard errors.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data.batch import MaskedSequences
from exlm_cli.data.masking import Masker, hash_words, uniform
from tests.plain_hash import plain_hash, splitmix64
from tests.tiny import SPECIAL, sequences

TOKENS = np.arange(5, 40)
SEED, EPOCH = 7, 3
COUNT, PLACE, REPLACE, TOKEN = range(4)


def _mask(rows: Any, sample_index: Any = None, seed: int = SEED, epoch: int = EPOCH, **masking: Any) -> MaskedSequences:
    masker = Masker(MaskingConfig.model_validate(masking), SPECIAL, seed, epoch)
    return masker.mask(sequences(rows, sample_index))


def _many(count: int, **masking: Any) -> MaskedSequences:
    return _mask(np.tile(TOKENS, (count, 1)), **masking)


def _random_rows(count: int) -> list[np.ndarray]:
    """Rows of one to forty tokens, special ones among them."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, size=length) for length in rng.integers(1, 40, size=count)]


def _plain_uniform(*words: int) -> float:
    return (plain_hash(*words) >> 11) / 2**53


def _plain_mask(tokens: list[int], index: int, masking: MaskingConfig) -> tuple[list[int], list[int]]:
    """Input and masked positions of one sequence, by the rule of the design, a token at a time."""
    original = [SPECIAL.cls_id, *(t for t in tokens for _ in range(masking.num_repeats)), SPECIAL.sep_id]
    candidates = [i for i, token in enumerate(original) if token not in SPECIAL.special_ids]
    by_hash = sorted(candidates, key=lambda i: plain_hash(SEED, EPOCH, PLACE, index, i))
    if masking.scheme == "fixed":
        number = math.floor(masking.mask_ratio * len(candidates) + _plain_uniform(SEED, EPOCH, COUNT, index))
        positions = by_hash[: max(1, number)]
    else:
        positions = [i for i in candidates if _plain_uniform(SEED, EPOCH, PLACE, index, i) < masking.mask_ratio]
        positions = positions or by_hash[:1]
    ordinary = sorted(set(range(SPECIAL.vocab_size)) - SPECIAL.special_ids)
    shown = list(original)
    for i in positions:
        draw = _plain_uniform(SEED, EPOCH, REPLACE, index, i)
        if draw >= masking.keep_ratio + masking.random_ratio:
            shown[i] = SPECIAL.mask_id
        elif draw >= masking.keep_ratio:
            shown[i] = ordinary[plain_hash(SEED, EPOCH, TOKEN, index, i) % len(ordinary)]
    return shown, sorted(positions)


@pytest.mark.parametrize(
    "masking",
    [
        {},
        {"mask_ratio": 0.6},
        {"mask_ratio": 0.02},
        {"scheme": "bernoulli", "mask_ratio": 0.4},
        {"scheme": "bernoulli", "mask_ratio": 0.04},
        {"scheme": "bernoulli", "mask_ratio": 0.622, "num_repeats": 4},
        {"num_repeats": 2},
        {"mask_ratio": 0.5, "keep_ratio": 0.2, "random_ratio": 0.3},
    ],
)
def test_a_batch_is_masked_as_each_sequence_is_in_plain_python(masking):
    config = MaskingConfig.model_validate(masking)
    rows, indices = _random_rows(60), [5 * i for i in range(60)]
    masked = _mask(rows, indices, **masking)
    targets = iter(zip(masked.target_ids.tolist(), masked.target_source.tolist(), strict=True))
    for b, (row, index) in enumerate(zip(rows, indices, strict=True)):
        shown, positions = _plain_mask(row.tolist(), index, config)
        length = len(shown)
        assert masked.lengths[b] == length
        assert masked.input_ids[b].tolist() == shown + [SPECIAL.pad_id] * (masked.input_ids.shape[1] - length)
        assert np.flatnonzero(masked.is_masked[b]).tolist() == positions
        own = list(itertools.islice(targets, len(positions)))
        assert own == [(int(row[(i - 1) // config.num_repeats]), (i - 1) // config.num_repeats + 1) for i in positions]
    assert next(targets, None) is None
    counted = Masker(config, SPECIAL, SEED, EPOCH).count(sequences(rows, indices))
    assert counted.tolist() == masked.is_masked.sum(1).tolist()


@pytest.mark.parametrize("change", [{"seed": 8}, {"epoch": 4}, {"sample_index": range(1, 101)}])
def test_seed_epoch_and_index_each_give_other_masks(change):
    """Masks of 5 or 6 of 35 tokens: two independent draws are alike at 15 % of the places that either has."""
    rows = np.tile(TOKENS, (100, 1))
    first, second = _mask(rows).is_masked, _mask(rows, **change).is_masked
    assert (first & second).sum() < 0.2 * first.sum()


def test_fixed_masks_number_the_floor_or_the_ceiling_and_average_p_times_n():
    counts = _many(4000, mask_ratio=0.15).is_masked.sum(1)
    expected = 0.15 * len(TOKENS)
    assert set(counts.tolist()) == {math.floor(expected), math.ceil(expected)}
    share_up = expected - math.floor(expected)
    assert abs(counts.mean() - expected) < 5 * math.sqrt(share_up * (1 - share_up) / len(counts))


@pytest.mark.parametrize("scheme", ["fixed", "bernoulli"])
def test_every_place_is_masked_equally_often(scheme):
    """Chi-square over the places.

    With m of n places chosen without replacement the counts of two places correlate by
    -1 / (n - 1), so that the sum is n / (n - 1) * (1 - m / n) times a chi-square of n - 1 degrees of freedom; without
    the correlation, (1 - p) times one of n degrees.
    """
    num_rows, n, ratio = 20_000, len(TOKENS), 0.4  # 14 masks of 35 tokens, whatever u is
    counts = _many(num_rows, mask_ratio=ratio, scheme=scheme).is_masked.sum(0)[1:-1]
    is_fixed = scheme == "fixed"
    degrees, scale = (n - 1, n / (n - 1) * (1 - ratio)) if is_fixed else (n, 1 - ratio)
    chi_square = ((counts - num_rows * ratio) ** 2 / (num_rows * ratio)).sum() / scale
    assert abs(chi_square - degrees) < 5 * math.sqrt(2 * degrees)


def test_every_pair_of_places_is_masked_equally_often():
    """Of the sequences m (m - 1) / (n (n - 1)) mask both of a pair; the largest of 595 pairs is below 5.5 errors with
    probability 1 - 2e-5.
    """
    num_rows, n, m = 20_000, len(TOKENS), 14
    is_masked = _many(num_rows, mask_ratio=0.4).is_masked[:, 1:-1].astype(np.float64)
    together = (is_masked.T @ is_masked)[np.triu_indices(n, 1)]
    share = m * (m - 1) / (n * (n - 1))
    assert np.abs(together / num_rows - share).max() < 5.5 * math.sqrt(share * (1 - share) / num_rows)


@pytest.mark.parametrize(("num_repeats", "ratio"), [(1, 0.15), (2, 0.387), (4, 0.622), (8, 0.789)])
def test_corrupted_share_and_its_variance_follow_app_c(num_repeats, ratio):
    num_samples, num_tokens = 1500, len(TOKENS)
    masked = _many(num_samples, mask_ratio=ratio, scheme="bernoulli", num_repeats=num_repeats)
    copies = masked.is_masked[:, 1:-1].reshape(num_samples, num_tokens, num_repeats)
    shares = copies.all(-1).mean(1)
    law = ratio**num_repeats
    variance = law * (1 - law) / num_tokens
    assert abs(shares.mean() - law) < 5 * math.sqrt(variance / num_samples)
    # standard error of a sample variance, from the fourth central moment measured here
    fourth = np.mean((shares - shares.mean()) ** 4)
    assert abs(shares.var(ddof=1) - variance) < 5 * math.sqrt((fourth - variance**2) / num_samples)


@pytest.mark.parametrize("scheme", ["fixed", "bernoulli"])
def test_special_tokens_are_never_masked(scheme):
    masked = _mask(np.tile([10, 2, 11, 4, 12, 0, 3], (100, 1)), mask_ratio=0.9, scheme=scheme)
    assert not masked.is_masked[:, [0, 2, 4, 6, 7, 8]].any()
    nothing = _mask([[2, 4, 0]], scheme=scheme)
    assert not nothing.is_masked.any()
    assert nothing.input_ids.tolist() == [[1, 2, 4, 0, 2]]


def test_keep_and_random_replacement_have_their_shares():
    masked = _many(400, mask_ratio=0.5, keep_ratio=0.1, random_ratio=0.2)
    shown = masked.input_ids[masked.is_masked]
    total = len(shown)
    kept = int((shown == masked.target_ids).sum())
    randomised = int(((shown != masked.target_ids) & (shown != SPECIAL.mask_id)).sum())
    assert not np.isin(shown[shown != SPECIAL.mask_id], list(SPECIAL.special_ids)).any()
    # a random token is the original one time in the 35 ordinary ones
    for count, share in ((kept, 0.1 + 0.2 / 35), (randomised, 0.2 * 34 / 35)):
        assert abs(count / total - share) < 5 * math.sqrt(share * (1 - share) / total)


def test_the_plain_generator_is_splitmix64():
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert [splitmix64(1234567, number) for number in range(5)] == published


@pytest.mark.parametrize("words", [(0,), (7, 3), (2**63 - 1, 2**32 - 1, 0, 5, 9)])
def test_hashes_are_those_of_the_plain_generator(words):
    assert hash_words(*words).tolist() == [plain_hash(*words)]
    assert uniform(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist() == [0.0, 1 - 2.0**-53]


def test_inputs_stay_as_they_are():
    word = np.arange(3)
    hash_words(1, word)
    assert word.tolist() == [0, 1, 2]
