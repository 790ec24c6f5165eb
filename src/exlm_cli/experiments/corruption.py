"""How much of the semantics Repeated MLM corrupts: tokens all of whose copies are masked (section 3.1, App. C)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data.masking import IntArray, SpecialTokens, mask_sequence, sample_rng


@dataclass(frozen=True)
class CorruptedShare:
    """Corrupted tokens counted under a recipe's own masks, beside the law.

    Attributes:
        num_tokens: N of App. C, tokens that can be masked, before repetition.
        num_corrupted: Those of them with every copy masked.
        expected: p^k.
        expected_with_floor: p^k, and for k = 1 what "at least one mask a sequence" adds: a sequence of n tokens draws
            none with probability (1 - p)^n and then masks one all the same. For k > 1 one masked copy corrupts nothing.
    """

    num_tokens: int
    num_corrupted: int
    expected: float
    expected_with_floor: float

    @property
    def measured(self) -> float:
        """Share of corrupted tokens."""
        return self.num_corrupted / max(1, self.num_tokens)

    @property
    def standard_error(self) -> float:
        """Square root of App. C's variance of the share, p^k (1 - p^k) / N."""
        return math.sqrt(self.expected * (1 - self.expected) / max(1, self.num_tokens))


def count_corrupted(
    sequences: Iterable[tuple[int, IntArray]], masking: MaskingConfig, special: SpecialTokens, *, seed: int, epoch: int
) -> CorruptedShare:
    """Mask sequences as training does and count the tokens that lost every copy.

    Args:
        sequences: (sample index, (n,) tokens without [CLS] and the last [SEP]).
        masking: Of the recipe; the law holds for `scheme: bernoulli`.
        special: Special token ids; special tokens inside a sequence are not counted.
        seed, epoch: Whose masks.
    """
    ratio, repeats = masking.mask_ratio, masking.num_repeats
    num_tokens, num_corrupted, num_forced = 0, 0, 0.0
    never_masked = np.fromiter(special.never_masked, dtype=np.int64)
    for index, token_ids in sequences:
        masked = mask_sequence(token_ids, masking, special, sample_rng(seed, epoch, index))
        masked_copies = np.bincount(masked.target_source, minlength=len(token_ids) + 1)
        num_corrupted += int((masked_copies == repeats).sum())
        num_maskable = int((~np.isin(token_ids, never_masked)).sum())
        num_tokens += num_maskable
        if repeats == 1 and num_maskable:
            num_forced += (1 - ratio) ** num_maskable
    law = ratio**repeats
    return CorruptedShare(num_tokens, num_corrupted, law, law + num_forced / max(1, num_tokens))
