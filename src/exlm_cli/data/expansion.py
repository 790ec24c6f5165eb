"""Expansion of each masked token into k states: expanded tokens, 2D positions and DAG nodes (section 4.2).

Axes: B sequences, L tokens before expansion, X expanded positions, S nodes, T targets, M masks of all sequences.
"""

import numpy as np
import torch

from exlm_cli.config.sections import Objective
from exlm_cli.data.batch import Batch
from exlm_cli.data.sequences import BoolArray, IntArray, MaskedSequences


def expand(masked: MaskedSequences, num_states_per_mask: int, objective: Objective, *, pad_id: int) -> Batch:
    """Replace every masked position by k adjacent copies, list the DAG's nodes, and pad, all on the CPU.

    Clone c of the mask at position i gets the 2D position (i, c), c = 1..k; everything else gets (j, 0). For
    `objective="mlm"` all positions are (j, 0), and k must be 1.

    Args:
        masked: Sequences, each with any number of masked positions.
        num_states_per_mask: k.
        objective: Decides the positions.
        pad_id: [PAD].
    """
    k = num_states_per_mask
    num_sequences, longest_input = masked.input_ids.shape
    target_lengths = masked.is_masked.sum(1)
    lengths = masked.lengths + (k - 1) * target_lengths
    longest, most_masks = int(lengths.max()), int(target_lengths.max())
    num_columns = max(1, most_masks)
    is_target_BT = np.arange(num_columns) < target_lengths[:, None]

    is_token_BL = np.arange(longest_input) < masked.lengths[:, None]
    copies_BL = np.where(masked.is_masked, k, is_token_BL)
    # a last column of [PAD] fills every sequence up to the longest, so that all rows have equal length
    copies = np.concatenate([copies_BL, (longest - lengths)[:, None]], axis=1).ravel()
    token_ids = np.concatenate([masked.input_ids, np.full((num_sequences, 1), pad_id)], axis=1)
    token_index = np.tile(np.append(np.arange(longest_input), 0), num_sequences)
    positions = np.zeros((num_sequences, longest, 2), dtype=np.int64)
    positions[..., 0] = np.repeat(token_index, copies).reshape(num_sequences, longest)

    first_BL = np.cumsum(copies_BL, axis=1) - copies_BL
    inner_Mk = first_BL[masked.is_masked][:, None] + np.arange(k)
    if objective == "exlm":
        row_M = np.repeat(np.arange(num_sequences), target_lengths)
        positions[row_M[:, None], inner_Mk, 1] = np.arange(1, k + 1)

    # without masks there is a column of targets, which is padding, but no inner node
    inner_BTk = np.zeros((num_sequences, num_columns, k), dtype=np.int64)
    inner_BTk[is_target_BT] = inner_Mk
    mask_BTk = np.where(is_target_BT, np.arange(num_columns), -1)[..., None].repeat(k, axis=2)
    num_inner = k * most_masks
    node_index = np.zeros((num_sequences, num_inner + 2), dtype=np.int64)
    node_index[:, 1:-1] = inner_BTk.reshape(num_sequences, -1)[:, :num_inner]
    state_lengths = k * target_lengths + 2
    node_index[np.arange(num_sequences), state_lengths - 1] = lengths - 1
    node_mask = np.full_like(node_index, -1)
    node_mask[:, 1:-1] = mask_BTk.reshape(num_sequences, -1)[:, :num_inner]
    return Batch(
        token_ids=torch.from_numpy(np.repeat(token_ids.ravel(), copies).reshape(num_sequences, longest)),
        positions=torch.from_numpy(positions),
        lengths=torch.from_numpy(lengths),
        node_index=torch.from_numpy(node_index),
        node_mask=torch.from_numpy(node_mask),
        state_lengths=torch.from_numpy(state_lengths),
        target_ids=torch.from_numpy(_at(is_target_BT, masked.target_ids, pad_id)),
        target_source=torch.from_numpy(_at(is_target_BT, masked.target_source, -1)),
        target_lengths=torch.from_numpy(target_lengths),
        sample_index=torch.from_numpy(masked.sample_index),
        inner_index=torch.from_numpy(np.flatnonzero(node_mask >= 0)),
        target_index=torch.from_numpy(np.flatnonzero(is_target_BT)),
        is_padded=bool((lengths < longest).any()),
        num_tokens=int(masked.lengths.sum()),
    )


def batch_from_masked_ids(
    input_ids: IntArray, *, mask_id: int, pad_id: int, num_states_per_mask: int, objective: Objective
) -> Batch:
    """Build a batch from tokens that already contain [MASK]; its targets are unknown and set to [PAD].

    `input_ids` are (B, L), [CLS] first, [SEP] last, [PAD] beyond; `num_states_per_mask` is 1 for an MLM.
    """
    is_masked = input_ids == mask_id
    target_source = is_masked.nonzero()[1]
    masked = MaskedSequences(
        input_ids=input_ids,
        lengths=(input_ids != pad_id).sum(1),
        is_masked=is_masked,
        target_ids=np.full_like(target_source, pad_id),
        target_source=target_source,
        sample_index=np.arange(len(input_ids)),
    )
    return expand(masked, num_states_per_mask, objective, pad_id=pad_id)


def _at(is_target_BT: BoolArray, values_M: IntArray, padding: int) -> IntArray:
    """Return (B, T) values of the targets, one row for each sequence."""
    padded = np.full(is_target_BT.shape, padding, dtype=np.int64)
    padded[is_target_BT] = values_M
    return padded
