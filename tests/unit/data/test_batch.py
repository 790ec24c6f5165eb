"""Expansion: the worked example of section 4.2 by hand, and the layout of padded batches."""

from dataclasses import fields

import pytest
import torch

from exlm_cli.data.batch import Batch, batch_from_masked_ids, expand
from tests.tiny import SPECIAL, masked_by_hand, per_sequence

INPUT_IDS = [1, 10, 3, 11, 3, 2]
"""[CLS] a [MASK] b [MASK] [SEP]."""


def _expanded(k: int, place: str, *rows: list[int], targets: tuple[int, ...] = (20, 21)) -> Batch:
    masked = masked_by_hand(rows or [INPUT_IDS], targets)
    return expand(masked, k, expands_input=place == "input", pad_id=SPECIAL.pad_id)


def test_a_mask_becomes_k_adjacent_clones_with_2d_positions():
    batch = _expanded(3, "input")
    assert batch.token_ids.tolist() == [[1, 10, 3, 3, 3, 11, 3, 3, 3, 2]]
    clones = [[0, 0], [1, 0], [2, 1], [2, 2], [2, 3], [3, 0], [4, 1], [4, 2], [4, 3], [5, 0]]
    assert batch.positions.tolist() == [clones]
    assert batch.node_index.tolist() == [[0, 2, 3, 4, 6, 7, 8, 9]]
    assert batch.node_mask.tolist() == [[-1, 0, 0, 0, 1, 1, 1, -1]]
    assert batch.target_ids.tolist() == [[20, 21]]
    assert batch.target_source.tolist() == [[2, 4]]


def test_without_expansion_the_input_stays_and_the_node_of_a_mask_is_at_its_place():
    """An MLM, and a chain of any k."""
    batch = _expanded(3, "none")
    assert batch.token_ids.tolist() == [INPUT_IDS]
    assert batch.positions is None
    assert batch.lengths.tolist() == [6]
    assert batch.node_index.tolist() == [[0, 2, 4, 5]]
    assert batch.node_mask.tolist() == [[-1, 0, 1, -1]]
    assert batch.state_lengths.tolist() == [4]
    assert batch.target_ids.tolist() == [[20, 21]]


@pytest.mark.parametrize(
    "rows",
    [
        [INPUT_IDS, [1, 9, 2], [1, 3, 3, 3, 2], [1, 8, 8, 8, 8, 8, 8, 3, 2]],
        [INPUT_IDS, [1, 8, 8, 8, 8, 3, 2]],  # eight positions each, once expanded
        [INPUT_IDS, [1, 3, 9, 9, 3, 2]],
    ],
)
@pytest.mark.parametrize("place", ["input", "none"])
def test_a_sequence_is_expanded_alike_in_any_company_and_padded_by_its_rules(rows, place):
    targets = tuple(range(20, 20 + sum(row.count(SPECIAL.mask_id) for row in rows)))
    together = _expanded(2, place, *rows, targets=targets)
    assert together.sample_index.tolist() == list(range(len(rows)))
    assert together.is_even == (len({row.count(SPECIAL.mask_id) for row in rows}) == 1)
    padding = {"node_mask": -1, "target_source": -1}
    taken = 0
    for b, row in enumerate(rows):
        num_masks = row.count(SPECIAL.mask_id)
        alone = _expanded(2, place, row, targets=targets[taken : taken + num_masks])
        taken += num_masks
        assert together.lengths[b] == alone.lengths[0] == len(row) + num_masks * (place == "input")
        assert together.target_lengths[b] == num_masks
        assert together.state_lengths[b] == (2 if place == "input" else 1) * num_masks + 2
        for field in per_sequence(together):
            wide, narrow = getattr(together, field.name)[b], getattr(alone, field.name)[0]
            if wide.ndim:  # token ids, positions, nodes and targets
                assert torch.equal(wide[: len(narrow)], narrow), field.name
                assert wide[len(narrow) :].eq(padding.get(field.name, 0)).all(), field.name


def test_a_batch_without_any_mask_still_has_one_target_column():
    batch = _expanded(2, "input", [1, 9, 2], targets=())
    assert batch.target_ids.tolist() == [[SPECIAL.pad_id]]
    assert batch.target_source.tolist() == [[-1]]
    assert batch.target_lengths.tolist() == [0]
    assert batch.state_lengths.tolist() == [2]
    assert batch.node_index.tolist() == [[0, 2]]


@pytest.mark.parametrize("place", ["input", "none"])
def test_given_masks_are_expanded_like_drawn_ones(place):
    rows, targets = (INPUT_IDS, [1, 3, 2]), (20, 21, 22)
    reference = _expanded(3, place, *rows, targets=targets)
    input_ids = masked_by_hand(rows, targets).input_ids
    batch = batch_from_masked_ids(input_ids, mask_id=3, pad_id=0, num_states_per_mask=3, expands_input=place == "input")
    for field in fields(Batch):
        found, expected = getattr(batch, field.name), getattr(reference, field.name)
        if field.name != "target_ids" and expected is not None:
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), field.name
    assert (batch.positions is None) == (reference.positions is None) == (place == "none")
    assert batch.target_ids.tolist() == [[0, 0], [0, 0]]
