"""Unigrams: what the frequencies of tokens alone know about masked tokens, the reference for every pre-training."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from exlm_cli.data.batch import Batch
from exlm_cli.data.corpus.shards import TokenDataset

MAX_COUNTED = 1 << 26
"""At most this many training tokens are counted, in blocks spread evenly over all."""
_BLOCK_TOKENS = 1 << 16


@dataclass(frozen=True)
class UnigramScores:
    """Unigrams on the targets of a validation.

    Attributes:
        loss: Nats per target, the mean over sequences, as `loss_given_length` of the model.
        accuracy: Share of the targets that are the most frequent token.
    """

    loss: float
    accuracy: float


def token_log_probs(dataset: TokenDataset, vocab_size: int) -> NDArray[np.float64]:
    """Return the (vocab_size,) log frequencies of tokens, each counted once more than it occurs."""
    num_blocks = max(1, math.ceil(dataset.num_tokens / _BLOCK_TOKENS))
    wanted = min(num_blocks, MAX_COUNTED // _BLOCK_TOKENS)
    counts = np.ones(vocab_size, dtype=np.int64)
    for block in np.linspace(0, num_blocks - 1, wanted).round().astype(np.int64).tolist():
        ids = dataset.read_stream(block * _BLOCK_TOKENS, (block + 1) * _BLOCK_TOKENS)
        counts += np.bincount(ids, minlength=vocab_size)
    log_prob: NDArray[np.float64] = np.log(counts / counts.sum())
    return log_prob


def score_unigrams(log_prob: NDArray[np.float64], batches: Iterable[Batch]) -> UnigramScores:
    """Score token frequencies on masked batches; sequences without targets count nothing, and no targets give NaN."""
    commonest = int(log_prob.argmax())
    losses: list[float] = []
    num_right = num_targets = 0
    for batch in batches:
        for ids, length in zip(batch.target_ids.numpy(), batch.target_lengths.tolist(), strict=True):
            if length:
                targets = ids[:length]
                losses.append(float(-log_prob[targets].mean()))
                num_right += int((targets == commonest).sum())
                num_targets += length
    if not losses:
        return UnigramScores(math.nan, math.nan)
    return UnigramScores(math.fsum(losses) / len(losses), num_right / num_targets)
