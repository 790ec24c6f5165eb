"""One or two texts as one sequence.

[CLS] a [SEP] b [SEP] is BERT's form. RoBERTa in fairseq, and so the official ExLM code, writes two separators between
the texts (`<s> a </s></s> b </s>`). Here pre-training sets documents apart by a single [SEP] and never shows two in a
row, so one is what a checkpoint knows. There are no segment embeddings, as in RoBERTa.
"""

from collections.abc import Sequence

import numpy as np

from exlm_cli.data.masking import IntArray
from exlm_cli.data.tokenizer import Tokenizer


def encode_pairs(
    rows: Sequence[tuple[str, ...]], tokenizer: Tokenizer, sequence_length: int
) -> tuple[tuple[IntArray, ...], int]:
    """Tokenise rows of one or two texts.

    Args:
        rows: Each with as many texts as the first one.
        tokenizer: Of the checkpoint.
        sequence_length: Most tokens of a sequence, [CLS] and [SEP] included; at least 5.

    Returns:
        A sequence of tokens for each row, and how many rows had to be cut.
    """
    if not rows:
        return (), 0
    encoded = [tokenizer.encode_batch(texts) for texts in zip(*rows, strict=True)]
    budget = sequence_length - 1 - len(encoded)
    sequences = []
    num_cut = 0
    for pieces in zip(*encoded, strict=True):
        kept = longest_first([len(piece) for piece in pieces], budget)
        num_cut += sum(kept) < sum(map(len, pieces))
        ids = [tokenizer.cls_id]
        for piece, length in zip(pieces, kept, strict=True):
            ids += [*piece[:length], tokenizer.sep_id]
        sequences.append(np.array(ids, dtype=np.int64))
    return tuple(sequences), num_cut


def longest_first(lengths: Sequence[int], budget: int) -> list[int]:
    """Return how much of each of one or two texts is kept: tokens go one by one from the end of the longer text.

    Of two that are equally long the second one loses a token, as in BERT.
    """
    if len(lengths) == 1:
        return [min(lengths[0], budget)]
    first, second = lengths
    kept_second = min(second, max(budget - first, budget // 2))
    return [min(first, budget - kept_second), kept_second]
