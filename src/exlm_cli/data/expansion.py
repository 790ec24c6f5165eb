"""Where a masked token becomes k states: expanded tokens, 2D positions and DAG nodes (section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from exlm_cli.config.sections import Objective
from exlm_cli.data.batch import Batch
from exlm_cli.data.masking import IntArray, MaskedSequence


@dataclass(frozen=True)
class ExpandedSequence:
    """One sequence as the encoder sees it; the fields are those of `Batch`, unpadded."""

    token_ids: IntArray
    positions: IntArray
    node_index: IntArray
    node_mask: IntArray
    target_ids: IntArray
    target_source: IntArray


def expand(masked: MaskedSequence, num_states_per_mask: int, objective: Objective) -> ExpandedSequence:
    """Replace every masked position by k adjacent copies and list the DAG's nodes.

    Clone c of the mask at position i gets the 2D position (i, c), c = 1..k; everything else stands at (j, 0). For
    `objective="mlm"` nothing is a clone: all positions are (j, 0) and k must be 1.

    Args:
        masked: Sequence of L tokens with T masked positions.
        num_states_per_mask: k.
        objective: Whose positions to give.

    Returns:
        Arrays of L + (k - 1) * T positions and k * T + 2 nodes.
    """
    k = num_states_per_mask
    length = len(masked.input_ids)
    num_masks = len(masked.masked_positions)
    is_masked = np.zeros(length, dtype=bool)
    is_masked[masked.masked_positions] = True
    copies = np.where(is_masked, k, 1)
    token_index = np.repeat(np.arange(length), copies)
    first_position = np.cumsum(copies) - copies

    clone = np.zeros(len(token_index), dtype=np.int64)
    inner_nodes = (first_position[masked.masked_positions][:, None] + np.arange(k)).reshape(-1)
    if objective == "exlm":
        clone[inner_nodes] = np.tile(np.arange(1, k + 1), num_masks)
    return ExpandedSequence(
        token_ids=masked.input_ids[token_index],
        positions=np.stack([token_index, clone], axis=1),
        node_index=np.concatenate([[0], inner_nodes, [len(token_index) - 1]]).astype(np.int64),
        node_mask=np.concatenate([[-1], np.repeat(np.arange(num_masks), k), [-1]]).astype(np.int64),
        target_ids=masked.target_ids,
        target_source=masked.target_source,
    )


def collate(sequences: Sequence[ExpandedSequence], sample_index: Sequence[int], pad_id: int) -> Batch:
    """Pad expanded sequences to one `Batch` on the CPU; every axis has at least one entry."""
    lengths = [len(s.token_ids) for s in sequences]
    num_nodes = [len(s.node_index) for s in sequences]
    num_targets = [len(s.target_ids) for s in sequences]
    longest, most_nodes, most_targets = max(lengths), max(num_nodes), max(1, *num_targets)
    return Batch(
        token_ids=_pad([s.token_ids for s in sequences], longest, pad_id),
        positions=torch.stack(
            [_pad([s.positions[:, axis] for s in sequences], longest, 0) for axis in range(2)], dim=-1
        ),
        lengths=torch.tensor(lengths),
        node_index=_pad([s.node_index for s in sequences], most_nodes, 0),
        node_mask=_pad([s.node_mask for s in sequences], most_nodes, -1),
        state_lengths=torch.tensor(num_nodes),
        target_ids=_pad([s.target_ids for s in sequences], most_targets, pad_id),
        target_source=_pad([s.target_source for s in sequences], most_targets, -1),
        target_lengths=torch.tensor(num_targets),
        sample_index=torch.tensor(list(sample_index)),
    )


def batch_from_masked_ids(
    input_ids: IntArray, *, mask_id: int, pad_id: int, num_states_per_mask: int, objective: Objective
) -> Batch:
    """Build a batch of one from tokens that already contain [MASK]; its targets are unknown and set to [PAD].

    Args:
        input_ids: (L,) tokens with [CLS] first and [SEP] last.
        mask_id: Id of [MASK].
        pad_id: Id of [PAD].
        num_states_per_mask: k; 1 for an MLM.
        objective: Whose positions to give.
    """
    positions = np.flatnonzero(input_ids == mask_id)
    masked = MaskedSequence(
        input_ids=input_ids,
        masked_positions=positions,
        target_ids=np.full(len(positions), pad_id, dtype=np.int64),
        target_source=positions,
    )
    return collate([expand(masked, num_states_per_mask, objective)], [0], pad_id)


def _pad(rows: Sequence[IntArray], width: int, value: int) -> torch.Tensor:
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded)
