"""Batches of a step: every sequence once, as it would be alone, of the length that its microbatch was cut for."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.data.sampler import Feed
from tests.tiny import SPECIAL, tiny_recipe

CPU = torch.device("cpu")
SCHEMES: list[dict[str, Any]] = [
    {"masking": {"mask_ratio": 0.35}},
    {"masking": {"mask_ratio": 0.35, "scheme": "bernoulli", "num_repeats": 2}, "objective": "mlm"},
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, SPECIAL.vocab_size, "random") as writer:
        writer.add([rng.integers(0, SPECIAL.vocab_size, length).tolist() for length in rng.integers(1, 15, 300)])
    return TokenDataset(folder)


@pytest.mark.parametrize("sections", SCHEMES)
@pytest.mark.parametrize("microbatch_tokens", [64, 100_000])
def test_every_sequence_of_a_step_comes_once_within_the_budget(dataset, sections, microbatch_tokens):
    feed = Feed(dataset, tiny_recipe(**sections, train={"microbatch_tokens": microbatch_tokens}), SPECIAL, epoch=2)
    indices = np.arange(299, 0, -2)
    batches = list(feed.microbatches(indices, CPU))
    assert sorted(torch.cat([batch.sample_index for batch in batches]).tolist()) == sorted(indices)
    assert max(batch.token_ids.numel() for batch in batches) <= max(microbatch_tokens, int(batches[-1].lengths.max()))


@pytest.mark.parametrize("sections", SCHEMES)
def test_a_sequence_is_the_same_alone_and_its_length_is_known_before_it_is_made(dataset, sections):
    feed = Feed(dataset, tiny_recipe(**sections), SPECIAL, epoch=2)
    indices = np.arange(0, 300, 7)
    lengths = dict(zip(indices.tolist(), feed.expanded_lengths(indices).tolist(), strict=True))
    for batch in feed.microbatches(indices, CPU):
        for b, index in enumerate(batch.sample_index.tolist()):
            alone = feed.batch(np.array([index]))
            assert lengths[index] == int(batch.lengths[b]) == alone.token_ids.shape[1]
            for field in fields(batch)[:10]:  # those with an axis of sequences
                in_company, itself = getattr(batch, field.name)[b], getattr(alone, field.name)[0]
                assert torch.equal(in_company[: len(itself)] if itself.ndim else in_company, itself), field.name


def test_lengths_counted_block_by_block_are_those_counted_at_once(dataset, monkeypatch):
    feed, indices = Feed(dataset, tiny_recipe(), SPECIAL, epoch=0), np.arange(300)
    at_once = feed.expanded_lengths(indices)
    monkeypatch.setattr("exlm_cli.data.sampler._BLOCK_TOKENS", 100)
    assert feed.expanded_lengths(indices).tolist() == at_once.tolist()
    assert feed.expanded_lengths(indices[:0]).tolist() == []


def test_the_epoch_changes_the_masks_and_nothing_else(dataset):
    indices = np.arange(50)
    first, second = (Feed(dataset, tiny_recipe(), SPECIAL, epoch).batch(indices) for epoch in (0, 1))
    assert torch.equal(first.sample_index, second.sample_index)
    assert not torch.equal(first.target_source, second.target_source)
