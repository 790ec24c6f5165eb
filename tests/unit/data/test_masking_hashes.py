"""Hashes: a plain SplitMix64 with Python's integers, published outputs, uniform bits, no ties.

The first outputs for the seed 1234567 are those that the reference implementation prints (Vigna, splitmix64.c; listed
at rosettacode.org, "Pseudo-random numbers/Splitmix64"). Chance is tested with fixed keys and a bound of five standard
errors.
"""

import math

import numpy as np
import pytest

from exlm_cli.data.masking import hash_words, uniform

_MODULUS = 2**64


def splitmix64(state: int, number: int) -> int:
    """Output `number`, counted from 0, of SplitMix64 with the given seed."""
    bits = (state + (number + 1) * 0x9E3779B97F4A7C15) % _MODULUS
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % _MODULUS
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % _MODULUS
    return bits ^ (bits >> 31)


def plain_hash(*words: int) -> int:
    """The hash of words: each is the number of an output of the stream that the words before it seed."""
    bits = 0
    for word in words:
        bits = splitmix64(bits, word)
    return bits


def test_the_plain_generator_is_splitmix64():
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert [splitmix64(1234567, number) for number in range(5)] == published


@pytest.mark.parametrize("words", [(0,), (7, 3), (2**63 - 1, 2**32 - 1, 0, 5, 9)])
def test_hashes_are_those_of_the_plain_generator(words):
    assert hash_words(*words).tolist() == [plain_hash(*words)]


def test_words_broadcast():
    bits = hash_words(7, 3, np.arange(4)[:, None], np.arange(6))
    assert bits.shape == (4, 6)
    assert bits.tolist() == [[plain_hash(7, 3, row, column) for column in range(6)] for row in range(4)]


def test_inputs_stay_as_they_are():
    word = np.arange(3)
    hash_words(1, word)
    assert word.tolist() == [0, 1, 2]


def test_hashes_that_differ_in_the_last_word_have_no_ties():
    assert np.diff(np.sort(hash_words(1, 2, np.arange(200_000)))).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_every_bit_is_set_half_the_time_and_flips_half_the_time_between_neighbours(axis):
    bits = hash_words(7, 3, np.arange(1000)[:, None], np.arange(100))
    neighbours = (bits[1:] ^ bits[:-1]) if axis == 0 else (bits[:, 1:] ^ bits[:, :-1])
    for values in (bits.ravel(), neighbours.ravel()):
        shares = [float(((values >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
        assert max(abs(share - 0.5) for share in shares) < 5 * 0.5 / math.sqrt(values.size)


def test_uniform_numbers_fill_the_unit_interval_evenly():
    """Chi-square over 256 bins: mean 255, variance 510."""
    numbers = uniform(hash_words(0, np.arange(200_000)))
    assert 0 <= numbers.min() < numbers.max() < 1
    counts = np.bincount((numbers * 256).astype(int), minlength=256)
    expected = len(numbers) / 256
    assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * math.sqrt(2 * 255)
    assert uniform(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist() == [0.0, 1 - 2.0**-53]
