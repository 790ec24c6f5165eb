"""Masking of sequences. Masks depend on (seed, epoch, sample index) alone, not on worker, rank, batch or resumption.

They are drawn by hashing counters, so the order and the process of draws do not matter. The generator is SplitMix64
(Steele, Lea, Flood 2014): its j-th output is a bijection of (state + j * 0x9E37...), so any j can be computed directly.
Each word of a key seeds the stream of the next.

Axes: B sequences, L tokens with [CLS] and [SEP], R the same tokens without them, M masked tokens of all sequences.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.sections import MaskingConfig, one_ratio
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
# no two kinds of draws share a stream; a new one is the last, so that the others keep their numbers
_COUNT, _PLACE, _REPLACE, _TOKEN, ORDER_OF_SEQUENCES, ORDER_OF_STEPS, _RANGE, _KIND, _TURN, _LENGTH, _SPAN = range(11)


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
        at: A number of masks, at most all, or a mask ratio below 1, in place of what `masking` says; scattered.
    """

    masking: MaskingConfig
    tokenizer: Tokenizer
    seed: int
    epoch: int
    at: float | None = None

    def mask(self, sequences: Sequences) -> MaskedSequences:
        """Repeat every token, add [CLS] and [SEP], and mask (section 2; section 3.1 for the repetition)."""
        original_BL, lengths = self._framed(sequences)
        is_masked_BL = self._draw(original_BL, sequences)
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
        if self._is_bernoulli:
            original_BL, _ = self._framed(sequences)
            counts: IntArray = self._draw(original_BL, sequences).sum(1)
            return counts
        num_maskable = self.tokenizer.is_ordinary[sequences.token_ids].sum(1) * self.masking.num_repeats
        return self._number(num_maskable, sequences.sample_index)

    @property
    def _is_bernoulli(self) -> bool:
        return self.at is None and self.masking.scheme == "bernoulli"

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

    def _draw(self, original_BL: IntArray, sequences: Sequences) -> BoolArray:
        """Choose masked positions (section 2; App. C for `bernoulli`), at least one if any token is maskable.

        `fixed` masks a number of tokens that is drawn first, in the places of `masking.place`. `bernoulli` masks every
        token independently.
        """
        is_maskable_BL, sample_index = self.tokenizer.is_ordinary[original_BL], sequences.sample_index
        if self._is_bernoulli:
            bits_BL = self._bits(_PLACE, sample_index[:, None], np.arange(original_BL.shape[1]))
            is_masked_BL = (uniform(bits_BL) < one_ratio(self.masking.mask_ratio)) & is_maskable_BL
            # the forced mask of a sequence without any is the token of the smallest hash
            is_enough = bool(is_masked_BL.any(1).all())
            number_B = np.maximum(is_masked_BL.sum(1), 1)
            return is_masked_BL if is_enough else _smallest(bits_BL, is_maskable_BL, number_B)
        number_B = self._number(is_maskable_BL.sum(1), sample_index)
        is_in_spans_B = self._is_in_spans(sample_index)
        is_masked_BL = np.zeros_like(is_maskable_BL)
        for rows, draw in ((~is_in_spans_B, self._scatter), (is_in_spans_B, self._draw_spans)):
            if rows.all():
                return draw(is_maskable_BL, number_B, sequences)
            if rows.any():
                chosen = Sequences(sequences.token_ids[rows], sequences.lengths[rows], sample_index[rows])
                is_masked_BL[rows] = draw(is_maskable_BL[rows], number_B[rows], chosen)
        return is_masked_BL

    def _is_in_spans(self, sample_index: IntArray) -> BoolArray:
        """Return which of the (B,) sequences have masks in spans; of `mixed` a half."""
        place = "scattered" if self.at is not None else self.masking.place
        if place == "mixed":
            is_in_spans: BoolArray = uniform(self._bits(_KIND, sample_index)) < 0.5
            return is_in_spans
        return np.full(sample_index.shape, place == "spans")

    def _number(self, num_maskable: IntArray, sample_index: IntArray) -> IntArray:
        """Return the number of masks for each of the (B,) numbers n of maskable tokens; at least 1 where n is.

        One ratio p gives floor(p*n + u), u uniform in [0, 1), whose mean is exactly p*n. A range gives each whole
        number m between its bounds a and b with probability (1 / m) / (1 / a + ... + 1 / b), which is the log-uniform
        law of whole numbers.
        """
        ratio = self.masking.mask_ratio if self.at is None else self.at
        if isinstance(ratio, tuple):
            each, of_B = np.unique(num_maskable, return_inverse=True)
            fewest_B, most_B = np.array([self.masking.mask_bounds(n) for n in each.tolist()], dtype=np.int64)[of_B].T
            harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, most_B.max(initial=1) + 1))])
            before_B = harmonic[fewest_B - 1]
            point_B = before_B + uniform(self._bits(_RANGE, sample_index)) * (harmonic[most_B] - before_B)
            number = np.clip(np.searchsorted(harmonic, point_B, side="right"), fewest_B, most_B)
        elif ratio >= 1:
            number = np.full(num_maskable.shape, int(ratio))
        else:
            share = uniform(self._bits(_COUNT, sample_index))
            number = np.maximum((ratio * num_maskable + share).astype(np.int64), 1)
        at_most_all: IntArray = np.minimum(number, num_maskable)
        return at_most_all

    def _scatter(self, is_maskable_BL: BoolArray, number_B: IntArray, sequences: Sequences) -> BoolArray:
        """Mask the tokens with the smallest hashes."""
        bits_BL = self._bits(_PLACE, sequences.sample_index[:, None], np.arange(is_maskable_BL.shape[1]))
        return _smallest(bits_BL, is_maskable_BL, number_B)

    def _draw_spans(self, is_maskable_BL: BoolArray, number_B: IntArray, sequences: Sequences) -> BoolArray:
        """Mask neighbours: spans in the order of their hashes, of the last one as many of its first tokens as are left.

        The tokens of a sequence are a ring, which is cut into spans of 1 + Poisson(`span_mean` - 1) tokens from a
        random token on, so that every token of a SMILES is masked equally often. In text the ring begins with the word
        of that token, and a word belongs to the span of its first token.
        """
        sample_index, num_rows = sequences.sample_index, len(number_B)
        length_B, index_R = np.maximum(sequences.lengths, 1), np.arange(sequences.token_ids.shape[1])
        row_B1 = np.arange(num_rows)[:, None]
        turn_B = (self._bits(_TURN, sample_index) % length_B.astype(np.uint64)).astype(np.int64)
        if has_words := self.tokenizer.kind == "text":
            begins_BR = self.tokenizer.begins_word[sequences.token_ids]
            begins_BR[:, 0] = True
            turn_B = _last_true(begins_BR)[row_B1[:, 0], turn_B]
        # where the tokens of the ring are in the sequence; those of padding at [CLS], which is never masked
        place_BR = index_R + turn_B[:, None]
        place_BR -= np.where(place_BR >= length_B[:, None], length_B[:, None] - 1, -1)
        place_BR[index_R >= length_B[:, None]] = 0
        place_BR += row_B1 * is_maskable_BL.shape[1]

        is_cut_BR = np.zeros((num_rows, len(index_R) + 1), dtype=np.int64)
        ends_BR = np.cumsum(self._span_lengths(sample_index[:, None], index_R), axis=1)
        is_cut_BR.ravel()[np.minimum(ends_BR, len(index_R)) + row_B1 * is_cut_BR.shape[1]] = 1
        span_BR = np.cumsum(is_cut_BR[:, :-1], axis=1)
        if has_words:
            framed_BL = np.zeros_like(is_maskable_BL)
            framed_BL[:, 1:-1] = begins_BR
            span_BR = span_BR.ravel()[_last_true(framed_BL.ravel()[place_BR]) + row_B1 * len(index_R)]
        num_spans = int(span_BR.max(initial=0)) + 1
        span_BR += row_B1 * num_spans

        is_maskable_BR = is_maskable_BL.ravel()[place_BR]
        size_BC = np.bincount(span_BR[is_maskable_BR], minlength=num_rows * num_spans).reshape(num_rows, num_spans)
        order_BC = np.argsort(self._bits(_SPAN, sample_index[:, None], np.arange(num_spans)), axis=1)
        ordered_BC = np.take_along_axis(size_BC, order_BC, axis=1)
        left_BC = number_B[:, None] - np.cumsum(ordered_BC, axis=1) + ordered_BC
        last_BC = np.cumsum(size_BC, axis=1) - size_BC
        last_BC.ravel()[order_BC + row_B1 * num_spans] += np.clip(left_BC, 0, ordered_BC)
        # a span's masks are the maskable tokens up to a number of them from the beginning of the ring
        is_masked_BR = is_maskable_BR & (np.cumsum(is_maskable_BR, axis=1) <= last_BC.ravel()[span_BR])
        is_masked_BL = np.zeros_like(is_maskable_BL)
        is_masked_BL.ravel()[place_BR[is_masked_BR]] = True
        return is_masked_BL

    def _span_lengths(self, *words: IntArray) -> IntArray:
        """Return 1 + Poisson(`span_mean` - 1) for each place of the words, by inversion."""
        rate = self.masking.span_mean - 1
        terms = [math.exp(-rate)]
        while terms[-1] > 2.0**-60 or len(terms) <= rate:
            terms.append(terms[-1] * rate / len(terms))
        lengths: IntArray = 1 + np.searchsorted(np.cumsum(terms), uniform(self._bits(_LENGTH, *words)), side="right")
        return lengths

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


def _smallest(bits_BL: BitArray, is_maskable_BL: BoolArray, number_B: IntArray) -> BoolArray:
    """Choose the maskable tokens with the smallest of distinct hashes, `number_B` of each sequence."""
    bits_BL[~is_maskable_BL] = np.iinfo(np.uint64).max
    # exactly as many as the number are at or below the hash of that rank
    rank_B = np.maximum(number_B - 1, 0)
    ranked_BL = np.partition(bits_BL, np.unique(rank_B), axis=1)
    return (bits_BL <= ranked_BL[np.arange(len(rank_B)), rank_B][:, None]) & is_maskable_BL


def _last_true(is_true_BR: BoolArray) -> IntArray:
    """Return at each place of a row the nearest True place at or before it; 0 where there is none."""
    return np.maximum.accumulate(np.where(is_true_BR, np.arange(is_true_BR.shape[1]), 0), axis=1)


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
