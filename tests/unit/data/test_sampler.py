"""Data order: every sequence once an epoch, budgets kept, by seed and epoch alone; the batches of a step."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exlm_cli.config.sections import PAIRS_PER_POSITION
from exlm_cli.cost.counts import FlopCounter, count_sequence_flops
from exlm_cli.data.corpus.shards import ShardWriter, TokenDataset
from exlm_cli.data.sampler import Feed, cut_microbatches, plan_epoch, prefetch
from tests.plain_hash import plain_hash
from tests.tiny import CHAIN, SPECIAL, per_sequence, tiny_recipe

LENGTHS = np.random.default_rng(0).integers(4, 60, size=501)


def _plan(budget, epoch=0, seed=1, bucket_steps=4, lengths=LENGTHS):
    return plan_epoch(lengths, seed=seed, epoch=epoch, bucket_steps=bucket_steps, **budget)


def test_the_order_is_that_of_hashes_whatever_the_version_of_numpy():
    """Sequences and steps stand by SplitMix64 of (seed, epoch, stream, place), worked out here in whole numbers."""
    lengths, seed, epoch = np.array([4, 9, 5, 7, 6, 8, 4, 5, 12, 3, 7, 6]), 1, 2
    order = sorted(range(12), key=lambda i: plain_hash(seed, epoch, 4, i))
    pairs = [order[start : start + 2] for start in range(0, 12, 2)]
    budget = {"batch_sequences": 2, "batch_tokens": None}
    assert [step.tolist() for step in _plan(budget, epoch, seed, 1, lengths)] == pairs
    expected = []
    for window in (0, 6):
        by_length = sorted(order[window : window + 6], key=lambda i: lengths[i])
        steps = [by_length[start : start + 2] for start in (0, 2, 4)]
        movable = 3 if window == 0 else 2
        expected += [steps[i] for i in sorted(range(movable), key=lambda i: plain_hash(seed, epoch, 5, window, i))]
        expected += steps[movable:]
    assert [step.tolist() for step in _plan(budget, epoch, seed, 3, lengths)] == expected


def test_no_step_is_a_small_remainder():
    lengths = np.random.default_rng(0).lognormal(3.7, 0.35, 20_000).astype(np.int64) + 2
    plan = _plan({"batch_sequences": None, "batch_tokens": 4000}, lengths=lengths, bucket_steps=16)
    totals = np.array([lengths[step].sum() for step in plan])
    assert totals.max() <= 4000
    assert totals.min() > 0.9 * 4000


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=120),
    st.integers(0, 60),
    st.sampled_from([1, 2, 5, 16]),
    st.integers(0, 3),
)
def test_every_epoch_has_the_same_number_of_steps_and_every_sequence_once(lengths, spare, bucket_steps, seed):
    """Each step keeps its budget, and loses less than a longest sequence of it; so does each window of steps."""
    longest, total = max(lengths), sum(lengths)
    budget = longest + spare
    counts = set()
    for epoch in range(4):
        plan = plan_epoch(
            np.array(lengths), seed=seed, epoch=epoch, batch_sequences=None, batch_tokens=budget,
            bucket_steps=bucket_steps,
        )  # fmt: skip
        counts.add(len(plan))
        assert sorted(np.concatenate(plan)) == list(range(len(lengths)))
        assert all(0 < sum(lengths[i] for i in step) <= budget for step in plan)
    assert len(counts) == 1
    in_window = bucket_steps * (budget - longest) - longest
    most = bucket_steps * math.ceil(total / in_window) if in_window > 0 else len(lengths)
    assert math.ceil(total / budget) <= counts.pop() <= most


def test_sequences_of_one_length_are_drawn_freely_in_every_epoch():
    """Of 40 sequences in 10 steps of 4, those that share a step with the first are each of the others equally often."""
    budget = {"batch_sequences": None, "batch_tokens": 40}
    counts, num_epochs = np.zeros(40), 1000
    for epoch in range(num_epochs):
        plan = _plan(budget, epoch, lengths=np.full(40, 10), bucket_steps=3)
        counts[next(step for step in plan if 0 in step)] += 1
    share = 3 / 39
    assert counts[0] == num_epochs
    assert np.abs(counts[1:] - num_epochs * share).max() < 5 * math.sqrt(num_epochs * share * (1 - share))


def test_a_sequence_longer_than_a_microbatch_has_one_of_its_own():
    assert [part.tolist() for part in cut_microbatches(np.array([50, 4, 60, 4]), 10)] == [[1, 3], [0], [2]]
    assert list(cut_microbatches(np.empty(0, dtype=np.int64), 10)) == []


def test_microbatches_have_one_length_where_that_costs_at_most_twice_their_number():
    """Two lengths of text, 40 microbatches of 25 sequences of the one and 40 of the other; 51 lengths, 100 in all."""
    text = np.where(np.random.default_rng(0).random(2000) < 0.5, 740, 743)
    parts = list(cut_microbatches(text, 25 * 743))
    assert all(len(set(text[part])) == 1 for part in parts)
    assert len(parts) <= 82
    molecules = list(cut_microbatches(LENGTHS, 3000))
    assert len(molecules) == len(list(cut_microbatches(np.sort(LENGTHS), 3000))) < 14
    assert any(len(set(LENGTHS[part])) > 1 for part in molecules)


def test_few_masks_go_with_few_and_pairs_of_nodes_are_bounded():
    """40 texts of one length with 1 to 40 masks of 4 states; 10 positions of 512 pairs hold 5,120 pairs of nodes."""
    num_nodes = 4 * np.random.default_rng(0).permutation(np.arange(1, 41)) + 2
    parts = list(cut_microbatches(np.full(40, 1), 10, num_nodes))
    assert sorted(np.concatenate(parts).tolist()) == list(range(40))
    assert all(len(part) * num_nodes[part].max() ** 2 <= 10 * PAIRS_PER_POSITION or len(part) == 1 for part in parts)
    assert max(map(len, parts)) == 6  # of 6 masks at most: 6 * 26^2; ten positions would hold ten
    assert np.concatenate([np.sort(num_nodes[part]) for part in parts]).tolist() == sorted(num_nodes)
    wide = list(cut_microbatches(np.full(40, 100), 4000, num_nodes))
    assert [len(part) for part in wide] == [40]


def test_prefetch_keeps_the_order_and_raises_where_the_item_was_due():
    assert list(prefetch(())) == []
    made = prefetch(1 // x for x in (2, 1, 0))
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(made)


SCHEMES: list[dict[str, Any]] = [
    {"masking": {"mask_ratio": 0.35}},
    {"masking": {"mask_ratio": 0.35}, "model": CHAIN},
    {"masking": {"mask_ratio": 0.35, "scheme": "bernoulli", "num_repeats": 2}, "objective": "mlm"},
    {"masking": {"mask_ratio": [0, 0.6], "place": "mixed"}, "model": CHAIN},
    {"masking": {"mask_ratio": [0.1, 0.5], "place": "spans"}},
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, SPECIAL.vocab_size, "random") as writer:
        writer.add([rng.integers(0, SPECIAL.vocab_size, length).tolist() for length in rng.integers(1, 15, 300)])
    return TokenDataset(folder, SPECIAL.vocab_size)


@pytest.mark.parametrize("sections", SCHEMES)
def test_a_sequence_is_the_same_alone_and_its_length_and_flops_are_known_before_it_is_made(dataset, sections):
    """Each of a step comes once, in microbatches that keep the budget."""
    recipe = tiny_recipe(**sections, train={"microbatch_tokens": 64})
    feed = Feed(dataset, recipe, SPECIAL, 2, FlopCounter(recipe, SPECIAL.vocab_size))
    counted = recipe.changed({"tokenizer.vocab_size": SPECIAL.vocab_size})
    indices = np.arange(0, 300, 7)
    lengths, num_nodes = feed.sizes(indices)
    lengths = dict(zip(indices.tolist(), lengths.tolist(), strict=True))
    nodes = {} if num_nodes is None else dict(zip(indices.tolist(), num_nodes.tolist(), strict=True))
    assert bool(nodes) == (recipe.has_transitions and isinstance(recipe.masking.mask_ratio, tuple))
    seen = []
    for batch in feed.microbatches(indices, torch.device("cpu")):
        assert batch.token_ids.numel() <= 64
        flops = 0.0
        for b, index in enumerate(batch.sample_index.tolist()):
            seen.append(index)
            alone = feed.batch(np.array([index]))
            assert lengths[index] == int(batch.lengths[b]) == alone.token_ids.shape[1]
            assert nodes.get(index) in (None, int(batch.state_lengths[b]))
            for field in per_sequence(batch):
                in_company, itself = getattr(batch, field.name)[b], getattr(alone, field.name)[0]
                assert torch.equal(in_company[: len(itself)] if itself.ndim else in_company, itself), field.name
            flops += count_sequence_flops(counted, int(batch.lengths[b]), int(batch.target_lengths[b])).total
        assert batch.flops == pytest.approx(flops)
    assert sorted(seen) == indices.tolist()
