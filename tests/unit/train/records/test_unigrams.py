"""Token frequencies as a reference: counted and scored by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.train.records import unigrams
from exlm_cli.train.records.unigrams import score_unigrams, token_log_probs


def corpus(folder, *tokens):
    with ShardWriter(folder, 4, "x") as writer:
        writer.add([list(tokens)])
    return TokenDataset(folder, 4)


def batch(targets, lengths):
    return SimpleNamespace(target_ids=torch.tensor(targets), target_lengths=torch.tensor(lengths))


def test_frequencies_are_counted_with_one_more_of_each_token(tmp_path):
    probabilities = np.exp(token_log_probs(corpus(tmp_path, 1, 1, 1, 2), vocab_size=4))
    assert probabilities == pytest.approx([1 / 8, 4 / 8, 2 / 8, 1 / 8])


def test_a_large_corpus_is_counted_in_blocks_spread_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr(unigrams, "MAX_COUNTED", 2 << 16)
    tokens = np.repeat([0, 1, 2], 1 << 16)
    probabilities = np.exp(token_log_probs(corpus(tmp_path, *tokens), vocab_size=3))
    assert probabilities[0] == probabilities[2] == pytest.approx(0.5, abs=1e-4)


def test_the_loss_is_the_mean_over_sequences_of_the_mean_over_their_targets():
    log_prob = np.log([0.1, 0.6, 0.3])
    figures = score_unigrams(log_prob, [batch([[1, 1, 2], [2, 0, 0]], [3, 1]), batch([[0]], [0])])
    first, second = (2 * math.log(0.6) + math.log(0.3)) / 3, math.log(0.3)
    assert figures.loss == pytest.approx(-(first + second) / 2)
    assert figures.accuracy == pytest.approx(2 / 4)
    assert math.isnan(score_unigrams(log_prob, []).loss)
