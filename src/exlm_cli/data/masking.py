"""Masking of sequences. Masks depend on (seed, epoch, sample index) alone, not on worker, rank, batch or resumption.

They are drawn by hashing counters, so the order and the process of draws do not matter. The generator is SplitMix64
(Steele, Lea, Flood 2014): its j-th output is a bijection of (state + j * 0x9E37...), so any j can be computed directly.
Each word of a key seeds the stream of the next.

Axes: B sequences, L tokens with [CLS] and [SEP], M masked tokens of all sequences.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data import BoolArray, IntArray
from exlm_cli.data.batch import MaskedSequences
from exlm_cli.data.tokenizer import Tokenizer

BitArray = NDArray[np.uint64]

_GAMMA = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_ROUNDS = tuple(
    (np.array(shift, dtype=np.uint64), np.array(factor, dtype=np.uint64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
_LAST_SHIFT = np.array(31, dtype=np.uint64)
# no two kinds of draws share a stream
_COUNT, _PLACE, _REPLACE, _TOKEN, ORDER_OF_SEQUENCES, ORDER_OF_STEPS = range(6)


@dataclass(frozen=True)
class Sequences:
    """Sequences as a data set has them, with what their masks depend on.

    Attributes:
        token_ids: (B, n) tokens without [CLS] and the last [SEP], [PAD] beyond `lengths`.
        lengths: (B,) tokens of each sequence.
        sample_index: (B,) index of each sequence in its data set.
    """

    token_ids: IntArray
    lengths: IntArray
    sample_index: IntArray


@dataclass(frozen=True)
class Masker:
    """Masks of one epoch of a run.

    Attributes:
        seed, epoch: Together with the sample index of a sequence they select its masks.
    """

    masking: MaskingConfig
    tokenizer: Tokenizer
    seed: int
    epoch: int

    def mask(self, sequences: Sequences) -> MaskedSequences:
        """Repeat every token, add [CLS] and [SEP], and mask (section 2; section 3.1 for the repetition)."""
        original_BL, lengths = self._framed(sequences)
        is_masked_BL = self._draw(original_BL, sequences.sample_index)
        # by their place in a flat (B * L): with an index for each axis it takes three times as long
        place_M = np.flatnonzero(is_masked_BL)
        row_M, position_M = np.divmod(place_M, original_BL.shape[1])
        target_ids = original_BL.ravel()[place_M]
        input_BL = original_BL
        input_BL.ravel()[place_M] = (
            self._shown(target_ids, sequences.sample_index[row_M], position_M)
            if self.masking.keep_ratio or self.masking.random_ratio
            else self.tokenizer.mask_id
        )
        return MaskedSequences(
            input_ids=input_BL,
            lengths=lengths,
            is_masked=is_masked_BL,
            target_ids=target_ids,
            target_source=(position_M - 1) // self.masking.num_repeats + 1,
            sample_index=sequences.sample_index,
        )

    def count(self, sequences: Sequences) -> IntArray:
        """Return the (B,) number of masks that `mask` draws, in less time."""
        if self.masking.scheme == "bernoulli":
            original_BL, _ = self._framed(sequences)
            counts: IntArray = self._draw(original_BL, sequences.sample_index).sum(1)
            return counts
        num_maskable = self.tokenizer.is_ordinary[sequences.token_ids].sum(1) * self.masking.num_repeats
        return self._fixed_number(num_maskable, sequences.sample_index)

    def _framed(self, sequences: Sequences) -> tuple[IntArray, IntArray]:
        """Return (B, L) repeated tokens between [CLS] and [SEP], and their (B,) lengths."""
        repeats, tokenizer = self.masking.num_repeats, self.tokenizer
        num_sequences, longest = sequences.token_ids.shape
        framed_BL = np.full((num_sequences, longest * repeats + 2), tokenizer.pad_id, dtype=np.int64)
        framed_BL[:, 0] = tokenizer.cls_id
        framed_BL[:, 1:-1] = np.repeat(sequences.token_ids, repeats, axis=1) if repeats > 1 else sequences.token_ids
        lengths = sequences.lengths * repeats + 2
        framed_BL[np.arange(num_sequences), lengths - 1] = tokenizer.sep_id
        return framed_BL, lengths

    def _draw(self, original_BL: IntArray, sample_index: IntArray) -> BoolArray:
        """Choose masked positions (section 2; App. C for `bernoulli`).

        `fixed` masks floor(p*n + u) of the n maskable tokens, u uniform in [0, 1): those with the smallest hashes. The
        mean is exactly p*n. `bernoulli` masks every token independently. Both mask at least one token if any is
        maskable.
        """
        is_maskable_BL = self.tokenizer.is_ordinary[original_BL]
        bits_BL = self._bits(_PLACE, sample_index[:, None], np.arange(original_BL.shape[1]))
        if self.masking.scheme == "fixed":
            num_masked = self._fixed_number(is_maskable_BL.sum(1), sample_index)
        else:
            is_masked_BL = (uniform(bits_BL) < self.masking.mask_ratio) & is_maskable_BL
            num_masked = np.maximum(is_masked_BL.sum(1), 1)
            # the forced mask of a sequence without any is the token of the smallest hash
            if is_masked_BL.any(1).all():
                return is_masked_BL
        bits_BL[~is_maskable_BL] = np.iinfo(np.uint64).max
        # the hashes of a sequence are distinct, so exactly `num_masked` are at or below the hash of that rank
        rank_B = np.maximum(num_masked - 1, 0)
        ranked_BL = np.partition(bits_BL, np.unique(rank_B), axis=1)
        return (bits_BL <= ranked_BL[np.arange(len(rank_B)), rank_B][:, None]) & is_maskable_BL

    def _fixed_number(self, num_maskable: IntArray, sample_index: IntArray) -> IntArray:
        """Return floor(p*n + u) for each of the (B,) numbers n of maskable tokens; at least 1 where n is."""
        share = uniform(self._bits(_COUNT, sample_index))
        number = (self.masking.mask_ratio * num_maskable + share).astype(np.int64)
        return np.minimum(np.maximum(number, 1), num_maskable)

    def _shown(self, target_M: IntArray, sample_index_M: IntArray, position_M: IntArray) -> IntArray:
        """Return what the model sees at masked positions: [MASK], the token itself, or a random one."""
        masking = self.masking
        draw = uniform(self._bits(_REPLACE, sample_index_M, position_M))
        ordinary_ids = np.flatnonzero(self.tokenizer.is_ordinary)
        # 64 random bits leave a bias of at most V / 2^64
        random_M = ordinary_ids[self._bits(_TOKEN, sample_index_M, position_M) % np.uint64(len(ordinary_ids))]
        shown = np.where(draw < masking.keep_ratio + masking.random_ratio, random_M, self.tokenizer.mask_id)
        return np.where(draw < masking.keep_ratio, target_M, shown)

    def _bits(self, stream: int, *words: NDArray[Any]) -> BitArray:
        return hash_words(self.seed, self.epoch, stream, *words)


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
