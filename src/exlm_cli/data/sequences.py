"""Padded sequences of token ids, before masking and after it. No torch here.

Axes: B sequences, L tokens with [CLS] and [SEP], M masked tokens of all sequences.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


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
class MaskedSequences:
    """Sequences after repetition and masking, before expansion.

    Attributes:
        input_ids: (B, L) tokens, [CLS] first and [SEP] last, with [MASK] (or a kept or random token) at masked
            positions, [PAD] beyond `lengths`.
        lengths: (B,) tokens of each sequence.
        is_masked: (B, L) True at the targets.
        target_ids: (M,) original tokens at these positions, sequence by sequence.
        target_source: (M,) index, in the sequence before repetition, of the token each target is a copy of; [CLS] is 0.
        sample_index: (B,) index of each sequence in its data set.
    """

    input_ids: IntArray
    lengths: IntArray
    is_masked: BoolArray
    target_ids: IntArray
    target_source: IntArray
    sample_index: IntArray
