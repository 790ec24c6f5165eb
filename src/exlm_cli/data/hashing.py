"""Random numbers as a hash of counters: equal in any order, in any process and beside any others.

The generator is SplitMix64 (Steele, Lea, Flood 2014): its j-th output is a bijection of (state + j * 0x9E37...), so it
can be computed for any j at once. Each word of a key seeds the stream of the next.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BitArray = NDArray[np.uint64]

_GAMMA = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_ROUNDS = tuple(
    (np.array(shift, dtype=np.uint64), np.array(factor, dtype=np.uint64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
_LAST_SHIFT = np.array(31, dtype=np.uint64)


def hash_words(*words: int | NDArray[Any]) -> BitArray:
    """Return 64 random bits for each key of several words, which broadcast against each other.

    Keys that differ in their last word alone have different bits, so there are no ties among them. Words are integers
    of at least 0.
    """
    bits = np.zeros(1, dtype=np.uint64)
    for word in words:
        # output number `word` of the stream that the words before it seed
        bits = _mix(bits + (np.asarray(word, dtype=np.uint64) + np.ones(1, dtype=np.uint64)) * _GAMMA)
    return bits


def uniform(bits: BitArray) -> NDArray[np.float64]:
    """Return numbers uniform in [0, 1) from 64 random bits each; 53 of them are used."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: BitArray) -> BitArray:
    """Scramble every number, in place: the output function of SplitMix64."""
    for shift, factor in _ROUNDS:
        bits ^= bits >> shift
        bits *= factor
    bits ^= bits >> _LAST_SHIFT
    return bits
