"""Expansion: the worked example of section 4.2 by hand, and the layout of padded batches."""

from dataclasses import fields

import pytest
import torch

from exlm_cli.config.sections import ObjectiveName
from exlm_cli.data.batch import Batch, batch_from_masked_ids, expand, pack
from tests.tiny import SPECIAL, masked_by_hand, per_sequence

INPUT_IDS = [1, 10, 3, 11, 3, 2]
"""[CLS] a [MASK] b [MASK] [SEP]."""


def _expanded(k: int, objective: ObjectiveName, *rows: list[int], targets: tuple[int, ...] = (20, 21)) -> Batch:
    return expand(masked_by_hand(rows or [INPUT_IDS], targets), k, objective, pad_id=SPECIAL.pad_id)


def test_a_mask_becomes_k_adjacent_clones_with_2d_positions():
    batch = _expanded(3, "exlm")
    assert batch.token_ids.tolist() == [[1, 10, 3, 3, 3, 11, 3, 3, 3, 2]]
    clones = [[0, 0], [1, 0], [2, 1], [2, 2], [2, 3], [3, 0], [4, 1], [4, 2], [4, 3], [5, 0]]
    assert batch.positions.tolist() == [clones]
    assert batch.node_index.tolist() == [[0, 2, 3, 4, 6, 7, 8, 9]]
    assert batch.first_index.tolist() == [[0, 1, 2, 5, 6, 9]]
    assert batch.node_mask.tolist() == [[-1, 0, 0, 0, 1, 1, 1, -1]]
    assert batch.target_ids.tolist() == [[20, 21]]
    assert batch.target_source.tolist() == [[2, 4]]


def test_an_mlm_expands_nothing_and_has_no_clone_index():
    batch = _expanded(1, "mlm")
    assert batch.token_ids.tolist() == [INPUT_IDS]
    assert batch.positions.tolist() == [[[j, 0] for j in range(6)]]
    assert batch.node_index.tolist() == [[0, 2, 4, 5]]


@pytest.mark.parametrize(
    "rows",
    [
        [INPUT_IDS, [1, 9, 2], [1, 3, 3, 3, 2], [1, 8, 8, 8, 8, 8, 8, 3, 2]],
        [INPUT_IDS, [1, 8, 8, 8, 8, 3, 2]],  # eight positions each, once expanded
    ],
)
def test_a_sequence_is_expanded_alike_in_any_company_and_padded_by_its_rules(rows):
    targets = tuple(range(20, 20 + sum(row.count(SPECIAL.mask_id) for row in rows)))
    together = _expanded(2, "exlm", *rows, targets=targets)
    assert together.sample_index.tolist() == list(range(len(rows)))
    padding = {"node_mask": -1, "target_source": -1}
    taken = 0
    for b, row in enumerate(rows):
        num_masks = row.count(SPECIAL.mask_id)
        alone = _expanded(2, "exlm", row, targets=targets[taken : taken + num_masks])
        taken += num_masks
        assert together.lengths[b] == alone.lengths[0] == len(row) + num_masks
        assert together.target_lengths[b] == num_masks
        assert together.state_lengths[b] == 2 * num_masks + 2
        for field in per_sequence(together):
            wide, narrow = getattr(together, field.name)[b], getattr(alone, field.name)[0]
            if wide.ndim:  # token ids, positions, nodes and targets
                assert torch.equal(wide[: len(narrow)], narrow), field.name
                assert wide[len(narrow) :].eq(padding.get(field.name, 0)).all(), field.name


def test_a_batch_without_any_mask_still_has_one_target_column():
    batch = _expanded(2, "exlm", [1, 9, 2], targets=())
    assert batch.target_ids.tolist() == [[SPECIAL.pad_id]]
    assert batch.target_source.tolist() == [[-1]]
    assert batch.target_lengths.tolist() == [0]
    assert batch.state_lengths.tolist() == [2]
    assert batch.node_index.tolist() == [[0, 2]]


def test_given_masks_are_expanded_like_drawn_ones():
    rows, targets = (INPUT_IDS, [1, 3, 2]), (20, 21, 22)
    reference = _expanded(3, "exlm", *rows, targets=targets)
    input_ids = masked_by_hand(rows, targets).input_ids
    batch = batch_from_masked_ids(input_ids, mask_id=3, pad_id=0, num_states_per_mask=3, objective="exlm")
    for field in fields(Batch):
        if field.name not in ("target_ids", "packing"):
            assert torch.equal(*(torch.as_tensor(getattr(one, field.name)) for one in (batch, reference))), field.name
    assert batch.target_ids.tolist() == [[0, 0], [0, 0]]


def test_inner_nodes_and_targets_are_counted_on_the_host():
    rows, targets = [INPUT_IDS, [1, 9, 2], [1, 3, 8, 8, 8, 2]], (20, 21, 22)
    batch = _expanded(2, "exlm", *rows, targets=targets)
    assert torch.equal(batch.inner_index, (batch.node_mask.flatten() >= 0).nonzero()[:, 0])
    assert batch.target_ids.flatten()[batch.target_index].tolist() == list(targets)
    assert batch.is_padded
    assert batch.num_tokens == 15
    assert not _expanded(2, "exlm").is_padded


@pytest.mark.parametrize(
    ("rows", "has_even_context", "is_even"),
    [
        ([INPUT_IDS, [1, 3, 9, 9, 3, 2]], True, True),
        ([INPUT_IDS, [1, 9, 9, 9, 3, 2]], True, False),
        ([INPUT_IDS, [1, 8, 8, 8, 8, 3, 2]], False, False),  # eight positions each, once expanded
        ([INPUT_IDS, [1, 3, 3, 2]], False, False),
        ([[1, 9, 2], [1, 8, 2]], False, False),
    ],
)
def test_a_batch_is_even_where_tokens_and_masks_are_as_many_in_each_sequence(rows, has_even_context, is_even):
    targets = tuple(range(20, 20 + sum(row.count(SPECIAL.mask_id) for row in rows)))
    batch = _expanded(2, "exlm", *rows, targets=targets)
    assert (batch.has_even_context, batch.is_even) == (has_even_context, is_even)


@pytest.mark.parametrize("hides_further_states", [True, False])
def test_packed_positions_are_the_context_of_each_sequence_then_all_further_states(hides_further_states):
    """Enumerated position by position and node by node."""
    rows = [INPUT_IDS, [1, 9, 2], [1, 3, 8, 8, 8, 2], [1, 3, 3, 3, 2]]
    batch = pack(_expanded(3, "exlm", *rows, targets=tuple(range(20, 26))), hides_further_states=hides_further_states)
    packing, longest = batch.packing, batch.token_ids.shape[1]
    assert packing is not None
    real = [(b, x) for b, length in enumerate(batch.lengths.tolist()) for x in range(length)]
    further = [at for at in real if batch.positions[at][1] > 1 and hides_further_states]
    context = [at for at in real if at not in further]
    assert packing.source.tolist() == [b * longest + x for b, x in context + further]
    assert [int(packing.row[at]) for at in context + further] == list(range(len(real)))
    assert packing.cu_lengths.tolist() == [sum(b < end for b, _ in context) for end in range(len(rows) + 1)]
    most = max(sum(b == own for b, _ in further) for own in range(len(rows)))
    assert packing.further_place.tolist() == [
        b * most + sum(other == b for other, _ in further[:number]) for number, (b, _) in enumerate(further)
    ]
    nodes = [(b, int(x)) for b in range(len(rows)) for x in batch.node_index[b, : batch.state_lengths[b]]]
    read = [at for at in nodes if at in context]
    assert packing.read.tolist() == [int(packing.row[at]) for at in read + further]
    assert packing.cu_read.tolist() == [sum(b < end for b, _ in read) for end in range(len(rows) + 1)]
    node_rows = [int(row) for b in range(len(rows)) for row in packing.node_row[b, : batch.state_lengths[b]]]
    assert node_rows == [(read + further).index(at) for at in nodes]


def test_a_batch_goes_to_a_device_whole():
    moved = pack(_expanded(2, "exlm"), hides_further_states=True).to(torch.device("meta"))
    assert moved.packing is not None
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == len(fields(Batch)) - 5  # four of the host, and the packing
    tensors += moved.packing
    assert {tensor.device.type for tensor in tensors} == {"meta"}
