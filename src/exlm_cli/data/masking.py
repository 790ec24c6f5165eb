"""Masking of sequences. Masks depend on (seed, epoch, sample index) alone, never on workers or resumption."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data.tokenizer import Tokenizer

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that masking and collation need; `never_masked` holds every special token of the vocabulary."""

    pad: int
    cls: int
    sep: int
    mask: int
    never_masked: frozenset[int]
    vocab_size: int


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the ids that masking and collation need."""
    return SpecialTokens(
        pad=tokenizer.pad_id,
        cls=tokenizer.cls_id,
        sep=tokenizer.sep_id,
        mask=tokenizer.mask_id,
        never_masked=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
    )


@dataclass(frozen=True)
class MaskedSequence:
    """One sequence after repetition and masking, before expansion.

    Attributes:
        input_ids: (L,) tokens, [CLS] first and [SEP] last, with [MASK] (or a kept or random token) at masked positions.
        masked_positions: (T,) positions of the targets in `input_ids`, ascending.
        target_ids: (T,) original tokens at these positions.
        target_source: (T,) index, in the sequence before repetition, of the token each target is a copy of; [CLS] is 0.
    """

    input_ids: IntArray
    masked_positions: IntArray
    target_ids: IntArray
    target_source: IntArray


def sample_rng(seed: int, epoch: int, sample_index: int) -> np.random.Generator:
    """Return the random stream of one sample in one epoch: a separate Philox counter block, so that no two overlap."""
    key = np.array([seed, epoch], dtype=np.uint64)
    counter = np.array([0, 0, sample_index, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def draw_mask(is_maskable: NDArray[np.bool_], masking: MaskingConfig, rng: np.random.Generator) -> IntArray:
    """Choose masked positions, ascending (section 2; App. C for `bernoulli`).

    `fixed` masks floor(p*n + u) of the n maskable tokens, u uniform in [0, 1), without replacement, so that the mean is
    exactly p*n. `bernoulli` masks every token independently. Both mask at least one token if any is maskable.
    """
    candidates = np.flatnonzero(is_maskable)
    num_candidates = len(candidates)
    if num_candidates == 0:
        return candidates
    if masking.scheme == "fixed":
        num_masked = int(masking.mask_ratio * num_candidates + rng.random())
        num_masked = min(max(num_masked, 1), num_candidates)
        return np.sort(rng.permutation(candidates)[:num_masked])
    chosen = candidates[rng.random(num_candidates) < masking.mask_ratio]
    return chosen if len(chosen) else candidates[[rng.integers(num_candidates)]]


def mask_sequence(
    token_ids: IntArray, masking: MaskingConfig, special: SpecialTokens, rng: np.random.Generator
) -> MaskedSequence:
    """Repeat one sequence of (n,) tokens, add [CLS] and [SEP], and mask it; `rng` is from `sample_rng`."""
    repeated = np.repeat(token_ids, masking.num_repeats)
    original = np.concatenate([[special.cls], repeated, [special.sep]]).astype(np.int64)
    positions = draw_mask(~np.isin(original, list(special.never_masked)), masking, rng)
    input_ids = original.copy()
    input_ids[positions] = special.mask
    if masking.keep_ratio or masking.random_ratio:
        draw = rng.random(len(positions))
        kept = positions[draw < masking.keep_ratio]
        randomised = positions[(draw >= masking.keep_ratio) & (draw < masking.keep_ratio + masking.random_ratio)]
        input_ids[kept] = original[kept]
        ordinary_ids = np.setdiff1d(np.arange(special.vocab_size), list(special.never_masked))
        input_ids[randomised] = rng.choice(ordinary_ids, size=len(randomised))
    return MaskedSequence(
        input_ids=input_ids,
        masked_positions=positions,
        target_ids=original[positions],
        target_source=(positions - 1) // masking.num_repeats + 1,
    )
