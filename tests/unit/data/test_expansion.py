"""Expansion: the worked example of section 4.2 by hand, and the layout of padded batches."""

import numpy as np
import pytest
import torch

from exlm_cli.data.batch import batch_from_masked_ids, collate
from exlm_cli.data.expansion import expand
from exlm_cli.data.masking import MaskedSequence
from tests.tiny import SPECIAL, tiny_batch, tiny_recipe


def _masked() -> MaskedSequence:
    """[CLS] a [MASK] b [MASK] [SEP], the targets being 20 and 21."""
    return MaskedSequence(np.array([1, 10, 3, 11, 3, 2]), np.array([2, 4]), np.array([20, 21]), np.array([2, 4]))


def test_a_mask_becomes_k_adjacent_clones_with_2d_positions() -> None:
    expanded = expand(_masked(), 3, "exlm")
    np.testing.assert_array_equal(expanded.token_ids, [1, 10, 3, 3, 3, 11, 3, 3, 3, 2])
    np.testing.assert_array_equal(
        expanded.positions, [(0, 0), (1, 0), (2, 1), (2, 2), (2, 3), (3, 0), (4, 1), (4, 2), (4, 3), (5, 0)]
    )
    np.testing.assert_array_equal(expanded.node_index, [0, 2, 3, 4, 6, 7, 8, 9])
    np.testing.assert_array_equal(expanded.node_mask, [-1, 0, 0, 0, 1, 1, 1, -1])


def test_an_mlm_expands_nothing_and_has_no_clone_index() -> None:
    expanded = expand(_masked(), 1, "mlm")
    np.testing.assert_array_equal(expanded.token_ids, _masked().input_ids)
    np.testing.assert_array_equal(expanded.positions, [(j, 0) for j in range(6)])
    np.testing.assert_array_equal(expanded.node_index, [0, 2, 4, 5])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_lengths_are_those_of_the_design(k: int) -> None:
    recipe = tiny_recipe(masking={"num_states_per_mask": k})
    batch = tiny_batch(recipe)
    num_masks = batch.target_lengths
    torch.testing.assert_close(batch.state_lengths, k * num_masks + 2)
    torch.testing.assert_close(batch.lengths, torch.tensor([9, 4, 12]) + 2 + (k - 1) * num_masks)


def test_padding_is_marked_everywhere() -> None:
    batch = collate([expand(_masked(), 2, "exlm"), _without_masks()], [7, 8], SPECIAL.pad)
    assert batch.token_ids[1, 3:].eq(SPECIAL.pad).all()
    assert batch.node_mask[1].eq(-1).all()
    assert batch.target_lengths.tolist() == [2, 0]
    assert batch.target_source[1].eq(-1).all()
    assert batch.sample_index.tolist() == [7, 8]


def _without_masks():
    return expand(MaskedSequence(np.array([1, 9, 2]), *(np.empty(0, dtype=np.int64),) * 3), 2, "exlm")


def test_a_batch_without_any_mask_still_has_one_target_column() -> None:
    batch = collate([_without_masks()], [0], SPECIAL.pad)
    assert batch.target_ids.shape == (1, 1)
    assert batch.state_lengths.tolist() == [2]


def test_given_masks_are_expanded_like_drawn_ones() -> None:
    batch = batch_from_masked_ids(_masked().input_ids, mask_id=3, pad_id=0, num_states_per_mask=3, objective="exlm")
    reference = collate([expand(_masked(), 3, "exlm")], [0], 0)
    for name in ("token_ids", "positions", "lengths", "node_index", "node_mask", "state_lengths", "target_lengths"):
        torch.testing.assert_close(getattr(batch, name), getattr(reference, name))
