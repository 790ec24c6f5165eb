"""Share of the tokens that Repeated MLM corrupts: those whose copies are all masked (section 3.1, App. C)."""

import math
from collections.abc import Iterable

import numpy as np

from exlm_cli.config.sections import MaskingConfig
from exlm_cli.data.masking import IntArray, SpecialTokens, mask_sequence, sample_rng
from exlm_cli.experiments.results import Corruption


def count_corrupted(
    sequences: Iterable[tuple[int, IntArray]], masking: MaskingConfig, special: SpecialTokens, *, seed: int, epoch: int
) -> Corruption:
    """Mask sequences as training does and count the tokens that lost every copy.

    Args:
        sequences: (sample index, (n,) tokens without [CLS] and the last [SEP]).
        masking: Of the recipe; the law holds for `scheme: bernoulli`.
        special: Special token ids; special tokens inside a sequence are not counted.
        seed, epoch: Select the masks.
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
    law, divisor = ratio**repeats, max(1, num_tokens)
    return Corruption(
        num_tokens=num_tokens,
        num_corrupted=num_corrupted,
        expected=law,
        expected_with_floor=law + num_forced / divisor,
        measured=num_corrupted / divisor,
        standard_error=math.sqrt(law * (1 - law) / divisor),
    )
